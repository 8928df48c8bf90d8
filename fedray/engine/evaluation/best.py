"""An observer that follows the main metric: it keeps the best model, and says when the run may end early."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd

from fedray.engine.observers import Observer
from fedray.engine.round import RoundResult
from fedray.experiment.experiment import Experiment


class Best(Observer):
    """Follows the main metric of the evaluated rounds.

    ``run.save_best`` has the evaluated model of each round that is better than all before saved, by ``save(file
    name)``. ``reason`` names what ends the run, once there is something: ``run.stop_at``, a value that was reached, or
    ``run.patience``, so many rounds without a better value. It is None until then.
    """

    FILE = "model-best.safetensors"

    def __init__(self, experiment: Experiment, save: Callable[[str], None]) -> None:
        self.experiment, self.run, self.save = experiment, experiment.config.run, save
        part = "test" if self.run.eval_test else "validation"
        self.column = f"{part}_{experiment.task.main}"
        self.value, self.round = math.nan, 0
        self.reason: str | None = None

    @property
    def _acts(self) -> bool:
        return self.run.save_best or self.run.stop_at is not None or self.run.patience is not None

    def needs_state_after(self, number: int) -> bool:
        every = self.run.eval_every
        return self._acts and (number == self.experiment.rounds or (bool(every) and number % every == 0))

    def evaluated(self, result: RoundResult) -> None:
        value = result.metrics.get(self.column)
        if value is None or result.diverged:
            return
        if self._follow(result.number, float(value)) and self.run.save_best:
            self.save(self.FILE)
        stop_at = self.run.stop_at
        if stop_at is not None and (value <= stop_at if self.experiment.task.mode == "min" else value >= stop_at):
            self.reason = "run.stop_at"
        elif self.run.patience is not None and result.number - self.round >= self.run.patience:
            self.reason = "run.patience"

    def restore(self, metrics: pd.DataFrame) -> None:
        """Learns from the rows of metrics.csv what the rounds before had."""
        if self.column in metrics:
            for row in metrics[["round", self.column]].dropna().itertuples(index=False):
                self._follow(int(row[0]), float(row[1]))

    def _follow(self, number: int, value: float) -> bool:
        """Returns whether the value of round ``number`` is better than all before."""
        better = value < self.value if self.experiment.task.mode == "min" else value > self.value
        if better or (math.isnan(self.value) and not math.isnan(value)):
            self.value, self.round = value, number
            return True
        return False
