"""The losses that clients minimise: computes gradients and forward passes at any models."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedray.client.local_data import LocalData
from fedray.core.batches import Batch
from fedray.core.samples import Indices
from fedray.core.seeds import Purpose
from fedray.core.stopwatch import Stopwatch
from fedray.core.structure import leaves, map_leaves
from fedray.core.vectors import Model
from fedray.errors import UserError
from fedray.gradients.loss_scale import LossScale
from fedray.gradients.network import Draws, Network
from fedray.gradients.passes import Gradient, Outputs, RuleLoss, TrainingPass, UnfitTarget

NO_STEP = 2**63
"""The coordinate of random numbers that a module draws outside local steps. It stands in place of the step's number."""

PART = 256
"""The largest number of samples for which a part of a full-batch gradient is computed at a time."""


class Objective:
    """The losses f_i of C clients that are trained together: computes gradients and forward passes at any models.
    Algorithms reach it as ``client.objective``.

    A forward pass in training mode updates the buffers of the models that it uses, in place.

    Args:
        network: Runs the user's module.
        data: The clients' samples.
        stopwatch: Measures the time that gradients take.

    Example:
        g = client.objective.gradient(carry["y"], batch)
        h = client.objective.full_gradient(client.start("x"))
    """

    def __init__(self, network: Network, data: LocalData, stopwatch: Stopwatch | None = None) -> None:
        self.network, self.data, self.stopwatch = network, data, stopwatch or Stopwatch()
        self._scale = self._new_scale(len(data.ids))
        self._losses: list[Tensor] = []
        self._steps: list[int] = []
        # for each step: the two sums of the metric that the task follows
        self._totals: list[Tensor] = []
        self._counts: list[Tensor | list[int]] = []
        self._last_step = -1

    def _new_scale(self, clients: int) -> LossScale | None:
        return LossScale(clients, self.network.device) if self.network.precision == "fp16" else None

    def gradient(self, at: Model, batch: Batch, loss: RuleLoss | None = None, extras: Sequence[Tensor] = ()) -> Tensor:
        """Returns the gradient ``[C, width]`` of the mean loss over each client's mini-batch. The buffers of the models
        ``at`` are updated in place, as a forward pass in training mode updates them.

        It may be called several times for one mini-batch; dropout is the same each time. The first call in a local step
        also records the task's loss and the training metric, such as the accuracy, for :meth:`logged`.

        Args:
            at: The C models ``[C, row_width]`` at which the gradient is computed: for each client a row of ``width``
                parameters, followed by the buffers.
            batch: The clients' mini-batches, as :meth:`LocalData.batches` yields them.
            loss: ``loss(outputs, task_losses [b], *extras) -> [b]``, a loss of the algorithm that replaces the task's.
                It is called for each client: ``outputs`` are the :class:`Outputs` of the client's forward pass,
                ``task_losses`` the task's loss of each sample.
            extras: Tensors ``[C, ...]``, of which ``loss`` gets the client's rows as further arguments.

        Raises:
            UserError: The loss can't be computed for the target of a sample.
        """
        with self.stopwatch.on("gradient"), self._naming(lambda row: self.data.drawn(row, batch.step)):
            gradient = self.network.gradients(at, batch, loss, extras, self._draws(batch.step), self._scale)
        self._log(batch, gradient)
        return gradient.value

    @contextlib.contextmanager
    def _naming(self, samples: Callable[[int], Indices], first: int = 0) -> Iterator[None]:
        """A context in which an error about a target for which the loss can't be computed becomes a :class:`UserError`
        that names the client and the item. ``samples(row)`` are the indices of the samples in the mini-batch of the
        client in row ``first + row`` of the stack."""
        try:
            yield
        except UnfitTarget as error:
            item, client = samples(error.row)[error.place], self.data.ids[first + error.row]
            raise UserError(f"item {item} of the training data, which client {client} holds: {error}") from None

    def training_pass(self, at: Model, batch: Batch) -> TrainingPass:
        """Runs the forward passes of the mini-batches ``batch`` at the C models ``at`` now, so that their gradient can
        be computed later. It is for losses that also need outputs of other models, which are computed in between.

        ``training_pass(at, batch).gradient(loss, extras)`` returns the gradient ``[C, width]``, which equals
        ``gradient(at, batch, loss, extras)``.
        """
        with self.stopwatch.on("gradient"), self._naming(lambda row: self.data.drawn(row, batch.step)):
            forward = self.network.training_pass(at, batch, self._draws(batch.step), self._scale)
        forward.stopwatch = self.stopwatch
        self._log(batch, forward)
        return forward

    def full_gradient(self, at: Model) -> Tensor:
        """Returns the gradient ``[C, width]`` of each client's mean loss over all its samples, at the C models ``at``.
        Samples are not augmented, and the models, including their buffers, are not changed."""
        rows = []
        for row, indices in enumerate(self.data.indices):
            total = torch.zeros(at.width, dtype=torch.float64, device=at.row.device)
            model = at[row : row + 1]
            if model.has_buffers or self.network.writes:
                model = model.clone()
            parts = np.array_split(indices, -(-len(indices) // PART))
            for number, (part, share) in enumerate(zip(parts, self._shares(indices, parts), strict=True)):
                with self.stopwatch.on("data"):
                    x, y = self.data.samples.gather(part[None])
                draws = self._draws(NO_STEP + number, row)
                with self.stopwatch.on("gradient"), self._naming([part].__getitem__, row):
                    gradient = self.network.gradients(model, Batch(x, y, -1), rng=draws, scale=self._new_scale(1))
                total += gradient.value[0].double() * share
            rows.append(total.float())
        return torch.stack(rows)

    def full_loss(self, at: Model) -> Tensor:
        """Returns each client's mean loss over all its samples, float32 ``[C, 1]``, at the C models ``at``: the task's
        loss in evaluation mode, as on the test set. Samples are not augmented, and the models are not changed."""
        return self.full_losses(at)[0]

    def full_losses(self, at: Model) -> tuple[Tensor, Tensor]:
        """Returns what :meth:`full_loss` does, and the root of the mean of the samples' squared losses, float32 ``[C,
        1]``. With weights or several targets for a sample, its loss is that of the sample as a whole."""
        totals = torch.zeros(4, len(self.data.ids), dtype=torch.float64, device=at.row.device)
        for row, outputs, y in self.full_passes(at):
            with self.stopwatch.on("gradient"):
                logits = map_leaves(lambda rows: rows[0], outputs.logits)
                losses, weights = self.network.task.sums("loss", logits, y)
                totals[0, row] += losses.double().sum()
                totals[1, row] += len(y) if weights is None else weights.double().sum()
                totals[2, row] += losses.double().square().sum()
                totals[3, row] += len(y)
        return (totals[0] / totals[1])[:, None].float(), (totals[2] / totals[3]).sqrt()[:, None].float()

    def class_sums(self, at: Model) -> Tensor:
        """Returns for each client and class the sum of the features (the inputs of the last linear layer, in
        evaluation mode) of the client's samples of this class, and in the last column their number: float32 ``[C,
        classes, d + 1]``, at the C models ``at``. Samples are not augmented, and the models are not changed."""
        sums: list[Tensor | None] = [None] * len(self.data.ids)
        for row, outputs, y in self.full_passes(at):
            with self.stopwatch.on("gradient"):
                of_class = F.one_hot(y, outputs.logits.shape[-1]).T.double()
                found, before = of_class @ F.pad(outputs.features[0], (0, 1), value=1.0).double(), sums[row]
                sums[row] = found if before is None else before + found
        return torch.stack([each for each in sums if each is not None]).float()

    def full_passes(self, at: Model) -> Iterator[tuple[int, Outputs, Tensor]]:
        """Runs forward passes in evaluation mode over all samples of the clients at the C models ``at``, a part of one
        client's samples at a time. Yields the client's row, from 0, the :class:`Outputs` ``[1, b, ...]`` of the part,
        and its targets ``[b, ...]``. Samples are not augmented, and the models are not changed."""
        for row, indices in enumerate(self.data.indices):
            for number, part in enumerate(np.array_split(indices, -(-len(indices) // PART))):
                with self.stopwatch.on("data"):
                    x, y = self.data.samples.gather(part[None])
                with self.stopwatch.on("gradient"):
                    outputs = self.network.forward(at[row : row + 1], x, self._draws(NO_STEP + number, row))
                yield row, outputs, y[0]

    def _shares(self, indices: Indices, parts: Sequence[Indices]) -> list[float]:
        """Returns how much each of the ``parts`` of a client's samples counts in the client's mean loss over all its
        samples (``indices``), as fractions that add up to 1."""
        weights = self.network.task.weights(self.data.samples.targets(indices))
        if weights is None:
            return [len(part) / len(indices) for part in parts]
        total = float(weights.sum()) or 1.0
        return [float(each.sum()) / total for each in torch.split(weights, [len(part) for part in parts])]

    def forward(self, at: Model, x: Any) -> Outputs:
        """Runs a forward pass at the C models ``at`` in evaluation mode, without gradients. Returns its
        :class:`Outputs`: the logits ``[C, b, ...]``, and the features ``[C, b, d]``, which are the inputs of the last
        linear layer (None if there is none). The inputs are ``x [C, b, ...]``, or ``x [b, ...]`` if they are the same
        for all clients."""
        if leaves(x)[0].dim() == leaves(self.data.samples.form)[0].dim():
            x = map_leaves(lambda same: same.expand(len(self.data.ids), *same.shape), x)
        with self.stopwatch.on("gradient"):
            return self.network.forward(at, x, self._draws(NO_STEP))

    def class_logits(self, at: Model, x: Any) -> Tensor:
        """Returns the class logits of the C models ``at`` for the inputs ``x``, in evaluation mode. Unlike in
        :meth:`forward`, which takes the same arguments, the classes are always the last axis: ``[C, b, ...,
        classes]``."""
        logits: Tensor = self.forward(at, x).logits
        axis = self.network.task.class_axis
        return logits if axis == -1 else logits.movedim(axis + 1, -1)

    def logged(self) -> dict[str, list[float | None]]:
        """Returns each client's training loss in the round, and the metric that the task follows, such as the accuracy,
        as a dict of lists: ``{"loss": [C], "accuracy": [C]}``. Each number is a mean over the mini-batches of the
        client's local steps in which a gradient was computed, and None for a client without any. If no gradient was
        computed at all, the dict is empty."""
        if not self._losses:
            return {}
        # plain numbers, because arrays would take longer for so few
        losses = zip(*torch.stack(self._losses).double().tolist(), strict=True)
        steps, name = self.data.steps, self.network.task.followed
        places_of = {count: [n for n, step in enumerate(self._steps) if step < count][:count] for count in {*steps}}
        made = [places_of[count] for count in steps]

        def mean(losses: Sequence[float], places: Sequence[int]) -> float | None:
            return math.fsum(losses[place] for place in places) / len(places) if places else None

        found = {"loss": [mean(*each) for each in zip(losses, made, strict=True)]}
        if name is not None:
            totals = zip(*torch.stack(self._totals).tolist(), strict=True)
            counts = zip(*(each if isinstance(each, list) else each.tolist() for each in self._counts), strict=True)
            found[name] = [
                self.network.task.value(name, sum(total[i] for i in places), sum(count[i] for i in places))
                if places
                else None
                for total, count, places in zip(totals, counts, made, strict=True)
            ]
        return found

    def _log(self, batch: Batch, found: Gradient | TrainingPass) -> None:
        if batch.step != self._last_step:
            self._last_step = batch.step
            self._losses.append(found.task_loss)
            self._steps.append(batch.step)
            if found.followed is not None:
                total, count = found.followed
                self._totals.append(total)
                self._counts.append(
                    (batch.counts or [batch.y.shape[1]] * len(self.data.ids)) if count is None else count
                )

    def _draws(self, step: int, first: int = 0) -> Draws:
        """Returns a function that fixes the random numbers (dropout) of a local step: called with a row, it returns a
        context in which they are drawn for the client at position ``first + row`` of the stack."""
        seed, round, ids = self.data.training.seed, self.data.round, self.data.ids
        return lambda row: self.network.rng(seed, Purpose.DROPOUT, round, ids[first + row], step)
