"""Runs the user's module with models that are rows of numbers: forward passes and gradients for a stack of clients.

A stack is C clients that are trained together. Their models are the rows of a tensor ``[C, row_width]``. There are two
kinds of networks, :class:`~fedray.gradients.loop.LoopNetwork` and :class:`~fedray.gradients.stack.StackNetwork`. They
give the same numbers up to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedray.core.batches import Batch
from fedray.core.linear import linear_layers
from fedray.core.norms import BATCH_NORMS, TRACKING_NORMS, is_frozen, norm_layers, single_value_norms
from fedray.core.precision import autocast
from fedray.core.seeds import Purpose, every_rng, torch_rng
from fedray.core.structure import call, call_on_copies, map_leaves
from fedray.core.task import Task
from fedray.core.vectors import Model
from fedray.errors import UserError
from fedray.gradients.compiled import Compiled
from fedray.gradients.lanes import Lanes, SideBySide
from fedray.gradients.loading import Loading
from fedray.gradients.loss_scale import LossScale
from fedray.gradients.passes import (
    ELSEWHERE,
    Gradient,
    Outputs,
    RuleLoss,
    TrainingPass,
    hook,
    losses_of,
    predicting_head,
    taken_elsewhere,
)
from fedray.gradients.recording import Recorded

Draws = Callable[[int], contextlib.AbstractContextManager[None]]
"""The type of functions that fix the random numbers of dropout: ``draws(row)`` returns a context in which torch draws
the random numbers of the client in that row of the stack."""


def undrawn(row: int) -> contextlib.AbstractContextManager[None]:
    """Returns a context that does nothing, whatever the client's ``row`` is. This function is the default of arguments
    ``rng``, which fix the random numbers of dropout (:data:`Draws`): a module that draws none needs no more."""
    return contextlib.nullcontext()


CLASSIFICATION = Task()


class Network(Loading):
    """The user's module, prepared to compute forward passes and gradients with the models of many clients.

    ``changing``, ``writes`` and ``dtype`` are those of :class:`~fedray.gradients.loading.Loading`. ``draws`` says
    whether the module draws random numbers, as dropout does. The attribute ``rng`` is a function: within the context
    ``rng(seed, purpose, ...)`` torch draws numbers that depend only on these arguments. ``overwrites`` says whether a
    forward pass may write into its inputs, of which it gets copies then, because other passes need them. ``precision``
    is ``train.precision``.
    """

    def __init__(
        self,
        module: nn.Module,
        task: Task = CLASSIFICATION,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        draws: bool = False,
        changing: Collection[str] | None = None,
        writes: bool = False,
        overwrites: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(module, device, changing, writes, dtype)
        self.task = task.on(self.device)
        self.precision = precision
        self.draws = draws
        self.rng: Callable[..., contextlib.AbstractContextManager[None]] = torch_rng
        self._call = call_on_copies if overwrites else call
        self._predicting = False
        self._mode: tuple[bool, bool] | None = None
        self._features: Any = None
        self._prediction: Any = None
        self._norms = [m for m in self.module.modules() if isinstance(m, BATCH_NORMS)]
        self._frozen_norms = [m for m in self.module.modules() if isinstance(m, TRACKING_NORMS) and is_frozen(m)]
        self._single: list[nn.Module] | None = None
        self._head = predicting_head(self.module)
        self._watched = self._is_sound = False
        self.compiled: Compiled | None = None
        self.recorded: Recorded | None = None

    def replay(self, lanes: int = 1, say: Callable[[str], None] = lambda line: None) -> None:
        """Makes gradients faster from now on: their torch operations are recorded once for each shape of mini-batches,
        and then replayed. On a GPU, the gradients of up to ``lanes`` clients are computed side by side; ``say`` is
        called with a line for the user if that is impossible."""
        changing = [*self._trainable, *self._buffers.values()]
        if self.device.type == "cuda":
            self.recorded = SideBySide(self.recordable_gradient, changing, Lanes(self.device, lanes), say)
        else:
            self.recorded = Recorded(self.recordable_gradient, changing)

    @cached_property
    def decayed(self) -> Tensor:
        """A mask ``[width]`` for weight decay: 0 for biases and the parameters of normalisation layers, 1 for all other
        parameters."""
        norms = {
            f"{place}.{name}".lstrip(".")
            for place, layer in norm_layers(self.module)
            for name, _ in layer.named_parameters(recurse=False)
        }
        found = torch.zeros(self.layout.width, device=self.device)
        for slot in self.layout.slots:
            if slot.name not in norms and "bias" not in slot.name.rpartition(".")[2]:
                found[slot.start : slot.start + slot.size] = 1
        return found

    def _watch(self) -> None:
        """Makes all linear layers note their inputs in every forward pass from now on: the inputs of the layer that is
        called last are the model's features. This costs a few percent of a small model's step."""
        self._watched = True
        predictor = set(self._head.predictor.modules()) if self._head else set()
        for layer in linear_layers(self.module):
            if layer not in predictor:
                layer.register_forward_pre_hook(self._remember_features, with_kwargs=True)

    def _remember_features(self, layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        # the layer that is called last overwrites what the others recorded
        self._features = inputs[0] if inputs else named["input"]
        if self._predicting and self._head is not None and layer is self._head.classifier:
            self._prediction = self._head.predictor(self._features)

    def outputs(
        self, x: Any, tensors: dict[str, Tensor] | None = None, features: bool = True, predict: bool = False
    ) -> Outputs:
        """Runs the forward pass of one client's inputs ``x [b, ...]``, and returns its :class:`Outputs`. It uses the
        loaded model or, if ``tensors`` is not None, these parameters and buffers by name; the dict then holds the new
        buffers afterwards. ``features`` and ``predict`` say whether the features (inputs of the last linear layer) and
        the prediction of the model's head are needed besides the logits."""
        if features and not self._watched:
            self._watch()
        self._predicting = predict
        with autocast(self.device, self.precision):
            if tensors is None:
                logits = self._call(self.module, x)
            else:
                with self.places.holding(tensors):
                    logits = self._call(self.module, x)
        z, prediction = (
            None if found is None else found.to(self.dtype) for found in (self._features, self._prediction)
        )
        self._features = self._prediction = None
        return Outputs(map_leaves(self._in_dtype, logits), z, prediction)  # type: ignore[arg-type]

    def _in_dtype(self, output: Any) -> Any:
        return output.to(self.dtype) if isinstance(output, Tensor) and output.is_floating_point() else output

    def mode(self, training: bool, resting: Sequence[nn.Module] = ()) -> None:
        """Puts the module into training or evaluation mode. The layers ``resting``, and normalisation layers whose
        parameters are frozen, stay in evaluation mode in any case, so that they use their running statistics and do not
        change them."""
        # walking through a module takes as long as a small layer
        if self._mode != (training, bool(resting)):
            self._mode = training, bool(resting)
            self.module.train(training)
            for layer in [*resting, *self._frozen_norms] if training else ():
                layer.eval()

    @torch.no_grad()
    def forward(self, at: Model, x: Any, rng: Draws = undrawn) -> Outputs:
        """Runs the forward passes of the inputs ``x [C, b, ...]`` at the C models ``at``, in evaluation mode and
        without gradients. Returns :class:`Outputs` with logits ``[C, b, ...]`` and the inputs of the last linear layer,
        ``[C, b, d]``. ``rng(row)`` is a context that fixes the random numbers (dropout) of the client in ``row``."""
        self.mode(training=False)
        results = []
        for row in range(len(at.row)):
            self.load(at[row])
            with self._drawing(rng, row):
                results.append(self.outputs(map_leaves(lambda whole, row=row: whole[row], x)))
        logits = map_leaves(lambda *rows: torch.stack(rows), *(result.logits for result in results))
        if results[0].features is None:
            return Outputs(logits)
        return Outputs(logits, torch.stack([result.features for result in results]))

    def _copies(self, buffers: Tensor) -> dict[str, Tensor]:
        """Returns copies of the buffers in ``buffers [buffer_width]`` as a dict of tensors by name, which a forward
        pass may update."""
        return {name: value.clone() for name, value in self.layout.split_buffers(buffers).items()}

    def _drawing(self, rng: Draws, row: int) -> contextlib.AbstractContextManager[None]:
        return rng(row) if self.draws else contextlib.nullcontext()

    def _begin(self, batch: Batch, row: int) -> tuple[Any, Tensor]:
        """Returns the inputs and targets of the client in ``row``, without padding, and puts the module into training
        mode for them."""
        x, y = batch.client_samples(row)
        self.training_mode(x, len(y))
        return x, y

    def training_mode(self, x: Any, size: int) -> None:
        """Puts the module into training mode for a mini-batch ``x`` of ``size`` samples of one client. For a single
        sample, layers of batch normalisation that would have only one value per channel use their running statistics
        instead. BatchNorm2d mostly has many values per channel even for one sample."""
        if size > 1 or not self._norms:
            return self.mode(training=True)
        if self._single is None:
            self._mode = None
            with every_rng(0, Purpose.DROPOUT):
                predict = self._head is not None
                self._single = single_value_norms(self.module, lambda: self.outputs(x, None, predict, predict))
        return self.mode(training=True, resting=self._single)

    def training_pass(
        self, at: Model, batch: Batch, rng: Draws = undrawn, scale: LossScale | None = None
    ) -> TrainingPass:
        """Runs the forward passes of C clients' mini-batches ``batch`` at their models ``at``, in training mode.
        Returns a :class:`TrainingPass`, which has their outputs and later computes the gradient. The buffers of ``at``
        are updated in place, as the passes update them. ``rng(row)`` is a context that fixes the random numbers
        (dropout) of the client in ``row``. ``scale`` scales losses up in fp16; the gradient is not scaled."""
        found = TrainingPass(self.layout, scale)
        for row in range(len(at.row)):
            x, y = self._begin(batch, row)
            # .data has a version counter of its own: updating the buffers in the same row must not spoil the gradient
            model = self.layout.model(at.row[row].data)
            trained = {slot.name: slot.view(model.row).detach().requires_grad_() for slot in self.layout.slots}
            # copies, because tensors that autograd has saved must not change
            buffers = self._copies(model.buffers)
            held = trained | buffers
            hook(trained, self.places.parameters)
            with self._drawing(rng, row):
                outputs = self.outputs(x, held, predict=True)
                losses = losses_of(self.task, outputs, y, row)
            self._require_held(losses.each)
            # a client that has made all its steps keeps its buffers
            if not batch.rests(row):
                self.layout.write_buffers(at[row].buffers, {name: held[name].detach() for name in buffers})
                self._write_parameters(at.row[row], trained)
            then = partial(self._as_then, held, x, len(y))
            found.add(trained, outputs, losses, partial(self._drawing, rng, row), then)
        return found

    @contextlib.contextmanager
    def _as_then(self, held: dict[str, Tensor], x: Any, size: int) -> Iterator[None]:
        """A context for the gradient of an earlier forward pass with the tensors ``held`` (by name), in which the
        module is as it was then: parts of a pass with gradient checkpointing are run again."""
        self.training_mode(x, size)
        with self.places.holding(dict(held)):
            yield

    def _require_held(self, loss: Tensor) -> None:
        """Checks in the first pass with other tensors in the places of the module's parameters that its ``loss`` was
        computed with these tensors alone. Raises :class:`UserError` if the module has used a parameter itself."""
        if self._is_sound or loss.grad_fn is None:
            return
        self._is_sound = True
        if taken := taken_elsewhere(loss, self.places.parameters):
            raise UserError(
                f"the forward pass of the model takes its parameter {taken} from {ELSEWHERE}; with this algorithm it "
                "would not be trained there: take it from its layer (self.layer.weight)"
            )

    def _write_parameters(self, row: Tensor, trained: dict[str, Tensor]) -> None:
        """Copies the parameters ``trained`` (by name) into a client's ``row`` of parameters and buffers, if a forward
        pass may have changed them."""
        for slot in self.layout.slots if self.writes else ():
            place = slot.view(row)
            if trained[slot.name].data_ptr() != place.data_ptr():
                place.copy_(trained[slot.name].detach())

    def gradients(
        self,
        at: Model,
        batch: Batch,
        rule_loss: RuleLoss | None = None,
        extras: Sequence[Tensor] = (),
        rng: Draws = undrawn,
        scale: LossScale | None = None,
    ) -> Gradient:
        """Returns the gradient ``[C, width]`` of each client's mean loss over its mini-batch, at the C models ``at``,
        in training mode, with the clients' task losses and a training metric such as the accuracy (:class:`Gradient`).

        The buffers of ``at`` are updated in place, as the module's forward pass updates them. ``rule_loss`` is a loss
        of the algorithm that replaces the task loss (:data:`RuleLoss`). Its arguments are the outputs and task losses
        of one client, and the client's row of each of ``extras [C, ...]``. ``rng(row)`` is a context that fixes the
        random numbers (dropout) of the client in ``row``. ``scale`` scales losses up in fp16; the returned gradients
        are not scaled.
        """
        raise NotImplementedError

    def _task_gradient(
        self, shape: Any, inputs: tuple[Any, ...], eager: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Returns ``pure_gradient(*inputs)`` for a mini-batch of ``shape``, in the fastest way that is turned on: by
        compiled code, by replaying recorded operations, or else by calling ``eager()``, which runs the module."""
        if self.compiled is not None and shape in self.compiled:
            return self.compiled(shape, *inputs)
        return eager() if self.recorded is None else self.recorded(inputs, eager)

    def pure_gradient(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns a tuple with the gradient of the task loss, the task loss, and the sums from which the training
        metric is computed, such as the number of samples that are classified correctly. The subclasses document the
        whole tuple. The method changes nothing, so that it can be compiled. The ``inputs`` are those that
        :meth:`inputs_of` returns."""
        raise NotImplementedError

    def recordable_gradient(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns what :meth:`pure_gradient` returns for the same ``inputs``, computed by the torch operations that are
        to be recorded once and then replayed."""
        return self.pure_gradient(*inputs)

    def inputs_of(self, at: Model, batch: Batch, row: int) -> tuple[Any, ...]:
        """Returns the arguments of :meth:`pure_gradient` as a tuple, and puts the module into training mode. ``at`` has
        the clients' models, and ``batch`` their mini-batches. A subclass that computes one client after another returns
        the arguments for the client in ``row``; one that computes all at once does not use ``row``."""
        raise NotImplementedError
