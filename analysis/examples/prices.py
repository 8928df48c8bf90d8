"""A regression with a user-defined metric: prices of houses, where each city (a client) has a different market.

python analysis/examples/prices.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

import fedray


def houses(count: int, cities: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns made-up houses: size, age and distance, the logarithm of the price, and the city."""
    rng = np.random.default_rng(0)
    city = rng.integers(0, cities, count)
    x = rng.normal(size=(count, 3)).astype(np.float32)
    market = rng.normal(size=(cities, 3)) * 0.2 + [1.0, -0.3, -0.5]
    return x, (x * market[city]).sum(1) + 0.1 * np.abs(x[:, 0]) + 0.05 * rng.normal(size=count), city


def within_a_tenth(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the price is off by at most a tenth."""
    return (outputs[:, 0] - targets).abs() < np.log(1.1)


def main(**settings: Any) -> fedray.RunResult:
    x, y, city = houses(6000)
    keys = {
        "algorithm.name": "fedprox", "run.name": "prices", "run.rounds": 50, "engine.kind": "local",
        "task.metric": "within_a_tenth", "task.mode": "max", "run.targets": [0.3], "train.cohort_size": 10,
    }  # fmt: skip
    return fedray.simulate(
        {**keys, **settings}, data=(x[:5000], y[:5000], city[:5000]), test=(x[5000:], y[5000:], city[5000:]),
        model=nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1)), metrics={"within_a_tenth": within_a_tenth},
        verbose=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
