"""Uploads of the opposite sign."""

from __future__ import annotations

from torch import Tensor

from fedray.robust.attack import Attack, AttackedRows


class SignFlip(Attack):
    """Byzantine clients send -s u_i in place of u_i. ``scale`` is s.

    Li, Xu, Chen, Giannakis, Ling: RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from
    Heterogeneous Datasets. AAAI 2019.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        return -self.scale * rows
