"""Uploads that are clipped around what the round before gave."""

from __future__ import annotations

import torch
from torch import Tensor

from fedray.robust.rule import Rule, bounded, lengths


class CenteredClip(Rule):
    """v <- v + mean_i (u_i - v) min(1, tau / ||u_i - v||), ``passes`` times, from the v of the round before (0 in the
    first). Weights do not count.

    Karimireddy, He, Jaggi: Learning from History for Byzantine Robust Optimization. ICML 2021, Section 4.2.
    """

    keeps = True

    def __init__(self, tau: float, passes: int = 1) -> None:
        self.tau, self.passes = tau, passes

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        v = torch.zeros_like(rows[0]) if before is None else before
        usable = bounded(rows)
        for _ in range(self.passes):
            apart = (rows - v) * usable[:, None]
            v = v + (apart * (self.tau / lengths(apart).clamp(min=self.tau))[:, None]).mean(dim=0)
        return v
