"""FedBN as Flower's baseline has it, in fedray: five clients whose images look different.

python analysis/examples/flower_fedbn.py [FOLDER] [--flower FOLDER]

The baseline (baselines/fedbn in Flower's repository) trains on five collections of digits that have to be downloaded
from its authors. Here each client has 743 other images of clothes, with a look of its own; everything else is as there:
the model, 10 rounds of one epoch, batches of 32, learning rate 0.01. FedAvg averages the normalisation layers too,
FedBN leaves them at the clients. Writes flower_fedbn.csv and flower_fedbn.png into FOLDER (runs/examples).

With `--flower` the clients' images are written there in the baseline's own format, so that it can be run on them.
"""

from __future__ import annotations

import argparse
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

import fedray
from fedray.data.sources.source import load_source

CLIENTS = {"MNIST": "plain", "SVHN": "blurred", "USPS": "coarse", "SynthDigits": "inverted", "MNIST_M": "coloured"}
"""The names that the baseline's program expects, and the looks that the images have here."""

TRAIN, TEST = 743, 200
"""The numbers of a client's images. The baseline's clients have 743 too, a tenth of each collection."""

ROUNDS, SEEDS = 10, (0, 1)

KEYS = {
    "train.local_epochs": 1, "train.batch_size": 32, "train.lr": 0.01, "train.cohort_size": 5,
    "run.eval_every": 10, "engine.kind": "local",
}  # fmt: skip


class DigitModel(nn.Module):
    """The network of FedBN's appendix D: three convolutions and three dense layers, with BatchNorm after each but the
    last."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels = (input_shape[0], 64, 64, 128)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 5, padding=2) for a, b in pairwise(channels))
        self.dense = nn.ModuleList([nn.Linear(128 * 7 * 7, 2048), nn.Linear(2048, 512)])
        self.norms = nn.ModuleList([*map(nn.BatchNorm2d, channels[1:]), nn.BatchNorm1d(2048), nn.BatchNorm1d(512)])
        self.last = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        for number, conv in enumerate(self.convs):
            x = F.relu(self.norms[number](conv(x)))
            x = F.max_pool2d(x, 2) if number < 2 else x.flatten(1)
        for norm, dense in zip(list(self.norms)[3:], self.dense, strict=True):
            x = F.relu(norm(dense(x)))
        logits: Tensor = self.last(x)
        return logits


def looks(images: NDArray[np.uint8], look: str, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Returns ``images`` ``[n, 28, 28]`` as ``[n, 28, 28, 3]`` with one of five looks."""
    x = torch.from_numpy(images).float()[:, None]
    if look == "blurred":
        x = 255 - 0.5 * F.avg_pool2d(x, 5, stride=1, padding=2)
    elif look == "coarse":
        x = F.interpolate(F.avg_pool2d(x, 4), scale_factor=4)
    elif look == "inverted":
        x = 255 - x
    x = x.expand(-1, 3, -1, -1)
    if look == "coloured":
        # patches of colour, from which an image takes away
        patches = torch.from_numpy(rng.uniform(0, 255, (len(x), 3, 7, 7))).float()
        x = (F.interpolate(patches, scale_factor=4, mode="bilinear") - x).abs()
    return x.round().to(torch.uint8).movedim(1, -1).numpy()


def clients() -> dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Returns the images ``[943, 28, 28, 3]`` of each client and their classes, by the names of the baseline."""
    source, rng = load_source("sample"), np.random.default_rng(0)
    x, y = np.asarray(source.x_train).reshape(-1, 28, 28), np.asarray(source.y_train)
    order, each = rng.permutation(len(x)), TRAIN + TEST
    own = {name: order[number * each : (number + 1) * each] for number, name in enumerate(CLIENTS)}
    return {name: (looks(x[at], CLIENTS[name], rng), y[at].astype(np.int64)) for name, at in own.items()}


def write_for_flower(folder: Path) -> None:
    """Writes the clients' images as the baseline reads them. It takes one of ten files of a collection, by chance; all
    ten are the same here."""
    for name, (x, y) in clients().items():
        (folder / name / "partitions").mkdir(parents=True, exist_ok=True)
        x = x[..., 0] if name in ("MNIST", "USPS") else x
        parts = {f"partitions/train_part{part}.pkl": slice(TRAIN) for part in range(10)}
        for file, rows in {**parts, "test.pkl": slice(TRAIN, None)}.items():
            (folder / name / file).write_bytes(pickle.dumps((x[rows], y[rows])))


def measured(algorithm: str, seed: int, folder: Path, **settings: Any) -> pd.DataFrame:
    """Returns the mean loss of each client's mini-batches in each round, as a table with a row for each."""
    scaled = [(x.transpose(0, 3, 1, 2) / np.float32(127.5) - 1, y) for x, y in clients().values()]
    keys = {
        **KEYS, "algorithm.name": algorithm, "run.seed": seed, "run.rounds": ROUNDS, "run.output": str(folder),
        "run.name": f"digits-{algorithm}-{seed}", **settings,
    }  # fmt: skip
    result = fedray.simulate(
        keys,
        data=[(x[:TRAIN], y[:TRAIN]) for x, y in scaled],
        test=[(x[TRAIN:], y[TRAIN:]) for x, y in scaled],
        model=DigitModel,
        verbose=True,
    )
    rows = result.clients[["round", "client", "loss"]].copy()
    rows["client"] = rows["client"].map(dict(enumerate(CLIENTS)))
    return rows.assign(algorithm=algorithm, seed=seed)


def picture(table: pd.DataFrame) -> Figure:
    """Returns a picture with a panel for each client: its loss in each round, with both algorithms."""
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    panels = figure.subplots(1, len(CLIENTS), sharey=True)
    for axes, (name, look) in zip(panels, CLIENTS.items(), strict=True):
        for algorithm, colour, dash in (("fedavg", "#d55e00", "--"), ("fedbn", "#0072b2", "-")):
            rows = table[(table["client"] == name) & (table["algorithm"] == algorithm)]
            mean = rows.groupby("round")["loss"].mean()
            axes.plot(mean.index, mean, dash, color=colour, label={"fedavg": "FedAvg", "fedbn": "FedBN"}[algorithm])
        axes.set_title(look, fontsize=10)
        axes.set_xlabel("round")
        axes.set_xticks([1, 5, 10])
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("training loss")
    panels[-1].legend(frameon=False, fontsize=9)
    return figure


def main(folder: Path = Path("runs/examples"), seeds: tuple[int, ...] = SEEDS, **settings: Any) -> pd.DataFrame:
    """Returns the table of all clients, rounds, seeds and both algorithms."""
    table = pd.concat(measured(name, seed, folder, **settings) for seed in seeds for name in ("fedavg", "fedbn"))
    table.to_csv(folder / "flower_fedbn.csv", index=False)
    last = table[table["round"] == table["round"].max()]
    print(last.pivot_table("loss", "client", "algorithm").loc[[*CLIENTS]].round(3))
    picture(table).savefig(folder / "flower_fedbn.png", dpi=150)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="FedBN as Flower's baseline has it, in fedray.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/examples"))
    parser.add_argument("--flower", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.flower:
        write_for_flower(arguments.flower)
    else:
        main(arguments.folder)
