"""Trains one client after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fedray.core.batches import Batch
from fedray.core.precision import HALF
from fedray.core.sending import sent
from fedray.core.structure import map_leaves
from fedray.core.vectors import Model
from fedray.gradients.direct_linear import DirectLinear
from fedray.gradients.lanes import SideBySide
from fedray.gradients.loss_scale import LossScale, write_gradient
from fedray.gradients.network import Draws, Network, undrawn
from fedray.gradients.passes import Gradient, RuleLoss, followed_of, in_rows, losses_of


class LoopNetwork(Network):
    """Runs the user's module for one client after another: the kind of :class:`Network` that computes the forward
    passes and gradients of C clients through the module itself. It works for all modules. On a GPU, the recorded
    operations of several clients' gradients may be replayed side by side."""

    @cached_property
    def _direct(self) -> DirectLinear | None:
        return self._direct_of(self._trainable)

    def _direct_of(self, parameters: Sequence[Tensor]) -> DirectLinear | None:
        found = DirectLinear(self.layout, parameters)
        return found if found.has_layers and self.precision not in HALF else None

    def gradients(
        self,
        at: Model,
        batch: Batch,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
        scale: LossScale | None = None,
    ) -> Gradient:
        rows = [row for row in range(len(at.row)) if not batch.rests(row)]
        own_loss = rule_loss is not None or scale is not None

        def eager(row: int, x: Any, y: Tensor) -> tuple[Tensor, ...]:
            return self._gradient(at[row], x, y, row, rule_loss, [extra[row] for extra in extras], rng, scale)

        if isinstance(self.recorded, SideBySide) and self.compiled is None and not own_loss:
            ordinary = [lambda row=row: eager(row, *batch.client_samples(row)) for row in rows]
            found = self.recorded.together(self._inputs(at, batch, rows), ordinary, batch.counts is None)
        else:
            made = []
            for row in rows:
                inputs = self.inputs_of(at, batch, row)
                run = partial(eager, row, *inputs[-2:])
                made.append(run() if own_loss else self._task_gradient(len(inputs[-1]), inputs, run))
            found = tuple(in_rows(each) for each in zip(*made, strict=True))
        for row, buffers in zip(rows, found[2], strict=True) if at.has_buffers else ():
            at[row].buffers.copy_(buffers)
        if len(rows) < len(at.row):
            # the gradient of a client that rests is 0
            places = sent(torch.tensor(rows), self.device)
            found = tuple(each.new_zeros(len(at.row), *each.shape[1:]).index_copy(0, places, each) for each in found)
        values, losses, _, *sums = found
        return Gradient(values, losses, followed_of(sums))

    def _inputs(self, at: Model, batch: Batch, rows: Sequence[int]) -> list[tuple[Any, ...]]:
        """Returns the inputs of :meth:`pure_gradient` for some clients, as a list with a tuple for each of them.
        ``rows`` are the numbers of their rows in the stack."""
        if batch.counts is not None:
            return [self.inputs_of(at, batch, row) for row in rows]
        # selecting them row by row would take as long as the launch of all their gradients
        xs = [map_leaves(lambda x, row=row: x[row], batch.x) for row in rows]
        return list(zip(at.parameters.unbind(), at.buffers.unbind(), xs, batch.y.unbind(), strict=True))

    def _gradient(
        self,
        at: Model,
        x: Any,
        y: Tensor,
        row: int,
        rule_loss: RuleLoss | None,
        extras: Sequence[Tensor],
        rng: Draws,
        scale: LossScale | None,
    ) -> tuple[Tensor, ...]:
        """Computes the gradient of one client, the one in ``row`` of its stack, by running the module itself, with the
        algorithm's loss ``rule_loss`` if there is one. Returns the gradient ``[width]``, the task loss, the buffers,
        and the sums of the training metric, if any. The buffers of ``at`` are updated in place."""
        value = self._empty_gradient()
        self.training_mode(x, len(y))
        self.load(at, owned=True)
        has_rule = rule_loss is not None
        with self._drawing(rng, row):
            with self._direct or contextlib.nullcontext():
                outputs = self.outputs(x, features=has_rule, predict=has_rule)
            losses = losses_of(self.task, outputs, y, row)
            objective = task_loss = losses.mean()
            if rule_loss is not None:
                objective = losses.mean(rule_loss(outputs, losses.each, *extras))
            write_gradient(objective, self._trainable, self.layout, value, scale, row, self._direct)
        self._store(at)
        return value, task_loss.detach(), at.buffers, *losses.sums

    def inputs_of(self, at: Model, batch: Batch, row: int) -> tuple[Any, ...]:
        return at[row].parameters, at[row].buffers, *self._begin(batch, row)

    def pure_gradient(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Computes the gradient of one client's mini-batch without changing anything, so that it can be compiled.
        Returns a tuple: the gradient ``[width]``, the mean task loss, the new buffers ``[buffer_width]``, and the
        numerator and, if it has one, the denominator of the training metric, such as the accuracy.

        The ``inputs`` are the parameters ``[width]``, the buffers ``[buffer_width]``, and x and y of the mini-batch.
        """
        w, buffers, x, y = inputs
        copies = self._copies(buffers)
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            held = self.layout.unflatten(w) | copies
            losses = losses_of(self.task, self.outputs(x, held, features=False), y, 0)
            objective = losses.mean()
            (value,) = torch.autograd.grad(objective, w)
        return value, objective.detach(), self._joined(held, copies, buffers), *losses.sums

    def recordable_gradient(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Computes the same as :meth:`pure_gradient`, from the same ``inputs``, by operations that are faster when they
        are recorded and replayed: large linear layers write their weights' gradients directly into the result. Returns
        the same tuple as :meth:`pure_gradient`."""
        w, buffers, x, y = inputs
        self.training_mode(x, len(y))
        copies = self._copies(buffers)
        tensors = {name: part.detach().requires_grad_() for name, part in self.layout.unflatten(w).items()}
        held, trained = tensors | copies, list(tensors.values())
        direct, value = self._direct_of(trained), self._empty_gradient()
        with torch.enable_grad():
            with direct or contextlib.nullcontext():
                outputs = self.outputs(x, held, features=False)
            losses = losses_of(self.task, outputs, y, 0)
            objective = losses.mean()
        write_gradient(objective, trained, self.layout, value, None, 0, direct)
        return value, objective.detach(), self._joined(held, copies, buffers), *losses.sums

    def _joined(self, held: dict[str, Tensor], names: Iterable[str], buffers: Tensor) -> Tensor:
        """Returns the buffers ``names`` among ``held``, the tensors of a module by name after its forward pass, as a
        vector ``[buffer_width]`` with the padding of ``buffers``."""
        return self.layout.join_buffers({name: held[name].detach() for name in names}, buffers)

    def _empty_gradient(self) -> Tensor:
        """Returns a vector ``[width]`` to write a gradient into. Its padding is 0."""
        value = torch.empty(self.layout.width, device=self.device, dtype=self.dtype)
        value[self.layout.parameters :] = 0
        return value
