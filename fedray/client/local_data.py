"""The samples of a stack of clients (clients that are trained together), and the mini-batches that are made of the
samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedray.core.batches import Batch, BatchOrder, schedule
from fedray.core.local_training import LocalTraining
from fedray.core.prefetch import prefetched
from fedray.core.samples import Indices, Samples, SampleSeeds
from fedray.core.seeds import Purpose, are_held
from fedray.core.sending import column
from fedray.core.stopwatch import Stopwatch
from fedray.core.structure import leaves, map_leaves

GATHERED_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
"""How many bytes of samples are gathered at once, ahead of the steps that use them, for each kind of device."""


class LocalData:
    """The samples of C clients of a stack, and their mini-batches in one round. Algorithms reach it as ``client.data``.
    ``n`` and ``J`` are the clients' numbers of samples and of local steps, each ``[C, 1]`` float32.

    Args:
        samples: The data set that contains the clients' samples.
        training: The size of mini-batches, the augmentation and the seed.
        ids: The clients' numbers.
        indices: For each client the indices of its samples in ``samples``.
        steps: For each client the number of its local steps.
        round: The round, from 1, for which the order of the samples is drawn.
        purpose: What the mini-batches are drawn for, usually local training.
        stopwatch: Measures the time that reading samples takes; None for a new stopwatch.

    Example:
        for batch in client.data.batches():
            carry = self.step(client, carry, batch)
    """

    def __init__(
        self,
        samples: Samples,
        training: LocalTraining,
        ids: Sequence[int],
        indices: Sequence[Indices],
        steps: Sequence[int],
        round: int,
        purpose: Purpose = Purpose.BATCHES,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.samples, self.training, self.ids, self.indices = samples, training, ids, indices
        self.steps, self.round, self.purpose, self.stopwatch = steps, round, purpose, stopwatch or Stopwatch()

    @cached_property
    def n(self) -> Tensor:
        return column([len(each) for each in self.indices], self.samples.device)

    @cached_property
    def J(self) -> Tensor:
        return column(self.steps, self.samples.device)

    def epoch_steps(self) -> Tensor:
        """Returns for each client the number of local steps in one of its epochs, ceil(n / batch_size), as a column
        ``[C, 1]``. It is 1 if all samples of a client are one mini-batch."""
        size = self.training.batch_size
        return torch.ceil(self.n / size).clamp(min=1) if size else torch.ones_like(self.n)

    def epoch(self, j: int) -> Tensor:
        """Returns for each client the number of the epoch, from 0, to which the local step ``j`` (from 0) belongs, as a
        column ``[C, 1]``. An algorithm can use it to do something at the beginning of each epoch."""
        lengths = self.epoch_steps()
        # of two tensors, because a number divided by a tensor is multiplied by its rounded inverse
        return torch.floor(torch.full_like(lengths, j) / lengths)

    def begins_epoch(self, j: int) -> Tensor:
        """Returns for each client whether local step ``j`` (from 0) is the first of an epoch, as a bool column ``[C,
        1]``."""
        return self.epoch(j) > self.epoch(j - 1)

    def batches(self) -> Iterator[Batch]:
        """Yields the mini-batches ``[C, b, ...]`` of the C clients, for the local steps j = 0, 1, ... in which at least
        one client takes part. For clients that have already made all their local steps, a mini-batch has only
        padding."""
        made = self._batches()
        while True:
            with self.stopwatch.on("data"):
                batch = next(made, None)
            if batch is None:
                return
            yield batch

    def _batches(self) -> Iterator[Batch]:
        chosen, counts, widths = self._padded()
        size = chosen.shape[2]
        blocks = self._blocks(chosen, widths)
        # items are read with seeded generators, which a thread would wait for if this one has them
        ahead = self.samples.slow and not are_held()
        for start, raw, labels in prefetched(blocks) if ahead else blocks:
            if self.training.poison is not None:
                of_samples = chosen[start : start + len(labels)]
                raw, labels = self.training.poison(raw, labels, self.ids, of_samples)
            of_block = counts[start : start + len(labels)]
            # batches are converted together only if each is aligned in memory, because alignment can change rounding
            full = all(min(of_step) == size for of_step in of_block)
            aligned = all(leaf[0].numel() * 4 % 64 == 0 for leaf in leaves(raw))
            at_once = full and aligned and not self.training.augment
            inputs = self.samples.inputs(raw) if at_once else None
            for j, of_step in enumerate(of_block, start):
                width = max(of_step)
                if inputs is None:
                    x = self._inputs(_step(raw, j - start, width), of_step, j)
                else:
                    x = _step(inputs, j - start, size)
                real = list(of_step) if min(of_step) < width else None
                yield Batch(x, labels[j - start, :, :width], j, real)

    def _blocks(self, chosen: Indices, widths: Sequence[int]) -> Iterator[tuple[int, Any, Tensor]]:
        """Reads the samples with the indices ``chosen [J, C, b]``, a few local steps at a time. Yields the first local
        step of each such block, the inputs in their stored form and the targets, both ``[steps, C, b, ...]``.
        ``widths`` are the sizes of the clients' own mini-batches."""
        _, clients, size = chosen.shape
        block = max(1, GATHERED_BYTES[self.samples.device.type] // max(1, self.samples.bytes_each * clients * size))
        for start in range(0, len(chosen), block):
            draws = SampleSeeds(self.round, self.ids, start, size, widths)
            yield start, *self.samples.raw(chosen[start : start + block], draws)

    def _inputs(self, stored: Any, counts: Sequence[int], j: int) -> Any:
        for change in self.training.augment:
            stored = change(stored, counts, self.ids, self.training.seed, self.round, j)
        return self.samples.inputs(stored)

    def _schedules(self) -> list[BatchOrder]:
        training = self.training
        return [
            schedule(
                training.seed,
                self.purpose,
                self.round,
                client,
                len(indices),
                training.batch_size,
                steps if training.local_steps is not None else None,
                training.local_epochs,
            )
            for client, indices, steps in zip(self.ids, self.indices, self.steps, strict=True)
        ]

    def drawn(self, row: int, step: int) -> Indices:
        """Finds the samples of one mini-batch, for example to name a sample in an error: returns their indices ``[b]``
        in the data set, for client number ``row`` of the C clients (from 0) and the local step ``step``. If the
        mini-batch has padding, its indices are that of the client's first sample."""
        indices: Indices = self._padded()[0][step, row]
        return indices

    def _padded(self) -> tuple[Indices, list[tuple[int, ...]], list[int]]:
        """Returns which samples are in which mini-batch: their indices ``[J, C, b]``, for each local step a tuple of
        the numbers of real samples of the C clients, and the sizes of the clients' own mini-batches.

        J is the number of steps of the client that makes most of them, and b the size of the largest batch. The padding
        repeats a client's first sample, which is a valid input; its weight is zero.
        """
        schedules = self._schedules()
        steps = max(len(plan.order) for plan in schedules)
        widths = [plan.order.shape[1] for plan in schedules]
        size = max(widths)
        chosen = np.empty((steps, len(self.ids), size), np.int64)
        for row, (plan, indices) in enumerate(zip(schedules, self.indices, strict=True)):
            made, width = plan.order.shape
            chosen[:, row] = indices[0]
            chosen[:made, row, :width] = indices[plan.order]
        return chosen, list(zip_longest(*(plan.counts for plan in schedules), fillvalue=0)), widths


def _step(block: Any, step: int, width: int) -> Any:
    """Returns the inputs ``[C, width, ...]`` of local step ``step`` of a block ``[steps, C, b, ...]``: the first
    ``width`` samples of each client."""
    return map_leaves(lambda x: x[step, :, :width], block)
