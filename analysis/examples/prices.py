"""Your own table, a regression: prices of houses, where each city is a client and has a market of its own.

python analysis/examples/prices.py [FOLDER]

The loss is the squared error of the logarithm of the price, and the metric a function of our own: the share of houses
whose price is off by at most a tenth. FedProx trains one small network for 30 cities. Writes prices.png into FOLDER
(runs/examples): the true and the predicted prices of 1,000 other houses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import fedray


def houses(count: int, cities: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns made-up houses: size, age and distance, the logarithm of the price, and the city."""
    rng = np.random.default_rng(0)
    city = rng.integers(0, cities, count)
    x = rng.normal(size=(count, 3)).astype(np.float32)
    market = rng.normal(size=(cities, 3)) * 0.2 + [1.0, -0.3, -0.5]
    return x, (x * market[city]).sum(1) + 0.1 * np.abs(x[:, 0]) + 0.05 * rng.normal(size=count), city


def network(input_shape: tuple[int, ...], classes: int | None) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], 32), nn.ReLU(), nn.Linear(32, 1))


def within_a_tenth(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the price is off by at most a tenth."""
    return (outputs[:, 0] - targets).abs() < np.log(1.1)


def main(folder: Path = Path("runs/examples"), **settings: Any) -> fedray.RunResult:
    x, y, city = houses(6000)
    keys = {
        "algorithm.name": "fedprox", "run.name": "prices", "run.rounds": 50, "engine.kind": "local",
        "task.metric": "within_a_tenth", "task.mode": "max", "run.targets": [0.3], "train.cohort_size": 10,
        "run.output": str(folder),
    }  # fmt: skip
    result = fedray.simulate(
        {**keys, **settings}, data=(x[:5000], y[:5000], city[:5000]), test=(x[5000:], y[5000:], city[5000:]),
        model=network, metrics={"within_a_tenth": within_a_tenth},
        verbose=True,
    )  # fmt: skip
    with torch.no_grad():
        predicted = result.model()(torch.from_numpy(x[5000:]))[:, 0].numpy()
    picture(y[5000:], predicted).savefig(folder / "prices.png", dpi=150)
    return result


def picture(true: np.ndarray, predicted: np.ndarray) -> Figure:
    """Returns a picture of true and predicted prices, given their logarithms, with those in colour that are off by at
    most a tenth."""
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = figure.subplots()
    near = np.abs(predicted - true) < np.log(1.1)
    axes.loglog(np.exp(true[~near]), np.exp(predicted[~near]), "x", color="#999999", markersize=4, label="further off")
    label = f"off by at most a tenth: {100 * near.mean():.0f} %"
    axes.loglog(np.exp(true[near]), np.exp(predicted[near]), "o", color="#0072b2", markersize=3, label=label)
    axes.set(xlabel="price of a house; the median is about 1", ylabel="predicted price")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
