"""The samples of a stack of clients, and the mini-batches that they make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.augmentation import crop_flip
from fedray.core.batches import Batch, Schedule, schedule
from fedray.core.clock import Clock
from fedray.core.local_training import LocalTraining
from fedray.core.seeds import Purpose

Indices = NDArray[np.int64]

GATHERED_BYTES = 8 << 20
"""The number of bytes of samples that are gathered at once, ahead of the steps that use them."""


@dataclass(frozen=True)
class Samples:
    """A data set on its device. The model's inputs are ``float32(x) * scale + shift``, for each channel."""

    x: Tensor
    y: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None

    def gather(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Returns the inputs ``x [*indices.shape, ...]`` float32 and the targets ``y`` of some samples. They are in
        fresh memory, which is aligned."""
        raw, y = self.raw(indices)
        return self.inputs(raw), y

    def raw(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Does the same as :meth:`gather`, but leaves ``x`` as it is stored."""
        flat = torch.from_numpy(indices.reshape(-1)).to(self.x.device)
        x, y = self.x.index_select(0, flat), self.y.index_select(0, flat)
        return x.view(*indices.shape, *x.shape[1:]), y.view(indices.shape)

    def inputs(self, raw: Tensor) -> Tensor:
        """Returns the float32 inputs of stored samples ``[..., *sample]``, in fresh memory."""
        if self.scale is None or self.shift is None:
            return raw.to(torch.float32, copy=True)
        shape = (-1,) + (1,) * (self.x.dim() - 2)
        return raw.to(torch.float32, copy=True).mul_(self.scale.view(shape)).add_(self.shift.view(shape))


class LocalData:
    """The data of C clients. ``indices`` are the indices of each client's samples in ``samples``, and ``steps`` the
    number of its local steps.

    ``purpose`` says what the mini-batches are drawn for. ``n`` and ``J`` are ``[C, 1]`` float32: samples and local
    steps.
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
        clock: Clock | None = None,
    ) -> None:
        self.samples, self.training, self.ids, self.indices = samples, training, ids, indices
        self.steps, self.round, self.purpose, self.clock = steps, round, purpose, clock or Clock()

    @cached_property
    def n(self) -> Tensor:
        return self._column([len(own) for own in self.indices])

    @cached_property
    def J(self) -> Tensor:
        return self._column(self.steps)

    def _column(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.samples.x.device)[:, None]

    def epoch_steps(self) -> Tensor:
        """Returns the number of steps in a local epoch, ceil(n / B), ``[C, 1]``."""
        size = self.training.batch_size
        return torch.ceil(self.n / size).clamp(min=1) if size else torch.ones_like(self.n)

    def epoch(self, j: int) -> Tensor:
        """Returns the local epoch, from 0, in which step ``j`` lies, ``[C, 1]``."""
        return torch.floor(j / self.epoch_steps())

    def batches(self) -> Iterator[Batch]:
        """Yields the mini-batches of the local steps j = 0, 1, ... Clients with fewer steps than others get padding at
        the end."""
        made = self._batches()
        while True:
            with self.clock.on("data"):
                batch = next(made, None)
            if batch is None:
                return
            yield batch

    def _batches(self) -> Iterator[Batch]:
        chosen, counts = self._padded()
        size = chosen.shape[2]
        block = max(1, GATHERED_BYTES // max(1, self.samples.x[0].nbytes * len(self.ids) * size))
        for start in range(0, len(chosen), block):
            raw, labels = self.samples.raw(chosen[start : start + block])
            # batches are converted together only if each begins at an aligned address, as kernels round by alignment
            full = all(min(of_step) == size for of_step in counts[start : start + block])
            at_once = full and raw[0].numel() * 4 % 64 == 0 and not self.training.augment
            inputs = self.samples.inputs(raw) if at_once else None
            for j, of_step in enumerate(counts[start : start + block], start):
                width = max(of_step)
                x = self._inputs(raw[j - start, :, :width], of_step, j) if inputs is None else inputs[j - start]
                real = [max(1, count) for count in of_step] if min(of_step) < width else None
                yield Batch(x, labels[j - start, :, :width], j, real)

    def _inputs(self, stored: Tensor, counts: Sequence[int], j: int) -> Tensor:
        if self.training.augment:
            stored = crop_flip(stored, counts, self.ids, self.training.seed, self.round, j)
        return self.samples.inputs(stored)

    def _schedules(self) -> list[Schedule]:
        training = self.training
        return [
            schedule(
                training.seed,
                self.purpose,
                self.round,
                client,
                len(own),
                training.batch_size,
                steps if training.local_steps is not None else None,
                training.local_epochs,
            )
            for client, own, steps in zip(self.ids, self.indices, self.steps, strict=True)
        ]

    def _padded(self) -> tuple[Indices, list[tuple[int, ...]]]:
        """Returns sample indices ``[J, C, b]``, and for each step the number of real samples of each client.

        J and b are those of the client with the most steps and of the one with the largest batch. The padding repeats a
        client's first sample, which is a valid input; its weight is zero.
        """
        schedules = self._schedules()
        steps = max(len(plan.order) for plan in schedules)
        size = max(plan.order.shape[1] for plan in schedules)
        chosen = np.empty((steps, len(self.ids), size), np.int64)
        for row, (plan, own) in enumerate(zip(schedules, self.indices, strict=True)):
            made, width = plan.order.shape
            chosen[:, row] = own[0]
            chosen[:made, row, :width] = own[plan.order]
        return chosen, list(zip_longest(*(plan.counts for plan in schedules), fillvalue=0))
