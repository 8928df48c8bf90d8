"""What a forward pass of a stack returns: outputs, losses, and later the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedray.core.clock import Clock
from fedray.core.task import mean_loss
from fedray.core.vectors import Layout
from fedray.gradients.loss_scale import LossScale, write_gradient


class Outputs(NamedTuple):
    """What a forward pass returns.

    ``logits`` are what the module returned, ``[b, classes]`` for a classification. ``features [b, d]`` are the inputs
    of the Linear layer that was called last. ``prediction [b, d]`` is what the head's predictor makes of the features.
    An algorithm that needs the latter two declares it by ``needs_head``. They are None for a model that does not have
    them.
    """

    logits: Any
    features: Tensor = None  # type: ignore[assignment]
    prediction: Tensor = None  # type: ignore[assignment]


class UnfitTarget(ValueError):
    """The loss can't be computed for the sample at ``place`` of the mini-batch of the client in ``row`` of a stack."""

    def __init__(self, row: int, place: int, reason: str) -> None:
        super().__init__(reason)
        self.row, self.place = row, place


RuleLoss = Callable[..., Tensor]
"""``loss(outputs, task_losses [b], *extras) -> [b]``: an algorithm's own loss of each sample of one client."""

Followed = tuple[Tensor, Tensor | None]
"""The two sums ``[C]`` over each client's batch of the metric that the task follows. None stands for the number of
samples."""


class Gradient(NamedTuple):
    """The gradient ``value [C, width]``, and for each client's batch the task loss ``[C]`` and the metric that the task
    follows, None if there is none."""

    value: Tensor
    task_loss: Tensor
    followed: Followed | None


class TrainingPass:
    """A forward pass of a stack in training mode. Its gradient is taken later, when its loss is known.

    ``features [C, b, d]`` are detached. ``task_loss`` and ``followed`` are those of :class:`Gradient`.
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
        return stacked([each.losses.followed for each in self._passes])

    @property
    def features(self) -> Tensor:
        return torch.stack([each.outputs.features.detach() for each in self._passes])

    def gradient(self, loss: RuleLoss, extras: Sequence[Tensor] = ()) -> Tensor:
        """Returns the gradient ``[C, width]`` of the mean of ``loss`` over the batch. It can be called once."""
        value = self._passes[0].losses.each.new_zeros(len(self._passes), self._layout.width)
        with self.clock.on("gradient"):
            for row, (tensors, outputs, losses) in enumerate(self._passes):
                each = loss(outputs, losses.each, *(extra[row] for extra in extras))
                tensor_list = list(tensors.values())
                write_gradient(losses.mean(each), tensor_list, self._layout, value[row], self._scale, row)
        return value


class Losses(NamedTuple):
    """The task losses ``each [b]`` of one client's batch, what each counts in the mean, and the followed metric."""

    each: Tensor
    weights: Tensor | None
    followed: Followed | None

    def mean(self, each: Tensor | None = None) -> Tensor:
        return mean_loss(self.each if each is None else each, self.weights)


class _Pass(NamedTuple):
    tensors: dict[str, Tensor]
    outputs: Outputs
    losses: Losses


def stacked(followed: Sequence[Followed | None]) -> Followed | None:
    """Returns the sums of the clients of a stack as ``[C]``."""
    found = [each for each in followed if each is not None]
    if not found:
        return None
    counts = [count for _, count in found if count is not None]
    return in_rows([total for total, _ in found]), in_rows(counts) if counts else None


def in_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Returns ``tensors`` of one shape as the rows of a tensor. It is a view if there is one of them alone."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))
