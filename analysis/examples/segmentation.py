"""Segmentation: which pixels of a picture belong to a disc, and which to a square. Each client draws with its own pen.

python analysis/examples/segmentation.py [FOLDER]

The targets are one class for each pixel, and the model a small convolutional network. Clients differ in the brightness
and the noise of their pictures, as hospitals' scanners do. Writes segmentation.png into FOLDER (runs/examples).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

import fedray

SIZE, CLASSES = 32, ("nothing", "disc", "square")


def pictures(count: int, seed: int, brightness: float, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns pictures ``[count, 1, SIZE, SIZE]`` and the class of each pixel ``[count, SIZE, SIZE]``."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    classes = np.zeros((count, SIZE, SIZE), np.int64)
    for each in classes:
        (y, x), radius = rng.uniform(8, SIZE - 8, 2), rng.uniform(3, 7)
        each[(rows - y) ** 2 + (columns - x) ** 2 < radius**2] = 1
        (y, x), half = rng.uniform(8, SIZE - 8, 2), rng.uniform(3, 6)
        each[(abs(rows - y) < half) & (abs(columns - x) < half)] = 2
    shades = brightness * np.array([0.2, 0.5, 0.9])[classes] + noise * rng.standard_normal(classes.shape)
    return shades[:, None].astype(np.float32), classes


class Small(nn.Module):
    """Four convolutions that see ever wider parts of the picture, and one that scores pixels. The outputs are a score
    of each class for each pixel, ``[b, 3, SIZE, SIZE]``."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, wide in ((1, 1), (16, 1), (16, 2), (16, 4)):
            layers += [nn.Conv2d(before, 16, 3, padding=wide, dilation=wide), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(16, len(CLASSES), 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def main(folder: Path = Path("runs/examples"), **settings: Any) -> fedray.RunResult:
    clients = [pictures(60, seed, 0.9 + seed / 40, 0.02 + 0.03 * (seed % 4)) for seed in range(8)]
    test = pictures(100, 1000, 1.0, 0.05)
    keys = {
        "algorithm.name": "fedavg", "run.name": "segmentation", "run.output": str(folder), "run.rounds": 15,
        "run.eval_every": 5, "train.optimizer": "adam", "train.lr": 0.003, "train.batch_size": 20,
        "train.local_epochs": 4, "task.metric": "accuracy", "engine.kind": "local",
    }  # fmt: skip
    result = fedray.simulate({**keys, **settings}, data=clients, test=test, model=Small, verbose=True)
    picture(result, *test).savefig(folder / "segmentation.png", dpi=150)
    return result


def picture(result: fedray.RunResult, x: np.ndarray, classes: np.ndarray) -> Figure:
    """Returns a picture of four test images, the classes of their pixels, and what the model says they are."""
    with torch.no_grad():
        found = result.model()(torch.from_numpy(x[:4])).argmax(1).numpy()
    figure = Figure(figsize=(5.2, 4), layout="constrained")
    axes = figure.subplots(3, 4)
    for row, (title, shown) in enumerate((("picture", x[:4, 0]), ("truth", classes[:4]), ("model", found))):
        axes[row, 0].set_ylabel(title)
        for place, image in zip(axes[row], shown, strict=True):
            place.imshow(image, cmap="gray" if row == 0 else "viridis")
            place.set(xticks=[], yticks=[])
    return figure


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
