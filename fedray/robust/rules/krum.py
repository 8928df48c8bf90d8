"""The uploads that have the nearest neighbours."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedray.robust.rule import Rule


def distances(rows: Tensor) -> Tensor:
    """Returns the squared distances of all pairs of ``rows [m, d]``, float64 ``[m, m]``; those of rows that are not
    finite are infinite."""
    squares = torch.stack([torch.stack([(row - other).double().square().sum() for other in rows]) for row in rows])
    return torch.nan_to_num(squares, nan=math.inf, posinf=math.inf)


def best(squares: Tensor, f: int) -> list[int]:
    """Returns the places of m clients in the order of the sums of their m - f - 2 least squared distances to others, of
    equal ones in that of all their distances. ``squares`` are those of :func:`distances`, and ``f`` is how many clients
    may be Byzantine."""
    ordered = squares.sort(dim=1).values
    # the first is the distance to itself
    nearest = ordered[:, 1 : max(2, len(squares) - f - 1)].sum(dim=1).tolist()
    return sorted(range(len(squares)), key=lambda place: (nearest[place], *ordered[place].flip(0).tolist()))


class Krum(Rule):
    """The upload u_i with the least sum of squared distances to its m - f - 2 nearest neighbours. ``f`` is how many of
    the m clients of a cohort may be Byzantine. Weights do not count.

    Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent.
    NeurIPS 2017, Section 4.
    """

    def __init__(self, f: int) -> None:
        self.f = f

    def least(self) -> int:
        return 2 * self.f + 3

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        return rows[best(distances(rows), self.f)[0]].clone()


class MultiKrum(Krum):
    """The mean of the m - f uploads with the least sums of :class:`Krum`.

    Blanchard et al., NeurIPS 2017, Section 4 (full paper, Section 5).
    """

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        chosen = sorted(best(distances(rows), self.f)[: len(rows) - self.f])
        return rows[chosen].mean(dim=0)
