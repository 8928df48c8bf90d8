"""Uploads of random numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedray.robust.attack import Attack, AttackedRows


class Noise(Attack):
    """Byzantine clients send N(0, s^2) in each coordinate, drawn for each client, round and upload. ``scale`` is s.

    Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent.
    NeurIPS 2017, Section 5.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def upload(self, rows: Tensor, sent: AttackedRows) -> Tensor:
        drawn = [sent.generator(row).standard_normal(rows.shape[1], dtype=np.float32) for row in range(len(rows))]
        return self.scale * torch.from_numpy(np.stack(drawn)).to(rows.device)
