"""A sweep: which learning rate and which mu FedProx needs, in twelve trials side by side.

python analysis/examples/sweep.py [FOLDER]

Optuna proposes values, Ray runs the trials, and those that fall behind are stopped early. `fedray report FOLDER/sweep`
makes a page of the sweep. Writes sweep.png into FOLDER (runs/examples).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

import fedray

SPACE: dict[str, Any] = {
    "base": {
        "algorithm.name": "fedprox", "data.clients": 10, "data.partition.alpha": 0.1, "model.name": "mlp",
        "train.local_steps": 10, "train.batch_size": 32, "run.rounds": 20,
    },
    "spaces": {
        "two": {"train.lr": {"loguniform": [0.003, 1.0]}, "algorithm.mu": {"loguniform": [0.001, 1.0]}},
    },
}  # fmt: skip


def main(folder: Path = Path("runs/examples"), trials: int = 12, **settings: Any) -> pd.DataFrame:
    """Returns a table with a row for each trial."""
    asked = [f"tune.output={folder}", "tune.name=sweep", f"tune.trials={trials}", "tune.pruner.kind=asha"]
    (result,) = fedray.tune({**SPACE, "base": {**SPACE["base"], **settings}}, asked, verbose=True)
    table = result.trials
    picture(table).savefig(folder / "sweep.png", dpi=150)
    print(f"best settings: {result.best[0]}")
    return table


def picture(table: pd.DataFrame) -> Figure:
    """Returns a picture with a point for each trial."""
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.subplots()
    stopped = table["state"] != "complete"
    for name, marker, rows in (("complete", "o", table[~stopped]), ("stopped early", "v", table[stopped])):
        drawn = axes.scatter(
            rows["train.lr"], rows["algorithm.mu"], c=100 * rows["validation_accuracy"], marker=marker, s=60,
            label=name, cmap="viridis", vmin=10, vmax=100 * table["validation_accuracy"].max(),
            edgecolors="black", linewidths=0.5,
        )  # fmt: skip
    figure.colorbar(drawn, label="validation accuracy, %")
    axes.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="mu")
    axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
