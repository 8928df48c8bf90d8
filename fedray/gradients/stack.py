"""Trains all clients of a stack at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedray.core.batches import Batch
from fedray.core.task import LEAST_WEIGHT
from fedray.core.vectors import Model
from fedray.gradients.loss_scale import LossScale
from fedray.gradients.network import Draws, Network, undrawn
from fedray.gradients.passes import Gradient, Outputs, RuleLoss, followed_of
from fedray.gradients.stacked_layers import StackedLayers


class StackNetwork(Network):
    """Runs the user's module for a stack of C clients at once: the kind of :class:`Network` that computes their forward
    passes and gradients with ``torch.func.vmap``. It can't be used for modules that draw random numbers, or whose
    forward passes change buffers.

    With ``windows``, convolutions are computed as batched products of image windows, the parts of an image under the
    kernel (:mod:`fedray.gradients.stacked_layers`). That is the default on GPUs; on other devices it serves to try what
    a GPU does. The other arguments are those of :class:`Network`.
    """

    def __init__(self, *args: Any, windows: bool | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        self.windows = self.device.type == "cuda" if windows is None else windows

    def _layers(self, traced: bool = False) -> contextlib.AbstractContextManager[Any]:
        return StackedLayers(traced) if self.windows else contextlib.nullcontext()

    @torch.no_grad()
    def forward(self, at: Model, x: Any, rng: Draws = undrawn) -> Outputs:
        self.mode(training=False)

        def forward(w: Tensor, x: Any) -> tuple[Any, ...]:
            # a model without a Linear layer has no features, and vmap can return only tensors
            with self._layers():
                outputs = self.outputs(x, self.layout.unflatten(w))
            return tuple(z for z in outputs if z is not None)

        return Outputs(*torch.func.vmap(forward)(at.parameters, x))

    def gradients(
        self,
        at: Model,
        batch: Batch,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
        scale: LossScale | None = None,
    ) -> Gradient:
        inputs, shape = self.inputs_of(at, batch, 0), tuple(batch.y.shape[:2])
        eager = partial(self._together, False, rule_loss, scale, *inputs, *extras)
        is_eager = rule_loss is not None or scale is not None
        value, losses, *sums = eager() if is_eager else self._task_gradient(shape, inputs, eager)
        return Gradient(value, losses.detach(), followed_of(sums))

    def inputs_of(self, at: Model, batch: Batch, row: int) -> tuple[Any, ...]:
        self.mode(training=True)
        return at.parameters, batch.x, batch.y, _weights(batch, self.dtype)

    def pure_gradient(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Computes the gradients of C clients' mini-batches without changing anything, so that it can be compiled.

        The ``inputs`` are the parameters ``[C, width]``, x and y of the mini-batches ``[C, b, ...]``, and the weights
        ``[C, b]`` of their samples in the mean loss.

        Returns a tuple: the gradients ``[C, width]``, the mean task losses ``[C]`` of the mini-batches, and the
        numerators ``[C]`` and denominators ``[C]`` of the training metric, such as the accuracy. The denominators are
        left out if they are the numbers of samples, and both are left out if there is no such metric.
        """
        return self._together(True, None, None, *inputs)

    def recordable_gradient(self, *inputs: Any) -> tuple[Tensor, ...]:
        return self._together(False, None, None, *inputs)

    def _together(
        self, traced: bool, rule_loss: RuleLoss | None, scale: LossScale | None, *inputs: Any
    ) -> tuple[Tensor, ...]:
        """Computes the gradients of all clients at once, with the algorithm's loss ``rule_loss`` if there is one.
        Returns the gradients ``[C, width]``, the task losses ``[C]``, and the sums ``[C]`` of the training metric, if
        any. ``traced`` says that a compiler traces the operations. The ``inputs`` are those of :meth:`pure_gradient`,
        and then the algorithm's extra tensors."""
        has_rule = rule_loss is not None

        def objective(w: Tensor, x: Any, y: Tensor, weight: Tensor, *extra: Tensor) -> tuple[Tensor, Any]:
            with self._layers(traced):
                outputs = self.outputs(x, self.layout.unflatten(w), features=has_rule, predict=has_rule)
                each = task = self.task.training_losses(outputs.logits, y)
            of_targets = self.task.weights(y)
            if of_targets is not None:
                real = of_targets * (weight > 0)
                weight = real / real.sum().clamp(min=LEAST_WEIGHT)
            if rule_loss is not None:
                each = rule_loss(outputs, task, *extra)
            return (each * weight).sum(), ((task * weight).sum(), self._sums(outputs.logits, y, weight > 0))

        def scaled(factor: Tensor, *inputs: Any) -> tuple[Tensor, Any]:
            loss, found = objective(*inputs)
            return loss * factor, found

        def gradient(of: Callable[..., tuple[Tensor, Any]], place: int, *inputs: Any) -> Any:
            return torch.func.vmap(torch.func.grad(of, place, has_aux=True), randomness="error")(*inputs)

        if scale is None:
            value, (losses, sums) = gradient(objective, 0, *inputs)
            return value.detach(), losses, *sums
        again = True
        while again:
            value, (losses, sums) = gradient(scaled, 1, scale.factors, *inputs)
            value /= scale.factors[:, None]
            again = scale.lowered(value)
        # the parameters of a layer that is not registered in the module would keep a graph alive
        return value.detach(), losses, *sums

    def _sums(self, logits: Any, y: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        """Returns the numerator and denominator of the training metric, summed over the ``real`` samples (those that
        are not padding) of one client's mini-batch. A denominator of None is left out, because vmap can return only
        tensors."""
        if self.task.followed is None:
            return ()
        sums = self.task.sums(self.task.followed, logits, y)
        return tuple((each * real).sum() for each in sums if each is not None)


def _weights(batch: Batch, dtype: torch.dtype) -> Tensor:
    """Returns the weight of each sample in the mean loss of its client's mini-batch, ``[C, b]``: 1 / (number of real
    samples), and 0 for padding."""
    (clients, size), device = batch.y.shape[:2], batch.y.device
    if batch.counts is None:
        return torch.full((1, 1), 1 / size, device=device, dtype=dtype).expand(clients, size)
    # a client that has made all its steps has no samples, and its gradient is not used
    counts = torch.tensor([max(1, count) for count in batch.counts], device=device)[:, None]
    return (torch.arange(size, device=device) < counts).to(dtype) / counts
