"""What a model is trained for: how its outputs are compared with targets, by a loss and by metrics.

Four kinds of tasks have a loss and metrics; the loss of the kind ``other`` is defined by the user:

* ``classification``: targets ``[b]`` are class numbers, outputs are logits ``[b, classes]``.
* ``multilabel``: targets ``[b, ...]`` are 0 or 1, outputs are logits of the same shape.
* ``regression``: targets ``[b, ...]`` are numbers, outputs have the same shape.
* ``tokens``: targets ``[b, ...]`` are class numbers of tokens, outputs are logits ``[b, ..., classes]`` or ``[b,
  classes, ...]``. A token whose target is the ignored number does not count.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[..., Any]
"""``loss(outputs, targets)``: one value for each sample, ``[b]``, or for each entry of the targets, ``[b, ...]``."""


Counting = Callable[[Tensor], Tensor]
"""``counting(targets)`` returns the weight of each target in the mean of a loss, in the shape of ``targets``."""

LEAST_WEIGHT = 1e-30
"""Replaces a sum of weights that is 0, so that the mean is 0 and not NaN."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy ``[b]`` of each sample, for logits ``[b, classes]``."""
    return F.cross_entropy(logits, targets, reduction="none")


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns which samples are classified correctly, bool ``[b]``, for logits ``[b, classes]``."""
    return logits.argmax(1) == targets


def token_cross_entropy(logits: Tensor, targets: Tensor, axis: int, ignored: int) -> Tensor:
    """Returns the cross-entropy of each token, in the shape of ``targets``. ``axis`` is the axis of the classes in
    ``logits``."""
    return F.cross_entropy(logits.movedim(axis, 1), targets, reduction="none", ignore_index=ignored)


def token_accuracy(logits: Tensor, targets: Tensor, axis: int) -> Tensor:
    """Returns which tokens are classified correctly, bool in the shape of ``targets``. ``axis`` is the axis of the
    classes in ``logits``."""
    return logits.argmax(axis) == targets


def label_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the binary cross-entropy of each label, in the shape of ``targets``."""
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")


def label_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns which labels are predicted correctly, bool in the shape of ``targets``."""
    return (logits > 0) == (targets > 0.5)


def f1(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the numerator and denominator of the micro-averaged F1 of labels for each sample, both ``[b]``: 2 TP, and
    2 TP + FP + FN. The metric is the sum of the first over the sum of the second."""
    found, real = (logits > 0).flatten(1), (targets > 0.5).flatten(1)
    return 2 * (found & real).sum(1), found.sum(1) + real.sum(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the squared error of each entry of ``targets``. Outputs ``[b, 1]`` fit targets ``[b]``."""
    return (outputs.view(targets.shape) - targets).square()


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the absolute error of each entry of ``targets``. Outputs ``[b, 1]`` fit targets ``[b]``."""
    return (outputs.view(targets.shape) - targets).abs()


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "label_cross_entropy": label_cross_entropy,
    "squared_error": squared_error,
    "absolute_error": absolute_error,
}
"""The functions that ``task.loss`` and ``task.metrics`` can name without a file."""


@dataclass(frozen=True)
class Metric:
    """A number that says how good a model's outputs are, such as the accuracy: a mean over samples or tokens.

    Args:
        values: ``values(outputs, targets)`` returns the numbers of which the mean is taken: one for each sample
            ``[b]``, or one for each entry of the targets ``[b, ...]``. If it returns two tensors ``[b]``, the metric is
            the sum of the first divided by the sum of the second.
        mode: ``max`` if larger values are better, or ``min``.
        finish: a function that is applied to the mean, such as the exponential for perplexity.
    """

    values: Loss
    mode: str
    finish: Callable[[float], float] = float


@dataclass(frozen=True)
class Task:
    """The loss with which a model is trained, and the metrics with which it is evaluated.

    Args:
        kind: one of the kinds in this module's docstring.
        loss: the loss of each sample or entry.
        metrics: the metrics by name, which are evaluated on the test set.
        main: the metric by which models are compared, a name in ``metrics`` or ``loss``.
        mode: ``max`` if larger values of the main metric are better, or ``min``.
        followed: the metric that is also recorded for each client's mini-batches, or None.
        ignored: the target of tokens that do not count, or None if all count.
        loss_per_entry: whether the loss returns a value for each token, not for each sample.
        class_axis: the axis of the logits ``[b, ...]`` that has the classes.
        smoothing: the label smoothing in training. Each target has the weight 1 - smoothing, and all classes share the
            rest (C. Szegedy et al.: Rethinking the Inception Architecture for Computer Vision. CVPR 2016, section 7).
        counting: the weight of each target in the mean of the loss, for losses whose values already contain this
            factor, such as torch's with class weights. None if all targets count the same.
    """

    kind: str = "classification"
    loss: Loss = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": Metric(accuracy, "max")})
    main: str = "accuracy"
    mode: str = "max"
    followed: str | None = "accuracy"
    ignored: int | None = None
    loss_per_entry: bool = False
    class_axis: int = -1
    smoothing: float = 0.0
    counting: Counting | None = None

    @property
    def functions(self) -> list[Loss]:
        """The loss and the functions of the metrics, which may be user-defined."""
        return [self.loss, *(metric.values for metric in self.metrics.values())]

    def on(self, device: torch.device) -> Task:
        """Returns the task with a loss whose tensors, such as class weights, are on ``device``."""
        if device.type == "cpu" or not isinstance(self.loss, nn.Module):
            return self
        return replace(self, loss=copy.deepcopy(self.loss).to(device))

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Returns the loss of each sample, ``[b]``. If there is a loss for each token, it is the mean over the sample's
        tokens."""
        found = self.loss(outputs, targets)
        if self.counting is not None:
            weights = sums_of_samples(self.counting(targets))
            return sums_of_samples(found) / torch.where(weights > 0, weights, 1)
        return self._means(found, targets)

    def training_losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Returns the loss of each sample in training, ``[b]``: :meth:`losses`, with label smoothing if it is set."""
        if not self.smoothing:
            return self.losses(outputs, targets)
        ignored = -100 if self.ignored is None else self.ignored
        each = F.cross_entropy(
            outputs.movedim(self.class_axis, 1), targets, reduction="none", ignore_index=ignored,
            label_smoothing=self.smoothing,
        )  # fmt: skip
        return self._means(each, targets)

    def weights(self, targets: Tensor) -> Tensor | None:
        """Returns the weight of each sample in a mean of losses, float32 ``[b]``: the number of tokens that count, or
        the weight of the sample's class. None if all samples have the same weight."""
        if self.counting is not None:
            return sums_of_samples(self.counting(targets))
        if not self.loss_per_entry or self.ignored is None:
            return None
        return (targets != self.ignored).flatten(1).sum(1).float()

    def sums(self, name: str, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the numerator and denominator of a metric for each sample, both ``[b]``, to be summed over samples. A
        denominator of None means 1 for every sample.

        Args:
            name: a name in ``metrics``, or ``loss``.
            outputs: what the model returned for the samples.
            targets: the samples' targets ``[b, ...]``.
        """
        if name == "loss":
            each, weights = self.losses(outputs, targets), self.weights(targets)
            return (each, None) if weights is None else (each * weights, weights)
        found = self.metrics[name].values(outputs, targets)
        return found if isinstance(found, tuple) else self._totals(found, targets)

    def _means(self, found: Tensor, targets: Tensor) -> Tensor:
        total, count = self._totals(found, targets)
        return total if count is None else total / count.clamp(min=1)

    def _totals(self, found: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the sums of ``found [b, ...]`` over each sample's tokens that count, and the numbers of these tokens,
        both ``[b]``. If all entries count, it returns each sample's mean, and None."""
        if found.dim() == 1:
            return found, None
        if self.ignored is None or found.shape != targets.shape:
            return found.flatten(1).to(torch.float32).mean(1), None
        real = targets != self.ignored
        return torch.where(real, found, 0).flatten(1).sum(1, dtype=torch.float32), real.flatten(1).sum(1).float()

    def value(self, name: str, total: float, count: float) -> float:
        """Returns the metric ``name``, given the sums of what :meth:`sums` returned; NaN if ``count`` is 0."""
        mean = total / count if count else math.nan
        return mean if name == "loss" else self.metrics[name].finish(mean)


def mean_loss(each: Tensor, weights: Tensor | None) -> Tensor:
    """Returns the mean of the losses ``each [b]`` of a batch, weighted by ``weights [b]`` if they are not None."""
    return each.mean() if weights is None else (each * weights).sum() / weights.sum().clamp(min=LEAST_WEIGHT)


def sums_of_samples(values: Tensor) -> Tensor:
    """Returns the sums ``[b]`` over each sample's entries of ``values [b, ...]``."""
    return values if values.dim() == 1 else values.flatten(1).sum(1, dtype=torch.float32)


def exponential(mean: float) -> float:
    """Returns e to the power of ``mean``; infinity where that is too large for a float."""
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


def task_of(kind: str, axis: int, ignored: int) -> Task:
    """Returns a task of the given kind with its default loss and metrics.

    Args:
        kind: ``classification``, ``multilabel``, ``regression``, ``tokens`` or ``other``.
        axis: for ``tokens``, the axis of the logits that has the classes.
        ignored: for ``tokens``, the target of tokens that do not count.
    """
    if kind == "multilabel":
        metrics = {"f1": Metric(f1, "max"), "accuracy": Metric(label_accuracy, "max")}
        return Task(kind, label_cross_entropy, metrics, "f1", "max", "accuracy")
    if kind == "regression":
        metrics = {
            "mean_squared_error": Metric(squared_error, "min"),
            "mean_absolute_error": Metric(absolute_error, "min"),
        }
        return Task(kind, squared_error, metrics, "mean_squared_error", "min", "mean_squared_error")
    if kind == "tokens":
        loss = partial(token_cross_entropy, axis=axis, ignored=ignored)
        metrics = {
            "perplexity": Metric(loss, "min", exponential),
            "accuracy": Metric(partial(token_accuracy, axis=axis), "max"),
        }
        return Task(kind, loss, metrics, "perplexity", "min", "accuracy", ignored, True, axis)
    return Task() if kind == "classification" else Task(kind, cross_entropy, {}, "loss", "min", None)
