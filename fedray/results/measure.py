"""The metric by which runs are compared, and the axes of curves: their columns in metrics.csv, and how they are
shown."""

from __future__ import annotations

from dataclasses import dataclass

AXES = {
    "rounds": "round",
    "iterations": "iterations",
    "bytes": "bytes",
    "flops": "flops",
    "virtual_seconds": "virtual_seconds",
    "wall_seconds": "wall_seconds",
}
"""The axes of curves, each with its column in metrics.csv."""


@dataclass(frozen=True)
class Measure:
    """A metric by which runs are compared. ``mode`` says whether larger (max) or smaller (min) values are better.

    ``of`` names the model and the data: ``test`` is the evaluated model on the test set.
    """

    metric: str = "accuracy"
    mode: str = "max"
    of: str = "test"

    @property
    def column(self) -> str:
        """The metric's column in metrics.csv."""
        return f"{self.of}_{self.metric}"

    @property
    def sign(self) -> int:
        """1 if larger values are better, else -1."""
        return -1 if self.mode == "min" else 1

    @property
    def percent(self) -> bool:
        """Whether the metric is a fraction of 1, which is shown as a percentage."""
        return self.metric in ("accuracy", "f1")

    @property
    def scale(self) -> float:
        """The factor by which values are multiplied when they are shown."""
        return 100 if self.percent else 1

    @property
    def unit(self) -> str:
        """The unit that follows the metric's name in the head of a table, or at an axis."""
        return ", %" if self.percent else ""

    def shown(self, value: float) -> str:
        """Returns a value of the metric as text."""
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g}"

    @property
    def words(self) -> str:
        """The metric's name in texts."""
        return {"f1": "F1"}.get(self.metric, self.metric.replace("_", " "))
