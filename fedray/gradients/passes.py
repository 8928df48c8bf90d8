"""What the forward passes of clients return: outputs, losses, and later the gradient; and the heads that predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedray.core.stopwatch import Stopwatch
from fedray.core.structure import map_leaves
from fedray.core.task import Task, mean_loss
from fedray.core.vectors import Layout
from fedray.errors import first_line
from fedray.gradients.loss_scale import LossScale, write_gradient


class Outputs(NamedTuple):
    """What a forward pass returns, for the b samples of one client.

    ``features`` and ``prediction`` are None if the model has none. An algorithm that uses them declares ``needs_head``.

    Attributes:
        logits: What the module returned, ``[b, classes]`` for a classification.
        features: The inputs ``[b, d]`` of the Linear layer that was called last.
        prediction: The output ``[b, d]`` of the head's predictor for the features.

    Example:
        def loss(outputs, task_losses, z):
            return task_losses + (outputs.features - z).square().sum(1)
    """

    logits: Any
    features: Tensor = None  # type: ignore[assignment]
    prediction: Tensor = None  # type: ignore[assignment]


class Predicting(nn.Module):
    """The base class of heads (last layers of a model) with a ``predictor``, a second network that takes the same
    inputs as the head's ``classifier``. The predictor is run only if a loss may use its output."""

    predictor: nn.Module
    classifier: nn.Linear


def predicting_head(module: nn.Module) -> Predicting | None:
    """Returns the layer of ``module`` that is a head with a predictor (a network beside the classifier), or None if
    there is none."""
    return next((layer for layer in module.modules() if isinstance(layer, Predicting)), None)


class UnfitTarget(ValueError):
    """Raised if the loss can't be computed for the target of a sample. The sample is at ``place`` (from 0) in the
    mini-batch of the client in ``row`` of a stack. ``reason`` is the error message."""

    def __init__(self, row: int, place: int, reason: str) -> None:
        super().__init__(reason)
        self.row, self.place = row, place


Context = Callable[[], AbstractContextManager[None]]
"""The type of functions that make a context, in which random numbers are those of one client, for example."""

RuleLoss = Callable[..., Tensor]
"""The type of losses that an algorithm defines: ``loss(outputs, task_losses [b], *extras) -> [b]`` returns the loss of
each sample of one client."""

Followed = tuple[Tensor, Tensor | None]
"""The numerator and denominator ``[C]`` of the metric that the task follows, summed over each client's batch. A
denominator of None stands for the number of samples."""


def followed_of(sums: Sequence[Tensor]) -> Followed | None:
    """Returns the training metric (the one that is also computed on training mini-batches, such as the accuracy) as a
    pair of numerator and denominator.

    ``sums`` is a sequence of up to two tensors: first the numerator, then the denominator. Without a second tensor, the
    denominator in the pair is None, which stands for the number of samples. Returns None if ``sums`` is empty, because
    then there is no such metric.
    """
    return (sums[0], sums[1] if len(sums) > 1 else None) if sums else None


class Gradient(NamedTuple):
    """The gradients of C clients' mini-batches.

    ``value [C, width]`` has a row for each client, with the gradient for all its parameters. ``task_loss [C]`` is the
    mean loss of each mini-batch, without the terms that an algorithm adds to the loss. ``followed`` is the training
    metric, such as the accuracy, as a pair of numerator and denominator, each ``[C]`` (a denominator of None stands for
    the number of samples). It is None if there is no such metric.
    """

    value: Tensor
    task_loss: Tensor
    followed: Followed | None


class TrainingPass:
    """The forward passes of C clients in training mode, whose gradient is computed later, by :meth:`gradient`.
    Algorithms get it from ``client.objective.training_pass(...)``. It is for losses that also need outputs of other
    models, which are computed after these passes.

    ``features [C, b, d]`` are the inputs of the last Linear layer, detached from autograd's graph. ``task_loss [C]`` is
    the mean loss of each client's mini-batch, without the terms that the algorithm adds to the loss. ``followed`` is
    the training metric, such as the accuracy, as a pair of numerator and denominator, each ``[C]`` (a denominator of
    None stands for the number of samples). It is None if there is no such metric.
    """

    def __init__(self, layout: Layout, scale: LossScale | None = None) -> None:
        self._layout, self._scale = layout, scale
        self.stopwatch = Stopwatch()
        self._passes: list[_Pass] = []

    def add(
        self,
        tensors: dict[str, Tensor],
        outputs: Outputs,
        found: Losses,
        drawing: Context = nullcontext,
        then: Context = nullcontext,
    ) -> None:
        """Adds the forward pass of one more client to this object. Must be called once for each client, in the order of
        the rows of their stack.

        Args:
            tensors: The client's parameters by name, for which :meth:`gradient` later computes the gradient.
            outputs: What the client's forward pass returned.
            found: The losses of the client's mini-batch.
            drawing: Makes a context that fixes random numbers, such as those of hooks, for the client's gradient.
            then: Makes a context in which the module is as it was in the forward pass, for the backward pass.
        """
        self._passes.append(_Pass(tensors, outputs, found, drawing, then))

    @property
    def task_loss(self) -> Tensor:
        return torch.stack([each.losses.mean().detach() for each in self._passes])

    @property
    def followed(self) -> Followed | None:
        return followed_of([in_rows(each) for each in zip(*(p.losses.sums for p in self._passes), strict=True)])

    @property
    def features(self) -> Tensor:
        return torch.stack([each.outputs.features.detach() for each in self._passes])

    def gradient(self, loss: RuleLoss, extras: Sequence[Tensor] = ()) -> Tensor:
        """Returns the gradient ``[C, width]`` of the mean of ``loss`` over each client's mini-batch. This method can be
        called only once.

        Args:
            loss: ``loss(outputs, task_losses [b], *extras) -> [b]``, the loss of each sample of one client. ``outputs``
                are the :class:`Outputs` of the client's forward pass.
            extras: Tensors ``[C, ...]``. ``loss`` gets the client's row of each.
        """
        value = self._passes[0].losses.each.new_zeros(len(self._passes), self._layout.width)
        with self.stopwatch.on("gradient"):
            for row, (tensors, outputs, losses, drawing, then) in enumerate(self._passes):
                parameters = list(tensors.values())
                with drawing():
                    each = loss(outputs, losses.each, *(extra[row] for extra in extras))
                    # the loss may have run other models
                    with then():
                        write_gradient(losses.mean(each), parameters, self._layout, value[row], self._scale, row)
        return value


class Losses(NamedTuple):
    """The losses of one client's mini-batch.

    ``each [b]`` has the loss of each sample, without the terms that an algorithm adds to the loss. ``weights [b]`` says
    how much each sample counts in the mean; None means that all count the same. ``followed`` is the training metric,
    such as the accuracy, as a pair of numerator and denominator, each summed over the mini-batch (a denominator of None
    stands for the number of samples). It is None if there is no such metric.
    """

    each: Tensor
    weights: Tensor | None
    followed: Followed | None

    @property
    def sums(self) -> list[Tensor]:
        """The training metric, such as the accuracy, as a list of its numerator and denominator, summed over the
        mini-batch. The list has only the numerator if the denominator is the number of samples, and is empty if there
        is no such metric."""
        return [each for each in self.followed or () if each is not None]

    def mean(self, each: Tensor | None = None) -> Tensor:
        return mean_loss(self.each if each is None else each, self.weights)


def losses_of(task: Task, outputs: Outputs, y: Tensor, row: int) -> Losses:
    """Returns the :class:`Losses` of one client's mini-batch.

    Args:
        task: The task, which defines the loss.
        outputs: The outputs of the client's forward pass.
        y: The targets ``[b, ...]``.
        row: The client's row in its stack. It is only used to say in an :class:`UnfitTarget` which client it is.

    Raises:
        UnfitTarget: The loss fails for some of the samples. If it fails for all of them, the mistake is in the loss,
            and its own exception is raised instead.
    """
    followed = None
    if task.followed is not None:
        detached = map_leaves(lambda tensor: tensor.detach(), outputs.logits)
        total, count = task.sums(task.followed, detached, y)
        followed = total.sum(), None if count is None else count.sum()
    try:
        return Losses(task.training_losses(outputs.logits, y), task.weights(y), followed)
    except Exception:
        _require_fit(task, outputs.logits, y, row)
        raise


def _require_fit(task: Task, logits: Any, y: Tensor, row: int) -> None:
    failed: dict[int, Exception] = {}
    for place in range(len(y)):
        try:
            task.losses(map_leaves(lambda each, i=place: each[i : i + 1], logits), y[place : place + 1])
        except Exception as error:
            failed[place] = error
    if failed and len(failed) < len(y):
        place, found = min(failed.items())
        reason = f"{type(found).__name__}: {first_line(found)}"
        target = y[place].tolist() if y[place].numel() == 1 else f"of shape {list(y[place].shape)}"
        raise UnfitTarget(row, place, f"the loss does not take its target {target} ({reason})") from found


class _Pass(NamedTuple):
    tensors: dict[str, Tensor]
    outputs: Outputs
    losses: Losses
    drawing: Context
    then: Context


ELSEWHERE = "an attribute that holds it beside its layer's, such as a list"
"""Where a forward pass may take a parameter from, in messages."""


def taken_elsewhere(output: Tensor, parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Returns the name of one of a module's ``parameters`` with which ``output`` was computed, None if there is none.
    ``output`` is from a forward pass in which other tensors were in the places of the parameters, so that the module
    has taken the parameter from elsewhere."""
    own = {id(parameter): name for name, parameter in parameters.items()}
    left: list[Any] = [output.grad_fn] if output.grad_fn is not None else []
    seen = set(left)
    while left:
        node = left.pop()
        # the leaves of autograd's graph are the tensors for which gradients are computed
        if id(getattr(node, "variable", None)) in own:
            return own[id(node.variable)]
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        left += following
    return None


def hook(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Gives ``tensors`` (by name) the hooks of the module's ``parameters`` that they stand for."""
    for name, tensor in tensors.items():
        for each in (parameters[name]._backward_hooks or {}).values():
            tensor.register_hook(each)  # type: ignore[no-untyped-call]


def in_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Joins the tensors of C clients to one tensor ``[C, ...]`` with a row for each client. ``tensors`` has one tensor
    for each client, all of the same shape. If there is only one, it is not copied, but returned as a view ``[1, ...]``.
    """
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))
