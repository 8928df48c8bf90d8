"""The mean of each coordinate without its extremes."""

from __future__ import annotations

from torch import Tensor

from fedray.robust.rule import Rule


class TrimmedMean(Rule):
    """The mean of each coordinate without its ``b`` smallest and its ``b`` largest values. Weights do not count.

    Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML
    2018, Definition 2.
    """

    def __init__(self, b: int) -> None:
        self.b = b

    def least(self) -> int:
        return 2 * self.b + 1

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return rows.sort(dim=0).values[self.b : len(rows) - self.b].mean(dim=0)
