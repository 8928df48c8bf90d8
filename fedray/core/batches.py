"""Decides which samples a client uses in each local step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.seeds import Purpose, stream
from fedray.core.structure import map_leaves


@dataclass(frozen=True)
class Batch:
    """The mini-batches of one local step: one for each of the C clients of a stack.

    Args:
        x: the inputs ``[C, b, ...]``, a tensor, or a tuple or dict of tensors, as the model gets them.
        y: the targets ``[C, b, ...]``.
        step: the number j of the local step, from 0.
        counts: for each client how many of its b samples are real; the rest is padding. It is 0 for a client that has
            already made all its steps. None means that all samples are real.
    """

    x: Any
    y: Tensor
    step: int
    counts: list[int] | None = None

    def client_samples(self, row: int) -> tuple[Any, Tensor]:
        """Returns the inputs and targets of the client in ``row`` of the stack, without padding.

        For a client that has made all its steps it returns one sample of padding, so that no batch is empty.
        """
        real = slice(None if self.counts is None else max(1, self.counts[row]))
        return map_leaves(lambda x: aligned(x[row, real]), self.x), self.y[row, real]

    def rests(self, row: int) -> bool:
        """Returns whether the client in ``row`` has made all its steps."""
        return self.counts is not None and not self.counts[row]


def aligned(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` if its memory is aligned to 64 bytes, and otherwise an aligned copy.

    The alignment of memory can change how kernels round.
    """
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()


@dataclass(frozen=True)
class Schedule:
    """The order in which one client uses its samples in a round.

    Row j of ``order [J, b]`` holds the positions, among the client's samples, of the mini-batch of local step j. Its
    first ``counts[j]`` entries are real; the rest is padding.
    """

    order: NDArray[np.int64]
    counts: list[int]


def steps_of(samples: int, batch_size: int | None, local_steps: int | None, local_epochs: int | None) -> int:
    """Returns how many local steps a client with ``samples`` samples makes in a round: ``local_steps`` if that is set,
    and otherwise the number of mini-batches in ``local_epochs`` epochs. A ``batch_size`` of None means full batches."""
    if local_steps is not None:
        return local_steps
    assert local_epochs is not None
    return local_epochs * -(-samples // (batch_size or max(samples, 1)))


def has_single(samples: int, batch_size: int | None, local_epochs: int | None) -> bool:
    """Returns whether a client with ``samples`` samples has mini-batches of one sample."""
    size = min(batch_size or samples, samples)
    return size == 1 or (local_epochs is not None and samples % max(size, 1) == 1)


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
    """Returns which samples are in the mini-batches of one client in one round. The result depends only on the
    arguments.

    With ``local_steps``, permutations of the client's samples are joined to one long list, from which each batch takes
    the next min(batch_size, samples). With ``local_epochs``, each epoch is one permutation, and its last batch may be
    smaller.

    Args:
        seed: ``run.seed``.
        purpose: ``Purpose.BATCHES`` for local training.
        round: the number of the round, from 1.
        client: the client's number.
        samples: the client's number of samples.
        batch_size: None for full batches.
        local_steps: None if ``local_epochs`` is set.
        local_epochs: None if ``local_steps`` is set.
    """
    size = min(batch_size or samples, samples)
    steps = steps_of(samples, batch_size, local_steps, local_epochs)

    def permutation(number: int) -> NDArray[np.int64]:
        return stream(seed, purpose, round, client, number).permutation(samples)

    if size == samples:
        # the order within a full batch does not matter; a fixed one also fixes how the sum is rounded
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
