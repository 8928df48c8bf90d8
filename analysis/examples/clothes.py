"""Your own images, several labels for each: what can be said of the clothes on a picture.

python analysis/examples/clothes.py [FOLDER]

A piece of clothing may be for the upper body, have long sleeves and be open in front, all at once, so that the targets
are five zeros and ones. FedAvgM trains LeNet-5 at 20 clients on the images that come with fedray. Writes clothes.png
into FOLDER (runs/examples): how many of each property's images are found, and how many of those found are right.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import fedray
from fedray.data.sources.source import load_source

PROPERTIES = {
    "upper body": "T-shirt/top, Pullover, Dress, Coat, Shirt", "long sleeves": "Pullover, Coat, Shirt",
    "worn on the feet": "Sandal, Sneaker, Ankle boot", "open in front": "Coat, Shirt",
    "outdoors": "Coat, Ankle boot, Bag",
}  # fmt: skip
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


TABLE = np.array([[name in of.split(", ") for of in PROPERTIES.values()] for name in CLASSES])


def tests() -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs that the model gets of the test images, and their labels."""
    images = load_source("sample")
    return images.x_test * images.scale + images.shift, TABLE[images.y_test]


def main(folder: Path = Path("runs/examples"), **settings: Any) -> fedray.RunResult:
    images = load_source("sample")
    keys = {
        "algorithm.name": "fedavgm", "run.name": "clothes", "run.rounds": 30, "data.clients": 20,
        "data.partition.kind": "iid", "train.cohort_size": 10, "train.lr": 0.05,
        "run.output": str(folder),
    }  # fmt: skip
    x = images.x_train * images.scale + images.shift
    data, test = (x, TABLE[images.y_train]), tests()
    result = fedray.simulate({**keys, **settings}, data=data, test=test, verbose=True)
    with torch.no_grad():
        found = result.model()(torch.as_tensor(test[0])).numpy() > 0
    picture(found, test[1].astype(bool)).savefig(folder / "clothes.png", dpi=150)
    return result


def picture(found: np.ndarray, true: np.ndarray) -> Figure:
    """Returns a picture with two bars for each property. ``found`` and ``true`` say which of the images ``[n, 5]`` have
    it."""
    right = (found & true).sum(0)
    shares = {"of its images are found": right / true.sum(0), "of those found are right": right / found.sum(0).clip(1)}
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    for number, ((label, share), colour) in enumerate(zip(shares.items(), ("#0072b2", "#e69f00"), strict=True)):
        axes.bar(np.arange(len(PROPERTIES)) + 0.4 * number, 100 * share, 0.38, color=colour, label=label)
    axes.set_xticks(np.arange(len(PROPERTIES)) + 0.2, [name.replace(" ", "\n", 1) for name in PROPERTIES], fontsize=9)
    axes.set_ylabel("%")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
