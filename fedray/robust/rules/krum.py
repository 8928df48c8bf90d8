"""The uploads that have the nearest neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from fedray.robust.rule import Rule


def distances(rows: Tensor) -> Tensor:
    """Returns the squared distances of all pairs of ``rows [m, d]``, float64 ``[m, m]``."""
    return torch.stack([torch.stack([(row - other).double().square().sum() for other in rows]) for row in rows])


def scores(squares: Tensor, f: int) -> Tensor:
    """Returns for each of m clients the sum of its m - f - 2 least squared distances to others, ``[m]``. ``squares``
    are those of :func:`distances`, and ``f`` is how many clients may be Byzantine."""
    # the first is the distance to itself
    return squares.sort(dim=1).values[:, 1 : max(2, len(squares) - f - 1)].sum(dim=1)


class Krum(Rule):
    """The upload u_i with the least sum of squared distances to its m - f - 2 nearest neighbours. ``f`` is how many of
    the m clients of a cohort may be Byzantine. Weights do not count.

    Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent.
    NeurIPS 2017, Section 4.
    """

    def __init__(self, f: int) -> None:
        self.f = f

    def least(self) -> int:
        return self.f + 3

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return rows[scores(distances(rows), self.f).argmin()].clone()


class MultiKrum(Krum):
    """The mean of the m - f uploads with the least sums of :class:`Krum`.

    Blanchard et al., NeurIPS 2017, Section 4 (full paper, Section 5).
    """

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        best = scores(distances(rows), self.f).argsort(stable=True)[: len(rows) - self.f]
        return rows[best.sort().values].mean(dim=0)
