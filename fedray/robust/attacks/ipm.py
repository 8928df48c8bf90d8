"""Uploads against the mean of the honest ones."""

from __future__ import annotations

import torch
from torch import Tensor

from fedray.robust.attack import Attack, AttackedRows


class IPM(Attack):
    """Byzantine clients send -eps times the mean of the honest clients' uploads, or 0 if there is no honest client in
    the cohort (inner product manipulation).

    Xie, Koyejo, Gupta: Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product Manipulation. UAI 2019.
    """

    def __init__(self, eps: float = 0.5) -> None:
        self.eps = eps

    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        honest = sent.honest
        if not len(honest):
            return torch.zeros_like(rows)
        return (-self.eps * honest.mean(dim=0)).expand_as(rows)
