"""The weighted mean, which no rule defends."""

from __future__ import annotations

from torch import Tensor

from fedray.robust.rule import Rule, weighted_sum


class Mean(Rule):
    """sum_i p_i u_i: what a run without ``train.aggregation`` computes, for attacks on it."""

    weighs = True

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return weighted_sum(weights, rows)
