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
    "joules": "joules",
    "wall_seconds": "wall_seconds",
}
"""The axes of curves, each with its column in metrics.csv."""


@dataclass(frozen=True)
class Measure:
    """The metric by which runs are compared, such as the accuracy on the test set. ``mode`` says whether larger (max)
    or smaller (min) values are better.

    ``of`` says which model was evaluated on the test set: with ``test`` the one that the algorithm would deploy, with
    ``representation`` the representation model of pFedMo's server, and with ``local`` the models of the cohort's
    clients before they are averaged, as a mean (``run.eval_local_models``). With ``clients``, ``clients_personal`` and
    ``clients_finetuned`` it is the mean over all clients, each on its own test share, of the deployed model, of the
    clients' personal models, and of the deployed model after fine-tuning.
    """

    metric: str = "accuracy"
    mode: str = "max"
    of: str = "test"

    @property
    def column(self) -> str:
        """The column of metrics.csv with the metric's values, such as ``test_accuracy``."""
        return f"{self.of}_{self.metric}{'_mean' if self.of.startswith('clients') else ''}"

    @property
    def sign(self) -> int:
        """1 if larger values of the metric are better, else -1. Multiplied by it, values are larger for better runs."""
        return -1 if self.mode == "min" else 1

    @property
    def percent(self) -> bool:
        """Whether the metric is a fraction of 1, such as the accuracy, and is shown as a percentage."""
        return self.metric in ("accuracy", "f1")

    @property
    def scale(self) -> float:
        """The factor by which values of the metric are multiplied when they are shown: 100 for a percentage, otherwise
        1."""
        return 100 if self.percent else 1

    @property
    def unit(self) -> str:
        """The text that follows the metric's name in the head of a table or at an axis: ``", %"`` for a percentage,
        otherwise empty."""
        return ", %" if self.percent else ""

    def shown(self, value: float) -> str:
        """Returns a value of the metric as text for readers, such as ``91.20 %``, or ``0.4321`` for a metric that is no
        percentage."""
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g}"

    @property
    def title(self) -> str:
        """The head of a table's column, or the text at an axis, with the unit."""
        if self.of.startswith("clients"):
            return f"mean {self.words} over clients' test shares{self.unit}"
        return f"test {self.words}{self.unit}"

    @property
    def words(self) -> str:
        """The metric's name as it is written in texts: ``F1`` for ``f1``, and otherwise the name with blanks in place
        of underscores."""
        return {"f1": "F1"}.get(self.metric, self.metric.replace("_", " "))
