"""Decides which samples a client uses in each local step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.seeds import Purpose, permutation
from fedray.core.structure import map_leaves


@dataclass(frozen=True)
class Batch:
    """The mini-batches of one local step: one for each of the C clients of a stack.

    Args:
        x: the inputs ``[C, b, ...]``, a tensor, or a tuple or dict of tensors, as the model gets them.
        y: the targets ``[C, b, ...]``.
        step: the number j of the local step, from 0.
        counts: for each client how many of its b samples are real; its other samples are padding. The number is 0 for a
            client that has already made all its local steps. None means that all samples are real.
    """

    x: Any
    y: Tensor
    step: int
    counts: list[int] | None = None

    def client_samples(self, row: int) -> tuple[Any, Tensor]:
        """Returns the inputs and the targets in one client's mini-batch, both ``[samples, ...]`` and without padding.
        ``row`` is the client's place among the C clients, from 0. For a client that has already made all its local
        steps it returns one sample of padding, because a forward pass needs at least one sample."""
        real = slice(None if self.counts is None else max(1, self.counts[row]))
        return map_leaves(lambda x: aligned(x[row, real]), self.x), self.y[row, real]

    def rests(self, row: int) -> bool:
        """Returns whether a client takes no part in this local step, because it has already made all its local steps
        while other clients still make theirs. ``row`` is the client's place among the C clients, from 0."""
        return self.counts is not None and not self.counts[row]


def aligned(tensor: Tensor) -> Tensor:
    """Makes results independent of where a sample lay in memory, because kernels may round differently if memory is not
    aligned. Returns ``tensor`` itself if its memory begins at a multiple of 64 bytes, and otherwise a copy that
    does."""
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()


@dataclass(frozen=True)
class BatchOrder:
    """Says which of a client's samples are in the mini-batch of each local step of a round.

    Row j of ``order [J, b]`` is for local step j. Its entries are positions among the client's samples, from 0. The
    first ``counts[j]`` entries of the row are real; the others are padding.
    """

    order: NDArray[np.int64]
    counts: list[int]


def steps_of(samples: int, batch_size: int | None, local_steps: int | None, local_epochs: int | None) -> int:
    """Returns how many local steps (mini-batches) a client with ``samples`` samples makes in a round: ``local_steps``
    if that is set, and otherwise the number of mini-batches in ``local_epochs`` epochs. A ``batch_size`` of None means
    that all samples of a client are one mini-batch."""
    if local_steps is not None:
        return local_steps
    assert local_epochs is not None
    return local_epochs * -(-samples // (batch_size or max(samples, 1)))


def has_single(samples: int, batch_size: int | None, local_epochs: int | None) -> bool:
    """Returns whether any mini-batch of a client with ``samples`` samples has only a single sample, which BatchNorm may
    be unable to normalise.

    A ``batch_size`` of None means that all samples of a client are one mini-batch. A ``local_epochs`` of None means
    that the length of training is set in steps; all mini-batches of a client then have the same size.
    """
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
) -> BatchOrder:
    """Draws which samples are in which mini-batch of one client in one round. The result depends only on the arguments.

    With ``local_steps``, permutations of the client's samples are joined to one long list, from which each mini-batch
    takes the next min(batch_size, samples). With ``local_epochs``, each epoch is one permutation, and the last
    mini-batch of an epoch may be smaller.

    Args:
        seed: ``run.seed``.
        purpose: what the mini-batches are for, ``Purpose.BATCHES`` for local training. Each purpose has random numbers
            of its own.
        round: the number of the round, from 1.
        client: the client's number.
        samples: the client's number of samples.
        batch_size: the number of samples in a mini-batch; None means that all samples of the client are one mini-batch.
        local_steps: the number of mini-batches; None if ``local_epochs`` is set.
        local_epochs: the number of passes over the client's samples; None if ``local_steps`` is set.
    """
    size = min(batch_size or samples, samples)
    steps = steps_of(samples, batch_size, local_steps, local_epochs)

    def drawn(number: int) -> NDArray[np.int64]:
        return permutation(samples, seed, purpose, round, client, number)

    if size == samples:
        # the order within a full batch does not matter; a fixed one also fixes how the sum is rounded
        return BatchOrder(np.broadcast_to(np.arange(samples), (steps, samples)), [samples] * steps)
    if local_steps is not None:
        passes = -(-steps * size // samples)
        order = np.concatenate([drawn(number) for number in range(passes)])
        return BatchOrder(order[: steps * size].reshape(steps, size), [size] * steps)
    per_epoch = -(-samples // size)
    order = np.zeros((local_epochs or 0, per_epoch * size), np.int64)
    for epoch in range(len(order)):
        order[epoch, :samples] = drawn(epoch)
    counts = [size] * (per_epoch - 1) + [samples - (per_epoch - 1) * size]
    return BatchOrder(order.reshape(-1, size), counts * len(order))
