"""What the forward passes of a stack return: outputs, losses, and later the gradient; and the heads that predict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedray.core.clock import Clock
from fedray.core.structure import map_leaves
from fedray.core.task import Task, mean_loss
from fedray.core.vectors import Layout
from fedray.errors import first_line
from fedray.gradients.loss_scale import LossScale, write_gradient


class Outputs(NamedTuple):
    """What a forward pass returns, for b samples.

    An algorithm that uses features or predictions declares ``needs_head``. They are None for a model that has none.

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
    """A head whose ``predictor`` takes what enters its ``classifier``. The predictor is run only if a loss may use its
    output."""

    predictor: nn.Module
    classifier: nn.Linear


def predicting_head(module: nn.Module) -> Predicting | None:
    """Returns the head with a predictor within ``module``, or None."""
    return next((layer for layer in module.modules() if isinstance(layer, Predicting)), None)


class UnfitTarget(ValueError):
    """The loss can't be computed for the target at ``place`` in the mini-batch of the client in ``row`` of a stack."""

    def __init__(self, row: int, place: int, reason: str) -> None:
        super().__init__(reason)
        self.row, self.place = row, place


RuleLoss = Callable[..., Tensor]
"""``loss(outputs, task_losses [b], *extras) -> [b]``: an algorithm's own loss of each sample of one client."""

Followed = tuple[Tensor, Tensor | None]
"""The numerator and denominator ``[C]`` of the metric that the task follows, summed over each client's batch. A
denominator of None stands for the number of samples."""


def followed_of(sums: Sequence[Tensor]) -> Followed | None:
    """Returns the one or two ``sums`` of the followed metric as a pair; None if there are none."""
    return (sums[0], sums[1] if len(sums) > 1 else None) if sums else None


class Gradient(NamedTuple):
    """The gradient ``value [C, width]``, the task loss ``[C]`` of each client's batch, and the metric that the task
    follows, or None."""

    value: Tensor
    task_loss: Tensor
    followed: Followed | None


class TrainingPass:
    """A forward pass of a stack in training mode, whose gradient is computed later, when its loss is known.

    ``features [C, b, d]`` are detached. ``task_loss [C]`` and ``followed`` are as in :class:`Gradient`.
    """

    def __init__(self, layout: Layout, scale: LossScale | None = None) -> None:
        self._layout, self._scale = layout, scale
        self.clock = Clock()
        self._passes: list[_Pass] = []

    def add(self, tensors: dict[str, Tensor], outputs: Outputs, found: Losses) -> None:
        """Adds the pass of the stack's next client, whose parameters are ``tensors``."""
        self._passes.append(_Pass(tensors, outputs, found))

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
        """Returns the gradient ``[C, width]`` of the mean of ``loss`` over each client's batch. It can be called only
        once.

        Args:
            loss: ``loss(outputs, task_losses [b], *extras) -> [b]``, the loss of each sample of one client.
            extras: Tensors ``[C, ...]``. ``loss`` gets the client's row of each.
        """
        value = self._passes[0].losses.each.new_zeros(len(self._passes), self._layout.width)
        with self.clock.on("gradient"):
            for row, (tensors, outputs, losses) in enumerate(self._passes):
                each = loss(outputs, losses.each, *(extra[row] for extra in extras))
                parameters = list(tensors.values())
                write_gradient(losses.mean(each), parameters, self._layout, value[row], self._scale, row)
        return value


class Losses(NamedTuple):
    """The task losses ``each [b]`` of one client's batch, their weights in the mean, and the followed metric."""

    each: Tensor
    weights: Tensor | None
    followed: Followed | None

    @property
    def sums(self) -> list[Tensor]:
        """The one or two sums of the followed metric; empty if no metric is followed."""
        return [each for each in self.followed or () if each is not None]

    def mean(self, each: Tensor | None = None) -> Tensor:
        return mean_loss(self.each if each is None else each, self.weights)


def losses_of(task: Task, outputs: Outputs, y: Tensor, row: int) -> Losses:
    """Returns the losses of the mini-batch of the client in ``row``, from the outputs of its forward pass.

    Raises :class:`UnfitTarget` if the loss fails for some samples only. If it fails for all of them, the mistake is in
    the loss, whose own exception is raised.
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


def in_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Returns ``tensors``, which have the same shape, as the rows of one tensor. A single tensor is returned as a
    view."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))
