"""Runs the user's module at models that are flat rows: forward passes and gradients for a stack of clients.

A stack is C clients that are trained together. Their models are the rows of a tensor ``[C, row_width]``. There are two
kinds of networks, :class:`~fedray.core.loop_network.LoopNetwork` and
:class:`~fedray.core.stack_network.StackNetwork`. They give the same numbers up to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedray.core.batches import Batch
from fedray.core.compiled import Compiled
from fedray.core.loss_scale import LossScale
from fedray.core.passes import Gradient, Losses, Outputs, RuleLoss, TrainingPass, UnfitTarget
from fedray.core.recording import Recorded
from fedray.core.structure import arguments, map_leaves
from fedray.core.task import Task
from fedray.core.vectors import Layout, Model
from fedray.errors import first_line


class Predicting(nn.Module):
    """A head with a ``predictor`` of what enters its ``classifier``. The predictor is run only if a loss may ask for
    it."""

    predictor: nn.Module
    classifier: nn.Linear


def predicting_head(module: nn.Module) -> Predicting | None:
    """Returns the head with a predictor within ``module``, or None."""
    return next((m for m in module.modules() if isinstance(m, Predicting)), None)


Draws = Callable[[int], contextlib.AbstractContextManager[None]]
"""``draws(row)`` is a context in which torch's random numbers are those of the client in that row of the stack."""


def undrawn(row: int) -> contextlib.AbstractContextManager[None]:
    """Returns the :data:`Draws` of a module that draws no random numbers."""
    return contextlib.nullcontext()


COPIED = 200_000
"""The most parameters of a model that is copied into the module. The module refers to a larger one where it lies, which
costs microseconds for each tensor."""


CLASSIFICATION = Task()


class Network:
    """A module whose parameters are views into one flat row, so that a model is loaded by one copy, or by none."""

    def __init__(
        self,
        module: nn.Module,
        task: Task = CLASSIFICATION,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        draws: bool = False,
    ) -> None:
        self.module = module.to(device=device, dtype=torch.float32)
        self.layout = Layout(self.module)
        self.task = task
        self.device = torch.device(device)
        self.precision = precision
        self.draws = draws
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self._trainable = [tensors[slot.name] for slot in self.layout.slots]
        # whole-number buffers can't be views into a float vector: they are copied in and out
        self._others = [(slot, tensors[slot.name]) for slot in self.layout.buffer_slots]
        self._bind(self.loaded().parameters)
        self._predicting = False
        self._mode: tuple[bool, bool] | None = None
        self._features: Any = None
        self._prediction: Any = None
        self._norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        self._frozen_norms = [m for m in self.module.modules() if isinstance(m, _NormBase) and _is_frozen(m)]
        self._head = predicting_head(self.module)
        self._watched = False
        self.compiled: Compiled | None = None
        self.recorded: Recorded | None = None

    def replay(self) -> None:
        """Has gradients replayed from now on."""
        changing = [*self._trainable, *(tensor for _, tensor in self._others)]
        self.recorded = Recorded(self.recordable_gradient, changing)

    @cached_property
    def decayed(self) -> Tensor:
        """1 for each parameter that is neither a bias nor of a normalisation layer, 0 for the others, ``[width]``."""
        norms = {
            f"{place}.{name}".lstrip(".")
            for place, layer in self.module.named_modules()
            if isinstance(layer, (_NormBase, nn.GroupNorm, nn.LayerNorm)) or type(layer).__name__.endswith("Norm")
            for name, _ in layer.named_parameters(recurse=False)
        }
        found = torch.zeros(self.layout.width, device=self.device)
        for slot in self.layout.slots:
            if slot.name not in norms and "bias" not in slot.name.rpartition(".")[2]:
                found[slot.start : slot.start + slot.size] = 1
        return found

    def _bind(self, parameters: Tensor) -> None:
        """Makes the module's parameters views into ``parameters [width]``."""
        self._bound = parameters
        for slot, tensor in zip(self.layout.slots, self._trainable, strict=True):
            tensor.data = slot.view(parameters)

    def unload(self) -> None:
        """Lets go of the memory of the model that is loaded, if the module only refers to it."""
        if self.layout.width > COPIED:
            self._bind(torch.zeros(1, device=self.device).expand(self.layout.width))

    def loaded(self) -> Model:
        """Returns a copy of the model that is loaded. As long as none was loaded, it is the module's own."""
        return self.layout.model(self.layout.pack(self.module).row.to(self.device))

    def _watch(self) -> None:
        """Has the layers record their inputs from now on. This costs a few percent of a small model's step."""
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
        self, x: Any, tensors: dict[str, Tensor] | None = None, features: bool = True, predict: bool = False
    ) -> Outputs:
        """Runs the forward pass of the inputs ``x [b, ...]`` with the loaded model, or with ``tensors``. ``features``
        and ``predict`` ask for these outputs beside the logits."""
        if features and not self._watched:
            self._watch()
        self._predicting = predict
        with self._autocast():
            args, named = arguments(x)
            if tensors is None:
                logits = self.module(*args, **named)
            else:
                logits = torch.func.functional_call(self.module, tensors, args, named)
        z, prediction = (None if found is None else found.float() for found in (self._features, self._prediction))
        self._features = self._prediction = None
        return Outputs(map_leaves(_in_single_precision, logits), z, prediction)  # type: ignore[arg-type]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float16)

    def mode(self, training: bool, normalise: bool = True) -> None:
        """Puts the module into training or evaluation mode. ``normalise`` says whether normalisation layers use the
        batch's own statistics. Normalisation layers that are frozen stay in evaluation mode, so that their running
        statistics do not change."""
        # walking through a module takes as long as a small layer
        if self._mode != (training, normalise):
            self._mode = training, normalise
            self.module.train(training)
            resting = self._frozen_norms if normalise else [*self._norms, *self._frozen_norms]
            for norm in resting if training else ():
                norm.eval()

    def load(self, model: Model) -> None:
        """Loads the parameters and buffers of a single model into the module."""
        if self.layout.width > COPIED:
            self._bind(model.parameters.contiguous())
        else:
            self._bound.copy_(model.parameters)
        for slot, tensor in self._others:
            value = slot.view(model.buffers)
            tensor.copy_(value if slot.dtype.is_floating_point else value.round())

    def _store_buffers(self, model: Model) -> None:
        """Copies the module's buffers into ``model``."""
        for slot, tensor in self._others:
            slot.view(model.buffers).copy_(tensor)

    @torch.no_grad()
    def forward(self, at: Model, x: Any, rng: Draws = undrawn) -> Outputs:
        """Runs the forward pass of the inputs ``x [C, b, ...]`` at the C models ``at``, in evaluation mode. The logits
        are ``[C, b, ...]``."""
        self.mode(training=False)
        results = []
        for row in range(len(at.row)):
            self.load(at[row])
            with self._drawing(rng, row):
                results.append(self.outputs(map_leaves(lambda whole, row=row: whole[row], x)))
        features = None if results[0].features is None else torch.stack([r.features for r in results])  # type: ignore[misc]
        logits = map_leaves(lambda *rows: torch.stack(rows), *(result.logits for result in results))
        return Outputs(logits, features)

    def _drawing(self, rng: Draws, row: int) -> contextlib.AbstractContextManager[None]:
        return rng(row) if self.draws else contextlib.nullcontext()

    def _begin(self, batch: Batch, row: int) -> tuple[Any, Tensor]:
        """Returns the real samples of one client's batch, with the module in training mode."""
        x, y = batch.of(row)
        # a single sample has no variance to normalise by: running statistics are used
        self.mode(training=True, normalise=len(y) > 1)
        return x, y

    def _losses(self, outputs: Outputs, y: Tensor, row: int) -> Losses:
        """Returns the losses of the batch of the client in ``row``, from the outputs of its forward pass."""
        followed = None
        if self.task.followed is not None:
            detached = map_leaves(lambda tensor: tensor.detach(), outputs.logits)
            total, count = self.task.sums(self.task.followed, detached, y)
            followed = total.sum(), None if count is None else count.sum()
        try:
            losses = self.task.training_losses(outputs.logits, y)
        except Exception:
            self._find_unfit(outputs.logits, y, row)
            raise
        return Losses(losses, self.task.weights(y), followed)

    def _find_unfit(self, logits: Any, y: Tensor, row: int) -> None:
        """Raises :class:`UnfitTarget` if the loss of some samples can't be computed, but that of others can.

        If it can't for any, the mistake is in the loss.
        """
        failed: dict[int, Exception] = {}
        for place in range(len(y)):
            try:
                self.task.losses(map_leaves(lambda whole, i=place: whole[i : i + 1], logits), y[place : place + 1])
            except Exception as error:
                failed[place] = error
        if failed and len(failed) < len(y):
            place, found = min(failed.items())
            reason = f"{type(found).__name__}: {first_line(found)}"
            target = y[place].tolist() if y[place].numel() == 1 else f"of shape {list(y[place].shape)}"
            raise UnfitTarget(row, place, f"the loss does not take its target {target} ({reason})") from found

    def training_pass(
        self, at: Model, batch: Batch, rng: Draws = undrawn, scale: LossScale | None = None
    ) -> TrainingPass:
        """Runs the forward pass at the C models ``at`` with all outputs. Buffers are updated as in
        :meth:`gradients`."""
        found = TrainingPass(self.layout, scale)
        for row in range(len(at.row)):
            x, y = self._begin(batch, row)
            # .data has a version count of its own: updating the buffers in the same row must not spoil the gradient
            own = at.row[row].data
            tensors = {slot.name: slot.view(own).detach().requires_grad_() for slot in self.layout.slots}
            # copies, as what autograd has seen must not change under it
            buffers = {name: value.clone() for name, value in self.layout.named_buffers(at[row]).items()}
            with self._drawing(rng, row):
                outputs = self.outputs(x, tensors | buffers, predict=True)
            for slot in self.layout.buffer_slots:
                slot.view(at[row].buffers).copy_(buffers[slot.name])
            found.add(tensors, outputs, self._losses(outputs, y, row))
        return found

    def gradients(
        self,
        at: Model,
        batch: Batch,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
        scale: LossScale | None = None,
    ) -> Gradient:
        """Returns the gradient of the mean loss over each client's batch at the C models ``at``, in training mode.

        The buffers of ``at`` are updated in place, as the module's forward pass does it. ``rule_loss`` replaces the
        task loss; it gets one row of each of ``extras [C, ...]``. The forward pass of a module that draws random
        numbers (dropout) runs within ``rng``. Losses are multiplied by ``scale`` before the backward pass.
        """
        raise NotImplementedError

    def _task_gradient(
        self, shape: Any, inputs: tuple[Any, ...], eager: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Returns ``pure_gradient(*inputs)`` for a mini-batch of ``shape``: compiled, replayed or as ``eager()``
        computes it."""
        if self.compiled is not None and shape in self.compiled:
            return self.compiled(shape, *inputs)
        return eager() if self.recorded is None else self.recorded(inputs, eager)

    def pure_gradient(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns what :meth:`gradients` finds with the task loss alone, as a pure function, which can be compiled."""
        raise NotImplementedError

    def recordable_gradient(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns what :meth:`pure_gradient` returns, by the operations that are to be recorded."""
        return self.pure_gradient(*inputs)

    def inputs_of(self, at: Model, batch: Batch, row: int) -> tuple[Any, ...]:
        """Returns the inputs of :meth:`pure_gradient` for the mini-batch ``batch``, with the module in training mode.
        In loop mode they are those of the client in ``row``."""
        raise NotImplementedError


def _is_frozen(layer: nn.Module) -> bool:
    """Returns whether ``layer`` has parameters of its own, and none of them is trained."""
    own = list(layer.parameters(recurse=False))
    return bool(own) and not any(parameter.requires_grad for parameter in own)


def _in_single_precision(output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) and output.is_floating_point() else output
