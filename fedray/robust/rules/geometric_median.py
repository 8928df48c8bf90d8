"""The point with the least sum of distances to the uploads."""

from __future__ import annotations

from torch import Tensor

from fedray.robust.rule import Rule, bounded, lengths, weighted_sum


class GeometricMedian(Rule):
    """The point z with the least sum_i p_i ||u_i - z||, by ``passes`` passes of the smoothed Weiszfeld algorithm from
    the mean: w_i = p_i / max(nu, ||u_i - z||), z <- sum_i w_i u_i / sum_i w_i.

    Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning. IEEE Transactions on Signal Processing 70,
    2022, Algorithm 2.
    """

    weighs = True

    def __init__(self, nu: float = 1e-6, passes: int = 8) -> None:
        self.nu, self.passes = nu, passes

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        usable = bounded(rows)
        if not weights[usable].sum():
            return rows[0] * 0
        if not usable.all():
            weights = weights * usable / weights[usable].sum()
        z = weighted_sum(weights, rows)
        for _ in range(self.passes):
            w = weights / lengths(rows - z).clamp(min=self.nu)
            z = weighted_sum(w / w.sum(), rows)
        return z
