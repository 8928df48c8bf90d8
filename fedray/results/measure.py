"""What runs are compared by, and over what: which columns of metrics.csv these are, and how they are shown."""

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
"""What curves can be drawn over, and the column of each."""


@dataclass(frozen=True)
class Measure:
    """A metric by which runs are compared. ``mode`` says whether more (max) or less (min) of it is better.

    ``of`` says of which model and on which data: ``test`` is the evaluated model on the test set.
    """

    metric: str = "accuracy"
    mode: str = "max"
    of: str = "test"

    @property
    def column(self) -> str:
        """The column of metrics.csv."""
        return f"{self.of}_{self.metric}"

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return -1 if self.mode == "min" else 1

    @property
    def percent(self) -> bool:
        """Whether it is a fraction of 1 that is shown in percent."""
        return self.metric in ("accuracy", "f1")

    @property
    def scale(self) -> float:
        """What its values are multiplied by where they are shown."""
        return 100 if self.percent else 1

    @property
    def unit(self) -> str:
        """What stands behind its name in the head of a table, or at an axis."""
        return ", %" if self.percent else ""

    def shown(self, value: float) -> str:
        """Returns a value as a text has it."""
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g}"

    @property
    def words(self) -> str:
        """Its name in a text."""
        return {"f1": "F1"}.get(self.metric, self.metric.replace("_", " "))
