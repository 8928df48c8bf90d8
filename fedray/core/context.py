"""What an algorithm's local rule sees of a stack of clients: their data, models, gradients and scalars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedray.core import seeds
from fedray.core.batches import Batch, Schedule, schedule
from fedray.core.clock import Clock
from fedray.core.model import Draws, FlatModel, Gradient, Outputs, Pass, RuleLoss
from fedray.core.seeds import Purpose

Indices = NDArray[np.int64]

GATHERED_BYTES = 8 << 20
"""How much of a stack's samples is gathered ahead of the steps that use it."""

NO_STEP = 2**63
"""The step coordinate of what a module draws outside local steps."""


@dataclass(frozen=True)
class LocalTraining:
    """The settings of local training that every algorithm shares (``train.*``)."""

    seed: int
    batch_size: int | None = 64
    local_steps: int | None = 20
    local_epochs: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    augment: bool = False


@dataclass(frozen=True)
class Samples:
    """A data set on its device; inputs are ``float32(x) * scale + shift`` per channel."""

    x: Tensor
    y: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None

    def gather(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """``x [*indices.shape, ...]`` float32 and ``y`` of the samples, in fresh (hence aligned) memory."""
        raw, y = self.raw(indices)
        return self.inputs(raw), y

    def raw(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """As :meth:`gather`, but ``x`` as it is stored."""
        flat = torch.from_numpy(indices.reshape(-1)).to(self.x.device)
        x, y = self.x.index_select(0, flat), self.y.index_select(0, flat)
        return x.view(*indices.shape, *x.shape[1:]), y.view(indices.shape)

    def inputs(self, raw: Tensor) -> Tensor:
        """Float32 inputs of stored samples ``[..., *sample]``, in fresh memory whatever ``raw`` is a slice of."""
        if self.scale is None or self.shift is None:
            return raw.to(torch.float32, copy=True)
        shape = (-1,) + (1,) * (self.x.dim() - 2)
        return raw.to(torch.float32, copy=True).mul_(self.scale.view(shape)).add_(self.shift.view(shape))


@dataclass
class Stack:
    """Clients that are trained together, and what the server says of each (lists of C)."""

    ids: Sequence[int]
    indices: Sequence[Indices]
    steps: Sequence[int]
    weights: Sequence[float]
    gaps: Sequence[int]
    scalars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    purpose: Purpose = Purpose.BATCHES


class Context:
    """One phase of one round for a stack of C clients.

    ``shared``: the server's broadcast by name (model vectors are ``[width]``); ``given``: the server's per-client
    scalars, ``[C, 1]``; ``state``: the clients' own vectors, ``[C, width]``, and whole models, zeros before the first
    participation; ``kept``: what an earlier phase of this round kept, ``[C, ...]``. ``n``, ``J``, ``gap`` and ``p``
    are ``[C, 1]`` float32: samples, local steps, rounds since the last participation (0: never took part), aggregation
    weight. ``N`` clients hold samples, ``members`` are in the cohort. ``past [C, width]``, for an algorithm that
    ``needs_past``: the model that each client received at its last participation, zeros before the first. ``momentum
    [C, width]``: the buffer of the clients' SGD, None until its first step; an algorithm may set it at the beginning.
    """

    def __init__(
        self,
        model: FlatModel,
        samples: Samples,
        training: LocalTraining,
        stack: Stack,
        *,
        round: int,
        lr: float,
        clients: int,
        shared: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None = None,
        kept: Mapping[str, Tensor] | None = None,
        past: Tensor | None = None,
        members: int = 1,
        initial: Callable[[int | None], Tensor] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.model, self.samples, self.training, self.stack = model, samples, training, stack
        self.round, self.lr, self.N, self.members = round, lr, clients, members
        self.shared, self.state, self.kept = shared, state or {}, kept or {}
        self.past, self._initial = past, initial
        self.clock = clock or Clock()
        self.given = {name: self._column(values) for name, values in stack.scalars.items()}
        self.size = len(stack.ids)
        buffers = shared.get("buffers")
        self.buffers = None if buffers is None else buffers.expand(self.size, -1).clone()
        self.momentum: Tensor | None = None
        self._losses: list[Tensor] = []
        self._correct: list[Tensor] = []
        self._seen: list[list[int]] = []
        self._step = self._now = -1

    @cached_property
    def n(self) -> Tensor:
        return self._column([len(indices) for indices in self.stack.indices])

    @cached_property
    def J(self) -> Tensor:
        return self._column(self.stack.steps)

    @cached_property
    def gap(self) -> Tensor:
        return self._column(self.stack.gaps)

    @cached_property
    def p(self) -> Tensor:
        return self._column(self.stack.weights)

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.model.device)[:, None]

    def start(self, name: str) -> Tensor:
        """The shared vector ``name`` as the start of each client: ``[C, width]``."""
        return self.shared[name].expand(self.size, -1)

    def batches(self) -> Iterator[Batch]:
        """The mini-batches of the local steps j = 0, 1, ...; clients with fewer steps get padding at the end."""
        made = self._batches()
        while True:
            with self.clock.on("data"):
                batch = next(made, None)
            if batch is None:
                return
            yield batch

    def _batches(self) -> Iterator[Batch]:
        training, stack = self.training, self.stack
        schedules = [
            schedule(
                training.seed,
                stack.purpose,
                self.round,
                client,
                len(indices),
                training.batch_size,
                steps if training.local_steps is not None else None,
                training.local_epochs,
            )
            for client, indices, steps in zip(stack.ids, stack.indices, stack.steps, strict=True)
        ]
        chosen, counts = self._padded(schedules)
        size = chosen.shape[2]
        block = max(1, GATHERED_BYTES // max(1, self.samples.x[0].nbytes * self.size * size))
        for start in range(0, len(chosen), block):
            raw, labels = self.samples.raw(chosen[start : start + block])
            # all at once, if each batch then begins where a fresh one would: kernels round by alignment
            full = all(min(of_step) == size for of_step in counts[start : start + block])
            at_once = full and raw[0].numel() * 4 % 64 == 0 and not training.augment
            inputs = self.samples.inputs(raw) if at_once else None
            for j, of_step in enumerate(counts[start : start + block], start):
                self._now, width = j, max(of_step)
                if inputs is not None:
                    x = inputs[j - start]
                else:
                    stored = raw[j - start, :, :width]
                    x = self.samples.inputs(self._augmented(stored, of_step, j) if training.augment else stored)
                real = [max(1, count) for count in of_step] if min(of_step) < width else None
                yield Batch(x, labels[j - start, :, :width], j, real)

    def _padded(self, schedules: Sequence[Schedule]) -> tuple[Indices, list[tuple[int, ...]]]:
        """Sample indices ``[J, C, b]``, for the longest and largest client, and of each step the number of real ones of
        each client.

        Padding repeats a client's first sample: a valid input, whose weight is zero.
        """
        steps = max(len(plan.order) for plan in schedules)
        size = max(plan.order.shape[1] for plan in schedules)
        chosen = np.empty((steps, self.size, size), np.int64)
        for row, (plan, own) in enumerate(zip(schedules, self.stack.indices, strict=True)):
            made, width = plan.order.shape
            chosen[:, row] = own[0]
            chosen[:made, row, :width] = own[plan.order]
        return chosen, list(zip_longest(*(plan.counts for plan in schedules), fillvalue=0))

    def _augmented(self, x: Tensor, counts: Sequence[int], j: int) -> Tensor:
        """Random crop after padding by 4, and mirroring, of samples as they are stored: ``x [C, b, c, h, w]``.

        What is padded is thus black, a stored 0, before it is normalised. Drawn for each client's own samples alone, of
        which there are ``counts`` (C), whatever its chunk-mates have.
        """
        samples, _, height, width = x.shape[1:]
        draws = [self._crops(client, own, samples, j) for client, own in zip(self.stack.ids, counts, strict=True)]
        top, left, mirrored = (np.concatenate(drawn)[:, None] for drawn in zip(*draws, strict=True))
        across = np.where(mirrored, np.arange(width)[::-1], np.arange(width)) + left
        lines, columns = (torch.from_numpy(places).to(x.device) for places in (top + np.arange(height), across))
        image = torch.arange(len(lines), device=x.device)[:, None, None]
        padded = torch.nn.functional.pad(x.flatten(0, 1), (4, 4, 4, 4))
        cropped = padded.permute(0, 2, 3, 1)[image, lines[:, :, None], columns[:, None, :]]
        return cropped.permute(0, 3, 1, 2).contiguous().view_as(x)

    def _crops(self, client: int, own: int, samples: int, j: int) -> tuple[Indices, Indices, NDArray[np.bool_]]:
        """Top and left edge (0 to 8) of each of a client's windows in step j, and whether it is mirrored."""
        rng = seeds.stream(self.training.seed, Purpose.AUGMENTATION, self.round, client, j)
        others = (0, samples - own)
        top, left = (np.pad(rng.integers(0, 9, own), others) for _ in range(2))
        return top, left, np.pad(rng.random(own) < 0.5, others)

    def epoch_steps(self) -> Tensor:
        """The steps of a local epoch, ceil(n / B), ``[C, 1]``."""
        size = self.training.batch_size
        return torch.ceil(self.n / size).clamp(min=1) if size else torch.ones_like(self.n)

    def epoch(self, j: int) -> Tensor:
        """The local epoch (from 0) in which step j lies, ``[C, 1]``."""
        return torch.floor(j / self.epoch_steps())

    def whole(self, w: Tensor) -> Tensor:
        """The clients' models as they are now, ``w [C, width]`` and buffers: ``[C, width + buffer_width]``."""
        return w if self.buffers is None else torch.cat([w, self.buffers], dim=1)

    def init_models(self, own: bool) -> Tensor:
        """The whole initial model x^1 for each client, or with ``own`` a fresh draw for each."""
        assert self._initial is not None
        return torch.stack([self._initial(client if own else None) for client in self.stack.ids])

    def grad(
        self,
        at: Tensor,
        batch: Batch,
        loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        keep_buffers: bool = False,
    ) -> Tensor:
        """Mini-batch gradient at the models ``at [C, width]``, as wide as they are.

        ``loss(outputs, task_losses, *extras)`` replaces the task loss where an algorithm has its own; each of
        ``extras`` is ``[C, ...]`` and is handed over a client at a time. May be called several times on one batch (with
        the same dropout each time); the first call of a step is the one whose loss and accuracy are logged. With
        ``keep_buffers`` the pass leaves no trace in running statistics. Whole models (see :meth:`whole`) have buffers
        of their own, which are updated in place, and for which the gradient is zero.
        """
        _, own = self.model.layout.split(at)
        buffers = self.buffers if own is None else own
        if keep_buffers and buffers is not None:
            buffers = buffers.clone()
        with self.clock.on("gradient"):
            gradient = self.model.gradients(at, batch, buffers, loss, extras, self._draws(batch.step))
        self._log(batch, gradient)
        return gradient.value

    def train_pass(self, at: Tensor, batch: Batch) -> Pass:
        """The forward pass of ``batch`` at ``at [C, width]``, for a loss that needs what other models make of its
        features: ``pass.grad(loss, extras)`` is then what :meth:`grad` would have given."""
        with self.clock.on("gradient"):
            forward = self.model.train_pass(at, batch, self.buffers, self._draws(batch.step))
        forward.clock = self.clock
        self._log(batch, forward)
        return forward

    def _log(self, batch: Batch, found: Gradient | Pass) -> None:
        if batch.step != self._step:
            self._step = batch.step
            self._losses.append(found.task_loss)
            self._correct.append(found.correct)
            self._seen.append(batch.counts or [batch.y.shape[1]] * self.size)

    def _draws(self, step: int, first: int = 0) -> Draws:
        """What a module draws (dropout) in a step, for the clients from position ``first`` of the stack on."""
        seed, round, ids = self.training.seed, self.round, self.stack.ids
        return lambda row: seeds.torch_rng(seed, Purpose.DROPOUT, round, ids[first + row], step)

    def full_grad(self, at: Tensor) -> Tensor:
        """Gradient ``[C, width]`` of each client's mean loss over all its samples, unaugmented, buffers untouched."""
        rows = []
        for row, own in enumerate(self.stack.indices):
            total = torch.zeros(at.shape[1], dtype=torch.float64, device=at.device)
            buffers = None if self.buffers is None else self.buffers[row : row + 1].clone()
            for number, part in enumerate(np.array_split(own, -(-len(own) // 256))):
                with self.clock.on("data"):
                    x, y = self.samples.gather(part[None])
                draws = self._draws(NO_STEP + number, row)
                with self.clock.on("gradient"):
                    gradient = self.model.gradients(at[row : row + 1], Batch(x, y, -1), buffers, rng=draws)
                total += gradient.value[0].double() * (len(part) / len(own))
            rows.append(total.float())
        return torch.stack(rows)

    def forward(self, at: Tensor, x: Tensor) -> Outputs:
        """Evaluation-mode outputs of ``x [C, b, ...]`` (or ``[b, ...]``, the same for all) at ``at [C, width]``, or at
        whole models with buffers of their own."""
        if x.dim() == self.samples.x.dim():
            x = x.expand(self.size, *x.shape)
        w, own = self.model.layout.split(at)
        with self.clock.on("gradient"):
            return self.model.forward(w, x, self.buffers if own is None else own, self._draws(NO_STEP))

    def assemble(self, w: Tensor, direction: Tensor) -> Tensor:
        """The step's direction: corrected gradient, clipped, plus weight decay, through the client's momentum.

        This order is ALGORITHMS' rule R2: (c) clipping, (d) weight decay, (e) local momentum.
        """
        training = self.training
        if training.grad_clip:
            norm = direction.norm(dim=1, keepdim=True)
            direction = direction * (training.grad_clip / norm.clamp(min=training.grad_clip))
        if training.weight_decay:
            direction = direction.add(w, alpha=training.weight_decay)
        if training.momentum:
            before = torch.zeros_like(direction) if self.momentum is None else self.momentum
            direction = direction.add(before, alpha=training.momentum)
            self.momentum = self.hold({"": direction}, {"": before}, self._now)[""]
        return direction

    def descend(self, w: Tensor, direction: Tensor) -> Tensor:
        """One step of the local optimizer: w - eta_l * assemble(w, direction)."""
        return w.sub(self.assemble(w, direction), alpha=self.lr)

    def hold(self, new: dict[str, Tensor], old: dict[str, Tensor], j: int) -> dict[str, Tensor]:
        """``new``, but ``old`` for the clients that have made their J_i steps already."""
        if j < min(self.stack.steps):
            return new
        live = j < self.J
        return {name: torch.where(live, value, old[name]) for name, value in new.items()}

    def training_scalars(self) -> dict[str, list[float]]:
        """``loss`` and ``accuracy`` of each client's mini-batches, means over its local steps."""
        if not self._losses:
            return {}
        # plain numbers: of the few that a client has, arrays would take longer
        of_steps = torch.stack(self._losses).double().tolist(), torch.stack(self._correct).tolist(), self._seen
        columns = (zip(*rows, strict=True) for rows in of_steps)
        found: dict[str, list[float]] = {"loss": [], "accuracy": []}
        for steps, losses, correct, seen in zip(self.stack.steps, *columns, strict=True):
            found["loss"].append(math.fsum(losses[:steps]) / steps)
            found["accuracy"].append(sum(correct[:steps]) / sum(seen[:steps]))
        return found
