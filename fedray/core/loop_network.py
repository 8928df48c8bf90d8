"""Trains one client after another."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedray.core.batches import Batch
from fedray.core.direct_linear import DirectLinear
from fedray.core.loss_scale import LossScale, write_gradient
from fedray.core.network import Draws, Network, undrawn
from fedray.core.passes import Followed, Gradient, RuleLoss, stacked
from fedray.core.vectors import Model


class LoopNetwork(Network):
    """Runs one client after another through the module itself."""

    @cached_property
    def _direct(self) -> DirectLinear | None:
        found = DirectLinear(self.layout, self._trainable)
        return found if found.pays and self.precision == "fp32" else None

    def gradients(
        self,
        at: Model,
        batch: Batch,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
        scale: LossScale | None = None,
    ) -> Gradient:
        found = []
        for row in range(len(at.row)):
            inputs = self.inputs_of(at, batch, row)
            *_, x, y = inputs
            if rule_loss is None and self.compiled is not None and len(y) in self.compiled:
                found.append(self._compiled_gradient(at[row], inputs))
            else:
                own = [extra[row] for extra in extras]
                with self._drawing(rng, row):
                    found.append(self._gradient(at[row], x, y, row, rule_loss, own, scale))
        values, losses, followed = zip(*found, strict=True)
        value = values[0][None] if len(values) == 1 else torch.stack(values)
        return Gradient(value, torch.stack(losses), stacked(followed))

    def _gradient(
        self,
        at: Model,
        x: Any,
        y: Tensor,
        row: int,
        rule_loss: RuleLoss | None,
        extras: Sequence[Tensor],
        scale: LossScale | None,
    ) -> tuple[Tensor, Tensor, Followed | None]:
        """Returns the gradient ``[width]`` of the client in ``row``, its task loss and the sums of the followed
        metric."""
        value = torch.empty(at.width, device=self.device)
        value[self.layout.parameters :] = 0
        self.load(at)
        own_loss = rule_loss is not None
        with self._direct or contextlib.nullcontext():
            outputs = self.outputs(x, features=own_loss, predict=own_loss)
        losses = self._losses(outputs, y, row)
        objective = task_loss = losses.mean()
        if rule_loss is not None:
            objective = losses.mean(rule_loss(outputs, losses.each, *extras))
        write_gradient(objective, self._trainable, self.layout, value, scale, row, self._direct)
        self._store_buffers(at)
        return value, task_loss.detach(), losses.followed

    def _compiled_gradient(self, at: Model, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor, Followed | None]:
        assert self.compiled is not None
        value, loss, buffers, *sums = self.compiled(len(inputs[-1]), *inputs)
        at.buffers.copy_(buffers)
        return value, loss, (*sums, None)[:2] if sums else None  # type: ignore[return-value]

    def inputs_of(self, at: Model, batch: Batch, row: int) -> tuple[Any, ...]:
        return at[row].parameters, at[row].buffers, *self._begin(batch, row)

    def pure_gradient(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns the gradient ``[width]`` of one client's mini-batch, the task loss, the new buffers
        ``[buffer_width]``, and the one or two sums of the followed metric, if there is one.

        The ``inputs`` are the parameters ``[width]``, the buffers ``[buffer_width]``, and x and y of the mini-batch.
        """
        w, buffers, x, y = inputs
        buffers_by_name = {name: value.clone() for name, value in self.layout.split_buffers(buffers).items()}
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            tensors = self.layout.unflatten(w) | buffers_by_name
            losses = self._losses(self.outputs(x, tensors, features=False), y, 0)
            objective = losses.mean()
            (value,) = torch.autograd.grad(objective, w)
        sums = [each for each in losses.followed or () if each is not None]
        return value, objective.detach(), self.layout.join_buffers(buffers_by_name, buffers), *sums
