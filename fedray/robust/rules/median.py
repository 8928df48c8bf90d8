"""The median of each coordinate."""

from __future__ import annotations

from torch import Tensor

from fedray.robust.rule import Rule


class Median(Rule):
    """The median of each coordinate: of an even number of clients the mean of the two in the middle. Weights do not
    count.

    Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML
    2018, Definition 1.
    """

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        ordered, half = rows.sort(dim=0).values, (len(rows) - 1) // 2
        return (ordered[half] + ordered[len(rows) - 1 - half]) / 2
