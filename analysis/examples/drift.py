"""Client drift: how far clients' models run apart, and what SCAFFOLD's corrections change.

python analysis/examples/drift.py [FOLDER]

With `run.diagnostics` fedray measures, in every round, how far the cohort's models are from their mean, and how much
their updates agree. Writes drift.png into FOLDER (runs/examples).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

import fedray

KEYS = {
    "data.clients": 10, "data.partition.kind": "label_skew", "data.partition.classes_per_client": 2,
    "model.name": "mlp", "train.local_steps": 20, "train.batch_size": 32, "train.lr": 0.05, "run.rounds": 25,
    "run.diagnostics": True, "engine.kind": "local",
}  # fmt: skip
NAMES = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD"}


def main(folder: Path = Path("runs/examples"), **settings: Any) -> dict[str, pd.DataFrame]:
    """Returns the rounds of each run."""
    found = {}
    for name in NAMES:
        keys = {**KEYS, "algorithm.name": name, "run.name": f"drift-{name}", "run.output": str(folder), **settings}
        found[name] = fedray.simulate(keys, verbose=True).metrics
    picture(found).savefig(folder / "drift.png", dpi=150)
    return found


def picture(found: dict[str, pd.DataFrame]) -> Figure:
    figure = Figure(figsize=(7.4, 3), layout="constrained")
    panels = {"spread": "distance from the mean model", "test_accuracy": "test accuracy"}
    for axes, (column, title) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for (name, rows), colour in zip(found.items(), ("black", "#d55e00"), strict=True):
            axes.plot(rows["round"], rows[column], color=colour, label=NAMES[name])
        axes.set(xlabel="rounds", ylabel=title)
        axes.legend(frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
