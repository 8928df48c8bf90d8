"""The settings of local training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LocalTraining:
    """What every algorithm's local training shares (the keys ``train.*``): batches, and the clients' optimizer.

    ``batch_size`` None is the full batch. Of ``local_steps`` and ``local_epochs`` one is None.
    """

    seed: int
    batch_size: int | None = 64
    local_steps: int | None = 20
    local_epochs: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    augment: bool = False
