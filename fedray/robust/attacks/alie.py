"""Uploads that hide within the spread of the honest ones."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from fedray.robust.attack import Attack, AttackedRows


class ALIE(Attack):
    """Byzantine clients send the mean of the honest clients' uploads minus ``z`` times their standard deviation, in
    each coordinate, or 0 if there is no honest client in the cohort. Without ``z`` it is :func:`hidden`.

    Baruch, Baruch, Goldberg: A Little Is Enough: Circumventing Defenses For Distributed Learning. NeurIPS 2019,
    Algorithm 3.
    """

    def __init__(self, z: float | None = None) -> None:
        self.z = z

    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        honest = sent.honest
        if not len(honest):
            return torch.zeros_like(rows)
        z = hidden(sent.members, len(rows)) if self.z is None else self.z
        return (honest.mean(dim=0) - z * honest.std(dim=0, correction=0)).expand_as(rows)


def hidden(members: int, f: int) -> float:
    """Returns the largest z for which ``f`` attackers among ``members`` clients can hide within the spread of the
    others: the quantile of the normal distribution at (m - f - s) / (m - f), s = floor(m / 2 + 1) - f."""
    needed = max(math.floor(members / 2 + 1) - f, 1)
    share = (members - f - needed) / (members - f)
    return NormalDist().inv_cdf(min(max(share, 0.01), 0.99))
