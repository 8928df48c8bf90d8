"""A user's module on flat vectors: forward passes and gradients of a stack of clients.

A *stack* is C clients that are trained together: their parameters are the rows of ``[C, width]``. The two gradient back
ends, :class:`LoopModel` and :class:`VmapModel`, give the same numbers to float tolerance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedray.core.batches import Batch
from fedray.core.vectors import Layout


class Outputs(NamedTuple):
    """What a forward pass gives: ``logits [b, classes]`` and ``features [b, d]``, the input of the last Linear."""

    logits: Tensor
    features: Tensor | None


Loss = Callable[..., Tensor]
"""``loss(logits [b, classes], targets [b]) -> [b]``: the loss of each sample."""

RuleLoss = Callable[..., Tensor]
"""``loss(outputs, task_losses [b], *extras) -> [b]``: an algorithm's own loss of each sample of one client."""


class Gradient(NamedTuple):
    """``value [C, width]``, and the task loss and the number of right answers of each client's batch, ``[C]``."""

    value: Tensor
    task_loss: Tensor
    correct: Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each sample, from logits."""
    return F.cross_entropy(logits, targets, reduction="none")


Draws = Callable[[int], contextlib.AbstractContextManager[None]]
"""``draws(row)``: within it, torch's generators draw what belongs to the client of that row of the stack."""


def undrawn(row: int) -> contextlib.AbstractContextManager[None]:
    """The :data:`Draws` of a module that draws nothing."""
    return contextlib.nullcontext()


class FlatModel:
    """A module whose parameters are views into one flat vector, so that loading a model is one copy."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss = cross_entropy,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        draws: bool = False,
    ) -> None:
        self.module = module.to(device=device, dtype=torch.float32)
        self.layout = Layout(self.module)
        self.loss = loss
        self.device = torch.device(device)
        self.precision = precision
        self.draws = draws
        parameters, buffers = self.layout.pack(self.module)
        self.parameters, self.buffers = parameters.to(self.device), buffers.to(self.device)
        self._bind()
        self._features: Tensor | None = None
        self._norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        linears = [m for m in self.module.modules() if isinstance(m, nn.Linear)]
        if linears:
            linears[-1].register_forward_pre_hook(self._remember_features)

    def _bind(self) -> None:
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        for slot in self.layout.slots:
            tensors[slot.name].data = slot.view(self.parameters)
        self._trainable = [tensors[slot.name] for slot in self.layout.slots]
        # whole-number buffers can't be views into a float vector: they are copied in and out
        self._others = [(slot, tensors[slot.name]) for slot in self.layout.buffer_slots]

    def _remember_features(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._features = inputs[0]

    def outputs(self, x: Tensor, parameters: dict[str, Tensor] | None = None) -> Outputs:
        """Forward of ``x [b, ...]`` with the loaded parameters, or with those given."""
        with self._autocast():
            logits = self.module(x) if parameters is None else torch.func.functional_call(self.module, parameters, (x,))
        features, self._features = self._features, None
        return Outputs(logits.float(), features)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def load(self, parameters: Tensor, buffers: Tensor | None = None) -> None:
        """Copy one client's ``parameters [width]`` (and buffers) into the module."""
        self.parameters.copy_(parameters)
        if buffers is not None:
            for slot, tensor in self._others:
                value = slot.view(buffers)
                tensor.copy_(value if slot.dtype.is_floating_point else value.round())

    def store_buffers(self, buffers: Tensor) -> None:
        """Copy the module's buffers into ``buffers [buffer_width]``."""
        for slot, tensor in self._others:
            slot.view(buffers).copy_(tensor)

    @torch.no_grad()
    def forward(self, at: Tensor, x: Tensor, buffers: Tensor | None = None, rng: Draws = undrawn) -> Outputs:
        """Evaluation-mode forward of ``x [C, b, ...]`` at the models ``at [C, width]``: logits ``[C, b, classes]``."""
        self.module.eval()
        results = []
        for row in range(len(at)):
            self.load(at[row], None if buffers is None else buffers[row])
            with self._drawing(rng, row):
                results.append(self.outputs(x[row]))
        features = None if results[0].features is None else torch.stack([r.features for r in results])  # type: ignore[misc]
        return Outputs(torch.stack([r.logits for r in results]), features)

    def _drawing(self, rng: Draws, row: int) -> contextlib.AbstractContextManager[None]:
        return rng(row) if self.draws else contextlib.nullcontext()

    def gradients(
        self,
        at: Tensor,
        batch: Batch,
        buffers: Tensor | None,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
    ) -> Gradient:
        """Gradient of the mean loss over each client's batch at ``at [C, width]``, in training mode.

        ``rule_loss`` replaces the task loss, and gets one row of each of ``extras [C, ...]``. ``buffers`` are updated
        in place as the module's forward does it. ``rng`` is entered around forwards of modules that draw (dropout).
        """
        raise NotImplementedError


class LoopModel(FlatModel):
    """One client after another, through the module itself."""

    def gradients(
        self,
        at: Tensor,
        batch: Batch,
        buffers: Tensor | None,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
    ) -> Gradient:
        value = torch.empty_like(at, memory_format=torch.contiguous_format)
        value[:, self.layout.parameters :] = 0
        losses, correct = [], []
        for row in range(len(at)):
            self.load(at[row], None if buffers is None else buffers[row])
            x, y = batch.x[row], batch.y[row]
            if batch.counts is not None:
                x, y = x[: batch.counts[row]], y[: batch.counts[row]]
            self.module.train()
            if len(x) == 1:
                # it has no variance to normalise by: running statistics are used
                for norm in self._norms:
                    norm.eval()
            with self._drawing(rng, row):
                outputs = self.outputs(x)
            each = task = self.loss(outputs.logits, y)
            if rule_loss is not None:
                each = rule_loss(outputs, task, *(extra[row] for extra in extras))
            objective = each.mean()
            pieces = torch.autograd.grad(objective, self._trainable, allow_unused=True)
            torch.cat(
                [
                    at.new_zeros(slot.size) if piece is None else slot.flat(piece)
                    for slot, piece in zip(self.layout.slots, pieces, strict=True)
                ],
                out=value[row, : self.layout.parameters],
            )
            if buffers is not None:
                self.store_buffers(buffers[row])
            losses.append(objective.detach() if rule_loss is None else task.detach().mean())
            correct.append((outputs.logits.detach().argmax(1) == y).sum())
        return Gradient(value, torch.stack(losses), torch.stack(correct))


class VmapModel(FlatModel):
    """All clients of a stack in one batched stream of kernels (torch.func). Not for modules with buffers or draws."""

    def gradients(
        self,
        at: Tensor,
        batch: Batch,
        buffers: Tensor | None,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
    ) -> Gradient:
        self.module.train()
        size = batch.y.shape[1]
        if batch.counts is None:
            weights = torch.full((1, 1), 1 / size, device=at.device).expand(len(at), size)
        else:
            counts = torch.tensor(batch.counts, device=at.device)[:, None]
            weights = (torch.arange(size, device=at.device) < counts) / counts

        def objective(w: Tensor, x: Tensor, y: Tensor, weight: Tensor, *extra: Tensor) -> tuple[Tensor, Any]:
            outputs = self.outputs(x, self.layout.unflatten(w))
            each = task = self.loss(outputs.logits, y)
            if rule_loss is not None:
                each = rule_loss(outputs, task, *extra)
            right = (outputs.logits.argmax(1) == y) & (weight > 0)
            return (each * weight).sum(), ((task * weight).sum(), right.sum())

        gradient = torch.func.vmap(torch.func.grad(objective, has_aux=True), randomness="error")
        value, (losses, correct) = gradient(at, batch.x, batch.y, weights, *extras)
        return Gradient(value, losses.detach(), correct)
