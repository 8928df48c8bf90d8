"""The mean of uploads none of which is long."""

from __future__ import annotations

from torch import Tensor

from fedray.robust.rule import Rule, bounded, lengths, weighted_sum


class NormBound(Rule):
    """sum_i p_i u_i min(1, S / ||u_i||), where ``norm`` is S.

    Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning? arXiv 1911.07963, 2019, Section 4.
    """

    weighs = True

    def __init__(self, norm: float) -> None:
        self.norm = norm

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        bounded(rows)
        return weighted_sum(weights * (self.norm / lengths(rows).clamp(min=self.norm)), rows)
