"""FedRep as PFLlib has it, in fedray: twenty clients that know two classes each.

python analysis/examples/pfllib_fedrep.py [FOLDER] [--pfllib FOLDER]

PFLlib's own setting of pathological label skew, with the images that come with fedray in place of all of Fashion-MNIST:
each client has 400 images of two classes, and is tested on 100 others of these classes. The network is PFLlib's `CNN`;
in each round all clients train an epoch of their heads, and then one of the rest. FedAvg beside it trains one network
for all of them. Writes pfllib_fedrep.csv and pfllib_fedrep.png into FOLDER (runs/examples).

With `--pfllib` the clients' images are written there in PFLlib's format, so that it can be run on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch.nn.functional as F
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

import fedray
from fedray.data.sources.source import load_source

CLIENTS, TRAIN, TEST, BATCH = 20, 400, 100, 20
ROUNDS, SEEDS = 12, (0, 1, 2)

KEYS = {
    "train.local_epochs": 1, "train.batch_size": BATCH, "train.lr": 0.05, "train.cohort_size": CLIENTS,
    "run.eval_clients": "all", "engine.kind": "local",
}  # fmt: skip

ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    # as many steps as an epoch has
    "fedrep": {"algorithm.head_steps": TRAIN // BATCH, "algorithm.private": ["head"]},
}

MEASURES = {"fedavg": "clients_accuracy_weighted_mean", "fedrep": "clients_personal_accuracy_weighted_mean"}
"""What PFLlib calls the averaged test accuracy: of the one model, and of the clients' own."""


class CNN(nn.Module):
    """PFLlib's `FedAvgCNN`, 582,026 parameters. The head is its last layer."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(input_shape[0], 32, 5), nn.Conv2d(32, 64, 5)
        self.fc1, self.head = nn.Linear(1024, 512), nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in (self.conv1, self.conv2):
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        logits: Tensor = self.head(F.relu(self.fc1(x.flatten(1))))
        return logits


def clients() -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Returns the images ``[500, 1, 28, 28]`` of each client, from -1 to 1 as in PFLlib, and their classes."""
    source, rng = load_source("sample"), np.random.default_rng(0)
    x, y = np.asarray(source.x_train).astype(np.float32) / 127.5 - 1, np.asarray(source.y_train).astype(np.int64)
    # clients 0, 5, 10 and 15 share the images of classes 0 and 1, clients 1, 6, 11 and 16 those of 2 and 3, and so on
    piles = [np.array_split(rng.permutation(np.flatnonzero(y == label)), 4) for label in range(10)]
    found = []
    for client in range(CLIENTS):
        pair, part = client % 5, client // 5
        own = rng.permutation(np.concatenate([piles[2 * pair][part], piles[2 * pair + 1][part]]))
        found.append((x[own], y[own]))
    return found


def write_for_pfllib(folder: Path) -> None:
    """Writes the clients' images into ``folder``, which is PFLlib's ``dataset/FashionMNIST``."""
    for part, rows in {"train": slice(TRAIN), "test": slice(TRAIN, None)}.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        for client, (x, y) in enumerate(clients()):
            np.savez_compressed(folder / part / f"{client}.npz", data=np.array({"x": x[rows], "y": y[rows]}))


def measured(algorithm: str, seed: int, folder: Path, **settings: Any) -> pd.DataFrame:
    """Returns the averaged test accuracy of each round."""
    keys = {
        **KEYS, **ALGORITHMS[algorithm], "algorithm.name": algorithm, "run.seed": seed, "run.rounds": ROUNDS,
        "run.output": str(folder), "run.name": f"pathological-{algorithm}-{seed}", **settings,
    }  # fmt: skip
    own = clients()
    result = fedray.simulate(
        keys,
        data=[(x[:TRAIN], y[:TRAIN]) for x, y in own],
        test=[(x[TRAIN:], y[TRAIN:]) for x, y in own],
        model=CNN,
        verbose=True,
    )
    rows = result.metrics[["round", MEASURES[algorithm]]].dropna()
    return rows.set_axis(["round", "accuracy"], axis=1).assign(algorithm=algorithm, seed=seed)


def picture(table: pd.DataFrame) -> Figure:
    """Returns a picture of the mean accuracy over seeds in each round, with a band from the least to the largest."""
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for algorithm, colour, dash in (("fedrep", "#0072b2", "-"), ("fedavg", "#d55e00", "--")):
        of_rounds = 100 * table[table["algorithm"] == algorithm].groupby("round")["accuracy"].agg(
            ["min", "mean", "max"]
        )
        axes.fill_between(of_rounds.index, of_rounds["min"], of_rounds["max"], color=colour, alpha=0.2, linewidth=0)
        axes.plot(
            of_rounds.index, of_rounds["mean"], dash, color=colour, label={"fedavg": "FedAvg"}.get(algorithm, "FedRep")
        )
    axes.set(xlabel="round", ylabel="averaged test accuracy, %")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(folder: Path = Path("runs/examples"), seeds: tuple[int, ...] = SEEDS, **settings: Any) -> pd.DataFrame:
    """Returns the table of all rounds, seeds and both algorithms."""
    table = pd.concat(measured(name, seed, folder, **settings) for seed in seeds for name in ALGORITHMS)
    table.to_csv(folder / "pfllib_fedrep.csv", index=False)
    print(table[table["round"] == table["round"].max()].pivot_table("accuracy", "seed", "algorithm").round(4))
    picture(table).savefig(folder / "pfllib_fedrep.png", dpi=150)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="FedRep as PFLlib has it, in fedray.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/examples"))
    parser.add_argument("--pfllib", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.pfllib:
        write_for_pfllib(arguments.pfllib)
    else:
        main(arguments.folder)
