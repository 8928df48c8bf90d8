"""Schedules of learning rates by round."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A schedule of learning rates: the factor by which a learning rate is multiplied in each round r, from 1.

    With t = r - 1 - warmup, the factor is

    * ``constant``: 1
    * ``exponential``: decay^t
    * ``step``: decay^floor(t / every)
    * ``cosine``: final + (1 - final) (1 + cos(pi t / (rounds - warmup))) / 2, and ``final`` after ``rounds`` rounds.

    In the first ``warmup`` rounds the factor is r / (warmup + 1) instead. The formulas are those of LinearLR,
    ExponentialLR, StepLR and CosineAnnealingLR in torch.optim.

    Args:
        kind: ``constant``, ``exponential``, ``step`` or ``cosine``.
        decay: by what the rate is multiplied after each round (``exponential``) or after ``every`` rounds (``step``).
        every: the number of rounds between two steps of ``step``.
        final: the last factor of ``cosine``.
        rounds: the number of rounds in which ``cosine`` falls to ``final``, including the warm-up.
        warmup: the number of rounds at the beginning in which the factor rises.
    """

    kind: str = "constant"
    decay: float = 1.0
    every: int = 1
    final: float = 0.0
    rounds: int = 1
    warmup: int = 0

    def factor(self, number: int) -> float:
        """Returns the factor by which the learning rate is multiplied in round ``number``, which is counted from 1."""
        t = number - 1 - self.warmup
        if t < 0:
            return number / (self.warmup + 1)
        if self.kind == "exponential":
            return self.decay**t
        if self.kind == "step":
            return self.decay ** (t // self.every)
        if self.kind == "cosine":
            share = min(1.0, t / (self.rounds - self.warmup))
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * share)) / 2
        return 1.0
