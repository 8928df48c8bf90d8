"""The settings of local training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedray.core.augmentation import Augmentation
from fedray.core.samples import Indices

Poison = Callable[[Any, Tensor, Sequence[int], Indices], tuple[Any, Tensor]]
"""What makes of stored inputs and labels those on which clients train."""


@dataclass(frozen=True)
class LocalTraining:
    """The settings of clients' local training, which are the same for all algorithms: mini-batches and the clients'
    optimizer.

    Most attributes are named after their keys ``train.*`` in the configuration; ``seed`` is ``run.seed``. A
    ``batch_size`` of None means that all samples of a client are one mini-batch. Training is measured either in
    ``local_steps`` or in ``local_epochs`` (passes over a client's samples); the other one is None. ``optimizer`` is
    ``sgd``, ``adam`` or ``adamw``; ``beta1``, ``beta2`` and ``epsilon`` are for the last two. ``momentum_reset`` says
    when momentum starts from 0 again: in each ``round``, in each ``epoch``, or ``never``. ``grad_clip`` is the largest
    norm of a gradient (0: not clipped). Weight decay leaves out normalisation layers and biases unless
    ``decay_norms_and_biases`` is set. ``augment`` holds the functions that change the inputs of mini-batches at random
    (:data:`~fedray.core.augmentation.Augmentation`). They are called one after another, in this order.
    ``poison(stored, labels, clients, indices)`` returns the stored inputs and the labels ``[..., C, b]`` on which
    ``clients`` train in place of those of the samples ``indices`` ``[..., C, b]``, if it is not None.
    """

    seed: int
    batch_size: int | None = 64
    local_steps: int | None = 20
    local_epochs: int | None = None
    momentum: float = 0.0
    nesterov: bool = False
    momentum_reset: str = "round"
    weight_decay: float = 0.0
    decay_norms_and_biases: bool = True
    grad_clip: float = 0.0
    optimizer: str = "sgd"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    augment: tuple[Augmentation, ...] = ()
    poison: Poison | None = None
