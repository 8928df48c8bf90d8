"""Personal layers: what clients gain if they keep the last layer of the model to themselves.

python analysis/examples/personal_layers.py [FOLDER]

20 clients with mixtures of classes (Dirichlet, alpha 0.1) train FedAvg and FedPer, whose last layer stays at each
client. Every client scores its model on test images of its own classes. Writes personal_layers.png into FOLDER
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
    "data.clients": 20, "data.partition.kind": "dirichlet", "data.partition.alpha": 0.1, "model.name": "mlp",
    "train.local_epochs": 2, "train.batch_size": 20, "train.lr": 0.05, "run.rounds": 20, "run.eval_every": 20,
    "run.eval_clients": "all", "engine.kind": "local",
}  # fmt: skip
SCORES = {"fedavg": "global_accuracy", "fedper": "personal_accuracy"}
"""The column of each algorithm's evaluation with what its clients would use."""


def main(folder: Path = Path("runs/examples"), **settings: Any) -> pd.DataFrame:
    """Returns a table with a row for each client and a column for each algorithm."""
    found = {}
    for name, column in SCORES.items():
        keys = {**KEYS, "algorithm.name": name, "run.name": f"layers-{name}", "run.output": str(folder), **settings}
        scores = fedray.simulate(keys, verbose=True).evaluation
        found[name] = scores[scores["round"] == scores["round"].max()].set_index("client")[column]
    table = pd.DataFrame(found)
    print(table.describe().loc[["mean", "std", "min"]])
    picture(table).savefig(folder / "personal_layers.png", dpi=150)
    return table


def picture(table: pd.DataFrame) -> Figure:
    """Returns a picture with an arrow for each client, from its accuracy with FedAvg to that with FedPer."""
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.subplots()
    table = 100 * table.sort_values("fedavg", ignore_index=True)
    better = table["fedper"] >= table["fedavg"]
    for colour, rows in (("#009e73", table[better]), ("#d55e00", table[~better])):
        axes.vlines(rows.index, rows["fedavg"], rows["fedper"], color=colour, linewidth=2)
    axes.plot(table.index, table["fedavg"], "o", color="black", label="FedAvg, one model for all")
    axes.plot(table.index, table["fedper"], "s", color="#0072b2", label="FedPer, its own last layer")
    axes.set(xlabel="client, in the order of its accuracy with FedAvg", ylabel="accuracy on its own classes, %")
    axes.set_xticks([])
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
