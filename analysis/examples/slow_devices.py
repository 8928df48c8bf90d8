"""Slow devices: accuracy against time if a tenth of the clients is ten times slower.

python analysis/examples/slow_devices.py [FOLDER]

On the virtual clock the server waits for all ten clients of a round; or it draws twelve, and waits for the first ten of
them, at most 0.8 s; or it takes answers as they come. The waiting is simulated: no run takes longer on your machine.
Writes slow_devices.png into FOLDER (runs/examples).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

import fedray

SPEEDS = {"choice": [2e9] * 9 + [2e8]}
KEYS: dict[str, Any] = {
    "algorithm.name": "fedavg", "data.clients": 60, "data.partition.alpha": 0.5, "model.name": "mlp",
    "train.cohort_size": 10, "train.local_steps": 10, "train.batch_size": 32, "train.lr": 0.05, "run.rounds": 40,
    "system.flops_per_second": SPEEDS, "system.up_mbps": 10, "system.down_mbps": 20, "system.latency_ms": 50,
    "engine.kind": "local",
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "waits for all": {},
    "first ten of twelve, at most 0.8 s": {"system.deadline_seconds": 0.8, "system.over_select": 1.2},
    "as answers come": {"system.mode": "buffered", "system.concurrency": 10, "system.buffer": 10},
}


def main(folder: Path = Path("runs/examples"), **settings: Any) -> dict[str, pd.DataFrame]:
    """Returns the rounds of each run."""
    found = {}
    for name, further in RUNS.items():
        keys = {
            **KEYS,
            **further,
            "run.name": name.replace(" ", "-").replace(",", ""),
            "run.output": str(folder),
            **settings,
        }
        found[name] = fedray.simulate(keys, verbose=True).metrics
    picture(found).savefig(folder / "slow_devices.png", dpi=150)
    return found


def picture(found: dict[str, pd.DataFrame]) -> Figure:
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for (name, rows), colour in zip(found.items(), ("black", "#0072b2", "#d55e00"), strict=True):
        axes.plot(rows["virtual_seconds"], 100 * rows["test_accuracy"], color=colour, label=name)
    axes.set(xlabel="virtual seconds", ylabel="test accuracy, %")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
