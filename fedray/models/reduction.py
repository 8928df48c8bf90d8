"""Turns torch's loss modules, which return a mean, into losses of each sample.

``reduction="mean"`` is not always the mean over samples: with class weights, or a class that is ignored, the samples
count as much as their class does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedray.core.task import Counting, Loss, mean_loss
from fedray.errors import UserError
from fedray.models.soundness import require_made

WEIGHED = (nn.CrossEntropyLoss, nn.NLLLoss)
"""The losses in whose mean a sample counts as much as its class."""

NOTHING_IGNORED = -100
"""torch's default for the class that is ignored, and that of ``task.ignore_index``."""

INSTEAD = {
    "sum": "use reduction='mean', and a train.lr that is as many times larger as a mini-batch has samples",
    "batchmean": (
        "hand over a function that returns the sum of each sample, such as lambda outputs, targets: "
        "nn.functional.kl_div(outputs, targets, reduction='none').sum(1)"
    ),
}
"""What is to be done about a loss with another reduction."""

CLOSE = 1e-4
"""The largest difference of two means, relative to their size, that counts as rounding."""


@dataclass(frozen=True)
class ClassWeights:
    """The function that returns how much each target counts in a mean: the ``weights [classes]`` of its class, or 1 if
    there are none, and 0 if it is ``ignored``."""

    weights: Tensor | None
    ignored: int

    def __call__(self, targets: Tensor) -> Tensor:
        real = targets != self.ignored
        if self.weights is None:
            return real.float()
        return torch.where(real, self.weights.to(targets.device)[torch.where(real, targets, 0)], 0)


def without_reduction(loss: Any, what: str, targets: Tensor) -> tuple[Loss, Counting | None]:
    """Returns ``loss`` as a function that returns each sample's loss, and how much targets count in the mean of it;
    None if all count the same.

    ``what`` names the loss in messages, and ``targets`` are some of those that it gets. Raises :class:`UserError` for a
    loss that adds up samples, or that was not made in full.
    """
    if isinstance(loss, nn.Module):
        require_made(loss, what)
    if not isinstance(loss, nn.Module) or getattr(loss, "reduction", "none") == "none":
        return loss, None
    if loss.reduction not in ("mean", "elementwise_mean"):
        raise UserError(
            f"{what} has reduction={loss.reduction!r}; fedray takes the mean over the samples of a mini-batch: "
            + INSTEAD.get(str(loss.reduction), "use reduction='mean'")
        )
    # with the same tensors, so that it shows if they are the model's
    each = copy.copy(loss)
    each.reduction = "none"  # type: ignore[assignment]
    # probabilities of classes as targets are not weighed
    if not isinstance(loss, WEIGHED) or targets.is_floating_point():
        return each, None
    if loss.weight is None and loss.ignore_index == NOTHING_IGNORED:
        return each, None
    return each, ClassWeights(loss.weight, loss.ignore_index)


def require_same_mean(
    what: str, loss: Any, outputs: Any, targets: Tensor, each: Tensor, weights: Tensor | None
) -> None:
    """Raises :class:`UserError` if ``loss(outputs, targets)``, as the user handed it over, is not the mean of the
    losses ``each [b]`` with these ``weights [b]``."""
    if not isinstance(loss, nn.Module) or getattr(loss, "reduction", "none") == "none":
        return
    original, found = float(loss(outputs, targets)), float(mean_loss(each, weights))
    if abs(original - found) > CLOSE * max(abs(original), abs(found), 1e-6):
        raise UserError(
            f"{what}, {type(loss).__name__}, takes another mean than that of its samples' losses ({original:.6g} and "
            f"{found:.6g} for the same mini-batch): hand over a function that returns the loss of each sample, [b]"
        )


def notes_on_parameters(loss: Any, found: bool) -> list[str]:
    """Returns a line for the user about the parameters of a loss, if it is a module that has any, or if a trial
    ``found`` that it uses some."""
    trained = [name for name, p in loss.named_parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []
    if not trained and not found:
        return []
    named = f" ({', '.join(trained)})" if trained else ""
    return [f"warning: the loss has parameters{named}, which stay as they are: fedray trains those of the model alone"]
