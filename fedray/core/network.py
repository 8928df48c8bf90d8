"""A network is the user's module, run at models that lie in flat rows: forward passes and gradients of a stack.

A *stack* is C clients that are trained together: their models are the rows of ``[C, row_width]``. The two kinds of
networks, :class:`LoopNetwork` and :class:`StackNetwork`, give the same numbers to float tolerance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedray.core.batches import Batch
from fedray.core.clock import Clock
from fedray.core.vectors import Layout, Model


class Outputs(NamedTuple):
    """What a forward pass gives: ``logits [b, classes]``, ``features [b, d]``, the input of the last Linear called, and
    ``prediction [b, d]``, what the head's predictor makes of them where a loss may ask for it. An algorithm that needs
    the latter two says so by ``needs_head``; of a model that hasn't got them they are None."""

    logits: Tensor
    features: Tensor = None  # type: ignore[assignment]
    prediction: Tensor = None  # type: ignore[assignment]


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


class Predicting(nn.Module):
    """A head with a ``predictor``, which takes what enters its ``classifier``, and is run only where a loss may ask."""

    predictor: nn.Module
    classifier: nn.Linear


def predicting_head(module: nn.Module) -> Predicting | None:
    """The head with a predictor that a module has inside, if any."""
    return next((m for m in module.modules() if isinstance(m, Predicting)), None)


Draws = Callable[[int], contextlib.AbstractContextManager[None]]
"""``draws(row)``: within it, torch's generators draw what belongs to the client of that row of the stack."""


def undrawn(row: int) -> contextlib.AbstractContextManager[None]:
    """The :data:`Draws` of a module that draws nothing."""
    return contextlib.nullcontext()


class TrainingPass:
    """A training-mode forward pass of a stack whose gradient is taken later, once its loss is known.

    ``features [C, b, d]`` are detached; ``task_loss`` and ``correct`` as in :class:`Gradient`.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: list[dict[str, Tensor]],
        outputs: list[Outputs],
        losses: list[Tensor],
        targets: list[Tensor],
    ) -> None:
        self._layout, self._parameters, self._outputs, self._losses = layout, parameters, outputs, losses
        self.clock = Clock()
        self.task_loss = torch.stack([loss.detach().mean() for loss in losses])
        right = [(o.logits.detach().argmax(1) == y).sum() for o, y in zip(outputs, targets, strict=True)]
        self.correct = torch.stack(right)

    @property
    def features(self) -> Tensor:
        return torch.stack([o.features.detach() for o in self._outputs])

    def gradient(self, loss: RuleLoss, extras: Sequence[Tensor] = ()) -> Tensor:
        """Gradient ``[C, width]`` of the mean over the batch of ``loss``. It can be taken once."""
        value = self.task_loss.new_zeros(len(self._outputs), self._layout.width)
        with self.clock.on("gradient"):
            for row, (tensors, outputs, losses) in enumerate(
                zip(self._parameters, self._outputs, self._losses, strict=True)
            ):
                each = loss(outputs, losses, *(extra[row] for extra in extras))
                pieces = torch.autograd.grad(each.mean(), list(tensors.values()), allow_unused=True)
                self._layout.gather(pieces, value[row])
        return value


COPIED = 200_000
"""Models of up to as many parameters are copied into the module. It refers to larger ones where they lie, which costs
microseconds for each of its tensors."""


class Network:
    """A module whose parameters are views into one flat row, so that loading a model is one copy, or none.

    ``initial`` is the model that the module came with.
    """

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
        self.initial = self.layout.model(self.layout.pack(self.module).row.to(self.device))
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self._trainable = [tensors[slot.name] for slot in self.layout.slots]
        # whole-number buffers can't be views into a float vector: they are copied in and out
        self._others = [(slot, tensors[slot.name]) for slot in self.layout.buffer_slots]
        self._bind(self.initial.parameters.clone())
        self._predicting = False
        self._mode: tuple[bool, bool] | None = None
        self._features: Any = None
        self._prediction: Any = None
        self._norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        self._frozen_norms = [m for m in self.module.modules() if isinstance(m, _NormBase) and _is_frozen(m)]
        self._head = predicting_head(self.module)
        self._watched = False

    def _bind(self, parameters: Tensor) -> None:
        """Make the module's parameters views into ``parameters [width]``."""
        self._bound = parameters
        for slot, tensor in zip(self.layout.slots, self._trainable, strict=True):
            tensor.data = slot.view(parameters)

    def _watch(self) -> None:
        """Have the layers say what enters them, from now on: it costs a small model some hundredths of its step."""
        self._watched = True
        beside = set(self._head.predictor.modules()) if self._head else set()
        for layer in self.module.modules():
            if isinstance(layer, nn.Linear) and layer not in beside:
                layer.register_forward_pre_hook(self._remember_features, with_kwargs=True)

    def _remember_features(self, layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        # the last to be called overwrites what others left
        self._features = inputs[0] if inputs else named["input"]
        if self._predicting and self._head is not None and layer is self._head.classifier:
            self._prediction = self._head.predictor(self._features)

    def outputs(
        self, x: Tensor, tensors: dict[str, Tensor] | None = None, features: bool = True, predict: bool = False
    ) -> Outputs:
        """Forward of ``x [b, ...]`` with the loaded model, or with the tensors given; ``features``, ``predict``: with
        these outputs beside the logits."""
        if features and not self._watched:
            self._watch()
        self._predicting = predict
        with self._autocast():
            logits = self.module(x) if tensors is None else torch.func.functional_call(self.module, tensors, (x,))
        z, prediction = (None if found is None else found.float() for found in (self._features, self._prediction))
        self._features = self._prediction = None
        return Outputs(logits.float(), z, prediction)  # type: ignore[arg-type]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def mode(self, training: bool, normalise: bool = True) -> None:
        """Put the module into training or evaluation mode; ``normalise``: by the batch's own statistics. Normalisation
        layers that are frozen stay in evaluation mode, so that their running statistics stay too."""
        # walking through a module takes as long as a small layer
        if self._mode != (training, normalise):
            self._mode = training, normalise
            self.module.train(training)
            resting = self._frozen_norms if normalise else [*self._norms, *self._frozen_norms]
            for norm in resting if training else ():
                norm.eval()

    def load(self, model: Model) -> None:
        """Make the parameters and buffers of a single model the module's."""
        if self.layout.width > COPIED:
            self._bind(model.parameters.contiguous())
        else:
            self._bound.copy_(model.parameters)
        for slot, tensor in self._others:
            value = slot.view(model.buffers)
            tensor.copy_(value if slot.dtype.is_floating_point else value.round())

    def _store_buffers(self, model: Model) -> None:
        """Copy the module's buffers into ``model``."""
        for slot, tensor in self._others:
            slot.view(model.buffers).copy_(tensor)

    @torch.no_grad()
    def forward(self, at: Model, x: Tensor, rng: Draws = undrawn) -> Outputs:
        """Evaluation-mode forward of ``x [C, b, ...]`` at the C models ``at``: logits ``[C, b, classes]``."""
        self.mode(training=False)
        results = []
        for row in range(len(at.row)):
            self.load(at[row])
            with self._drawing(rng, row):
                results.append(self.outputs(x[row]))
        features = None if results[0].features is None else torch.stack([r.features for r in results])  # type: ignore[misc]
        return Outputs(torch.stack([r.logits for r in results]), features)

    def _drawing(self, rng: Draws, row: int) -> contextlib.AbstractContextManager[None]:
        return rng(row) if self.draws else contextlib.nullcontext()

    def _begin(self, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        """The real samples of one client's batch, with the module in training mode."""
        x, y = batch.x[row], batch.y[row]
        if batch.counts is not None:
            x, y = x[: batch.counts[row]], y[: batch.counts[row]]
        # a single sample has no variance to normalise by: running statistics are used
        self.mode(training=True, normalise=len(x) > 1)
        return x, y

    def training_pass(self, at: Model, batch: Batch, rng: Draws = undrawn) -> TrainingPass:
        """The forward pass at the C models ``at``, with all outputs; buffers are updated as in :meth:`gradients`."""
        parameters, outputs, losses, targets = [], [], [], []
        for row in range(len(at.row)):
            x, y = self._begin(batch, row)
            # .data has a version count of its own: updating the buffers in the same row must not spoil the gradient
            own = at.row[row].data
            tensors = {slot.name: slot.view(own).detach().requires_grad_() for slot in self.layout.slots}
            # copies, as what autograd has seen must not change under it
            buffers = {name: value.clone() for name, value in self.layout.named_buffers(at[row]).items()}
            with self._drawing(rng, row):
                outputs.append(self.outputs(x, tensors | buffers, predict=True))
            for slot in self.layout.buffer_slots:
                slot.view(at[row].buffers).copy_(buffers[slot.name])
            parameters.append(tensors)
            losses.append(self.loss(outputs[-1].logits, y))
            targets.append(y)
        return TrainingPass(self.layout, parameters, outputs, losses, targets)

    def gradients(
        self,
        at: Model,
        batch: Batch,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
    ) -> Gradient:
        """Gradient of the mean loss over each client's batch at the C models ``at``, in training mode.

        The buffers of ``at`` are updated in place, as the module's forward does it. ``rule_loss`` replaces the task
        loss, and gets one row of each of ``extras [C, ...]``. ``rng`` is entered around forwards of modules that draw
        (dropout).
        """
        raise NotImplementedError


def _is_frozen(layer: nn.Module) -> bool:
    """Whether a layer has parameters of its own, none of which is trained."""
    own = list(layer.parameters(recurse=False))
    return bool(own) and not any(parameter.requires_grad for parameter in own)


class LoopNetwork(Network):
    """One client after another, through the module itself."""

    def gradients(
        self,
        at: Model,
        batch: Batch,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
    ) -> Gradient:
        value = torch.empty_like(at.parameters, memory_format=torch.contiguous_format)
        value[:, self.layout.parameters :] = 0
        own_loss = rule_loss is not None
        losses, correct = [], []
        for row in range(len(value)):
            self.load(at[row])
            x, y = self._begin(batch, row)
            with self._drawing(rng, row):
                outputs = self.outputs(x, features=own_loss, predict=own_loss)
            each = task = self.loss(outputs.logits, y)
            if rule_loss is not None:
                each = rule_loss(outputs, task, *(extra[row] for extra in extras))
            objective = each.mean()
            pieces = torch.autograd.grad(objective, self._trainable, allow_unused=True)
            self.layout.gather(pieces, value[row])
            self._store_buffers(at[row])
            losses.append(objective.detach() if rule_loss is None else task.detach().mean())
            correct.append((outputs.logits.detach().argmax(1) == y).sum())
        return Gradient(value, torch.stack(losses), torch.stack(correct))


class StackNetwork(Network):
    """All clients of a stack in one batched stream of kernels (torch.func). Not for modules with buffers or draws."""

    @torch.no_grad()
    def forward(self, at: Model, x: Tensor, rng: Draws = undrawn) -> Outputs:
        self.mode(training=False)

        def forward(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            # a model without a Linear has no features, and vmap gives tensors only
            return tuple(z for z in self.outputs(x, self.layout.unflatten(w)) if z is not None)

        return Outputs(*torch.func.vmap(forward)(at.parameters, x))

    def gradients(
        self,
        at: Model,
        batch: Batch,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
    ) -> Gradient:
        self.mode(training=True)
        own_loss, size = rule_loss is not None, batch.y.shape[1]
        clients, device = len(at.row), at.row.device
        if batch.counts is None:
            weights = torch.full((1, 1), 1 / size, device=device).expand(clients, size)
        else:
            counts = torch.tensor(batch.counts, device=device)[:, None]
            weights = (torch.arange(size, device=device) < counts) / counts

        def objective(w: Tensor, x: Tensor, y: Tensor, weight: Tensor, *extra: Tensor) -> tuple[Tensor, Any]:
            outputs = self.outputs(x, self.layout.unflatten(w), features=own_loss, predict=own_loss)
            each = task = self.loss(outputs.logits, y)
            if rule_loss is not None:
                each = rule_loss(outputs, task, *extra)
            right = (outputs.logits.argmax(1) == y) & (weight > 0)
            return (each * weight).sum(), ((task * weight).sum(), right.sum())

        gradient = torch.func.vmap(torch.func.grad(objective, has_aux=True), randomness="error")
        value, (losses, correct) = gradient(at.parameters, batch.x, batch.y, weights, *extras)
        return Gradient(value, losses.detach(), correct)
