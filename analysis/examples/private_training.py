"""Private training: what accuracy is left if the models may give away little about any client.

python analysis/examples/private_training.py [FOLDER]

500 clients with 20 images each, of whom about 50 take part in a round, train without privacy, and so that the models
give away little about whether a client took part (epsilon 8 and 2, delta 1e-5). Writes private_training.png into FOLDER
(runs/examples).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

import fedray

KEYS = {
    "algorithm.name": "fedavg", "data.clients": 500, "data.partition.kind": "iid", "model.name": "mlp",
    "train.cohort_size": 50, "train.local_epochs": 1, "train.batch_size": 10, "train.lr": 0.1,
    "train.weighting": "uniform", "run.rounds": 40, "run.eval_every": 5, "engine.kind": "local",
}  # fmt: skip
PRIVACY: Mapping[str, Mapping[str, Any]] = {
    "no privacy": {},
    "epsilon 8": {"privacy.epsilon": 8, "privacy.delta": 1e-5},
    "epsilon 2": {"privacy.epsilon": 2, "privacy.delta": 1e-5},
}


def main(folder: Path = Path("runs/examples"), **settings: Any) -> dict[str, pd.DataFrame]:
    """Returns the rounds of each run."""
    found = {}
    for name, privacy in PRIVACY.items():
        keys = {**KEYS, **privacy, "run.name": name.replace(" ", "-"), "run.output": str(folder), **settings}
        found[name] = fedray.simulate(keys, verbose=True).metrics
    picture(found).savefig(folder / "private_training.png", dpi=150)
    return found


def picture(found: Mapping[str, pd.DataFrame]) -> Figure:
    """Returns a picture of the accuracies over rounds, and of epsilon as it grows."""
    figure = Figure(figsize=(7.4, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, rows), colour in zip(found.items(), ("black", "#0072b2", "#d55e00"), strict=True):
        tested = rows.dropna(subset=["test_accuracy"])
        left.plot(tested["round"], 100 * tested["test_accuracy"], "o-", color=colour, label=name, markersize=4)
        if "epsilon" in rows:
            right.plot(tested["round"], tested["epsilon"], "o-", color=colour, label=name, markersize=4)
    left.set(xlabel="rounds", ylabel="test accuracy, %")
    right.set(xlabel="rounds", ylabel="epsilon so far")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
