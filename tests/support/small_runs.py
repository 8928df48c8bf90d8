"""The contracts' small run with some keys changed, as a finished run, or as an opened one for tests of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from fedray import simulate
from fedray.config import load
from fedray.data.sources.source import Source
from fedray.engine.opening import open_run
from fedray.engine.pool import LocalPool
from fedray.engine.process import computing_process, describe
from fedray.engine.worker import Worker
from fedray.experiment.custom import CustomObjects
from fedray.experiment.placement import missing_compiler
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tracking.result import RunResult

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=f"there is {missing_compiler()}")

COLUMNS = [
    "round", "iterations", "cohort_size", "train_loss", "train_accuracy", "test_loss", "test_accuracy",
    "validation_accuracy", "personalized_accuracy", "representation_accuracy", "bytes_down", "bytes_up", "flops",
    "virtual_seconds", "round_seconds", "wall_seconds",
]  # fmt: skip
"""The columns that every run's metrics.csv has."""


class Normed(nn.Module):
    """A model with running statistics for the small data set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 7), nn.BatchNorm1d(7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.first(x)).relu())


def small_images() -> Source:
    """Returns 400 images of 5 x 6 pixels in 4 classes, and 60 test images."""
    rng = np.random.default_rng(3)
    y = rng.integers(0, 4, 460)
    centres = rng.uniform(-1, 1, (4, 1, 5, 6))
    x = np.clip(centres[y] + rng.normal(0, 0.4, (460, 1, 5, 6)), -1.5, 1.5).astype(np.float32)
    return Source("images", x[:400], y[:400], x[400:], y[400:], 4)


def run(folder: Path, algorithm: str = "fedavg", data: Any = None, call: Any = None, **keys: Any) -> RunResult:
    """Returns the small run with some keys changed; None takes a key out. ``call`` has simulate's other arguments."""
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    config = {**SETTINGS, "algorithm.name": algorithm, "run.output": str(folder), **changed}
    config = {key: value for key, value in config.items() if value is not None}
    return simulate(config, data=small_source() if data is None else data, **(call or {}))


def opened_run(folder: Path, algorithm: str, **own: Any) -> Iterator[Any]:
    """Yields one opened run on the local engine, and closes it when the loop over it ends."""
    config = {**SETTINGS, "algorithm.name": algorithm, "run.output": str(folder)}
    if "model" in own:
        config = {key: value for key, value in config.items() if not key.startswith("model.")}
    experiment, data = resolve(load(config), CustomObjects(source=small_source(), **own))

    def make_pool(worker: Worker) -> Any:
        return LocalPool(worker), [describe("cpu")]

    with computing_process(1, False), open_run(experiment, data, make_pool, False) as found:
        yield found
