"""Turns torch's loss modules, which return a mean, into losses of each sample.

``reduction="mean"`` is not always the mean over samples: with class weights or an ignored class, each sample has the
weight of its class.
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
"""The losses in whose mean each sample has the weight of its class."""

NOTHING_IGNORED = -100
"""torch's default for the ignored class, which is also the default of ``task.ignore_index``."""

INSTEAD = {
    "sum": "use reduction='mean', and a train.lr that is as many times larger as a mini-batch has samples",
    "batchmean": (
        "hand over a function that returns the sum of each sample, such as lambda outputs, targets: "
        "nn.functional.kl_div(outputs, targets, reduction='none').sum(1)"
    ),
}
"""The advice for a loss with another reduction."""

CLOSE = 1e-4
"""The largest difference between two means, relative to their size, that counts as rounding."""


@dataclass(frozen=True)
class ClassWeights:
    """A function that returns by how much each target counts in the mean of a loss with class weights. It takes
    targets, which are class numbers, and returns weights in the same shape: the entry of ``weights [classes]`` for the
    target's class (1 if ``weights`` is None), and 0 if the target is ``ignored``."""

    weights: Tensor | None
    ignored: int

    def __call__(self, targets: Tensor) -> Tensor:
        real = targets != self.ignored
        if self.weights is None:
            return real.float()
        return torch.where(real, self.weights.to(targets.device)[torch.where(real, targets, 0)], 0)


def without_reduction(loss: Any, what: str, targets: Tensor) -> tuple[Loss, Counting | None]:
    """Turns the user's ``loss``, which may be a loss module of torch that returns a mean, into a loss of each sample.

    Returns a pair. First comes the function that computes this loss. Second comes a function that takes targets and
    returns the weight of each target in the mean, or, in place of this function, None if all targets count the same.

    ``what`` names the loss in error messages, and ``targets`` are targets of some samples of the data. Raises
    :class:`UserError` for a loss that sums over samples, or whose ``__init__`` did not call that of nn.Module.
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
    # a shallow copy keeps the same tensors, so that tensors of the model are recognised
    each = copy.copy(loss)
    each.reduction = "none"  # type: ignore[assignment]
    # targets that are probabilities of classes have no weights
    if not isinstance(loss, WEIGHED) or targets.is_floating_point():
        return each, None
    if loss.weight is None and loss.ignore_index == NOTHING_IGNORED:
        return each, None
    return each, ClassWeights(loss.weight, loss.ignore_index)


def require_same_mean(
    what: str, loss: Any, outputs: Any, targets: Tensor, each: Tensor, weights: Tensor | None
) -> None:
    """Checks that fedray computes the same mean loss as the user's ``loss`` does, if this is a loss module of torch
    that returns a mean; any other loss is accepted unchecked.

    Raises :class:`UserError` if ``loss(outputs, targets)`` is not the mean of ``each [b]``, the samples' losses as
    fedray computes them, with the weights ``weights [b]`` (None for equal weights). ``what`` names the loss in the
    message.
    """
    if not isinstance(loss, nn.Module) or getattr(loss, "reduction", "none") == "none":
        return
    original, found = float(loss(outputs, targets)), float(mean_loss(each, weights))
    if abs(original - found) > CLOSE * max(abs(original), abs(found), 1e-6):
        raise UserError(
            f"{what}, {type(loss).__name__}, takes another mean than that of its samples' losses ({original:.6g} and "
            f"{found:.6g} for the same mini-batch): hand over a function that returns the loss of each sample, [b]"
        )


def notes_on_parameters(loss: Any, found: bool) -> list[str]:
    """Returns a list with a warning for the user if the user's ``loss`` has parameters, because fedray does not train
    them. Otherwise the list is empty. ``found`` says whether a trial call of the loss has shown that it uses parameters
    of its own; besides that, the loss has parameters if it is a module with trainable parameters."""
    trained = [name for name, p in loss.named_parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []
    if not trained and not found:
        return []
    named = f" ({', '.join(trained)})" if trained else ""
    return [f"warning: the loss has parameters{named}, which stay as they are: fedray trains those of the model alone"]
