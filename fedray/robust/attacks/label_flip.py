"""Training on wrong labels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedray.core.samples import Indices
from fedray.robust.attack import Attack, AttackedRun


class LabelFlip(Attack):
    """Byzantine clients train with the label classes - 1 - y in place of y.

    Fang, Cao, Jia, Gong: Local Model Poisoning Attacks to Byzantine-Robust Federated Learning. USENIX Security 2020.
    """

    def prepare(self, run: AttackedRun) -> None:
        self.classes = run.classes

    def poison(self, stored: Any, labels: Tensor, indices: Indices) -> tuple[Any, Tensor]:
        return stored, self.classes - 1 - labels
