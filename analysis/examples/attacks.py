"""Attacks: what two of ten clients can spoil, and what the median of updates saves.

python analysis/examples/attacks.py [FOLDER]

The attackers send the opposite of what they have learned, five times as large. Writes attacks.png into FOLDER
(runs/examples).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

import fedray

KEYS = {
    "algorithm.name": "fedavg", "data.clients": 10, "data.partition.kind": "iid", "model.name": "mlp",
    "train.local_steps": 10, "train.batch_size": 32, "train.lr": 0.05, "train.weighting": "uniform",
    "run.rounds": 25, "engine.kind": "local",
}  # fmt: skip
ATTACK = {"attack.kind": "sign_flip", "attack.fraction": 0.2, "attack.scale": 5.0}
MEDIAN = {"train.aggregation": {"kind": "median"}}
RUNS: dict[str, dict[str, Any]] = {
    "mean, nobody attacks": {}, "median, nobody attacks": MEDIAN, "mean, two attack": ATTACK,
    "median, two attack": {**MEDIAN, **ATTACK},
}  # fmt: skip


def main(folder: Path = Path("runs/examples"), **settings: Any) -> dict[str, pd.DataFrame]:
    """Returns the rounds of each run."""
    found = {}
    for name, further in RUNS.items():
        keys = {**KEYS, **further, "run.name": name.replace(", ", "-").replace(" ", "-"), "run.output": str(folder)}
        found[name] = fedray.simulate({**keys, **settings}, verbose=True).metrics
    picture(found).savefig(folder / "attacks.png", dpi=150)
    return found


def picture(found: dict[str, pd.DataFrame]) -> Figure:
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, rows in found.items():
        colour = "black" if name.startswith("mean") else "#0072b2"
        style = "--" if "nobody" in name else "-"
        axes.plot(rows["round"], 100 * rows["test_accuracy"], style, color=colour, label=name)
    axes.set(xlabel="rounds", ylabel="test accuracy, %")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
