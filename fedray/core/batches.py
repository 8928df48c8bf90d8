"""Which samples a client takes in each local step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.seeds import Purpose, stream


@dataclass(frozen=True)
class Batch:
    """One mini-batch of each client of a stack.

    ``x [C, b, ...]`` float32, ``y [C, b]`` int64, ``step`` j. ``counts [C]``: how many of the b samples are real (the
    rest is padding); None when all are.
    """

    x: Tensor
    y: Tensor
    step: int
    counts: list[int] | None = None


@dataclass(frozen=True)
class Schedule:
    """The order in which one client's samples are used in a round.

    ``order [J, b]``: position among the client's samples; ``counts``: how many of each of the J rows are real.
    """

    order: NDArray[np.int64]
    counts: list[int]


def steps_of(samples: int, batch_size: int | None, local_steps: int | None, local_epochs: int | None) -> int:
    """J_i: local_steps for everybody, or E * ceil(n_i / B). ``batch_size`` None is the full batch."""
    if local_steps is not None:
        return local_steps
    assert local_epochs is not None
    return local_epochs * -(-samples // (batch_size or max(samples, 1)))


def schedule(
    seed: int,
    purpose: Purpose,
    round: int,
    client: int,
    samples: int,
    batch_size: int | None,
    local_steps: int | None,
    local_epochs: int | None = None,
) -> Schedule:
    """The batches of one client in one round, which depend on nothing but the arguments.

    ``local_steps``: slices of b = min(B, n) from an endless stream of permutations of the n samples. ``local_epochs``:
    a fresh permutation each epoch, the ragged last batch kept.
    """
    size = min(batch_size or samples, samples)
    steps = steps_of(samples, batch_size, local_steps, local_epochs)

    def permutation(number: int) -> NDArray[np.int64]:
        return stream(seed, purpose, round, client, number).permutation(samples)

    if size == samples:
        # a full batch is the same set whatever its order: keep the order fixed, so that its sum is too
        return Schedule(np.broadcast_to(np.arange(samples), (steps, samples)), [samples] * steps)
    if local_steps is not None:
        passes = -(-steps * size // samples)
        order = np.concatenate([permutation(number) for number in range(passes)])
        return Schedule(order[: steps * size].reshape(steps, size), [size] * steps)
    per_epoch = -(-samples // size)
    order = np.zeros((local_epochs or 0, per_epoch * size), np.int64)
    for epoch in range(len(order)):
        order[epoch, :samples] = permutation(epoch)
    counts = [size] * (per_epoch - 1) + [samples - (per_epoch - 1) * size]
    return Schedule(order.reshape(-1, size), counts * len(order))
