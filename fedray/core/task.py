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
"""The type of losses: ``loss(outputs, targets)`` returns one value for each sample, ``[b]``, or for each entry of the
targets, ``[b, ...]``."""


Counting = Callable[[Tensor], Tensor]
"""The type of functions that weight targets: ``counting(targets)`` returns the weight of each target in the mean of a
loss, in the shape of ``targets``."""

LEAST_WEIGHT = 1e-30
"""Replaces a sum of weights that is 0 in the denominator of a mean, so that the mean is 0 and not NaN."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy ``[b]`` of each sample, the loss of a classification, for logits ``[b, classes]`` and
    targets ``[b]``, which are class numbers."""
    return F.cross_entropy(logits, targets, reduction="none")


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns which samples are classified correctly, bool ``[b]``, for logits ``[b, classes]`` and targets ``[b]``,
    which are class numbers. The accuracy is the mean of these values."""
    return logits.argmax(1) == targets


def token_cross_entropy(logits: Tensor, targets: Tensor, axis: int, ignored: int) -> Tensor:
    """Returns the cross-entropy of each token, in the shape of ``targets [b, ...]``, which are class numbers. ``axis``
    is the axis of ``logits`` that has the classes. Tokens whose target is ``ignored`` get 0."""
    return F.cross_entropy(logits.movedim(axis, 1), targets, reduction="none", ignore_index=ignored)


def token_accuracy(logits: Tensor, targets: Tensor, axis: int) -> Tensor:
    """Returns which tokens are classified correctly, bool in the shape of ``targets [b, ...]``, which are class
    numbers. ``axis`` is the axis of ``logits`` that has the classes."""
    return logits.argmax(axis) == targets


def label_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the binary cross-entropy of each label of samples with several labels, in the shape of ``targets [b,
    ...]``, which are 0 or 1. The logits have the same shape."""
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")


def label_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns which labels of samples with several labels are predicted correctly, bool in the shape of ``targets [b,
    ...]``, which are 0 or 1. The logits have the same shape; a logit above 0 predicts 1."""
    return (logits > 0) == (targets > 0.5)


def f1(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the numerator and denominator of the micro-averaged F1 for each sample, both ``[b]``: 2 TP, and 2 TP + FP
    + FN, counted over the sample's labels. The F1 of a data set is the sum of the numerators divided by the sum of the
    denominators. Targets ``[b, ...]`` are 0 or 1, and a logit above 0 predicts 1."""
    found, real = (logits > 0).flatten(1), (targets > 0.5).flatten(1)
    return 2 * (found & real).sum(1), found.sum(1) + real.sum(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the squared error of each entry of ``targets [b, ...]``, the loss of a regression. Outputs have the shape
    of the targets; for targets ``[b]`` they may also be ``[b, 1]``."""
    return (outputs.view(targets.shape) - targets).square()


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the absolute error of each entry of ``targets [b, ...]``. Outputs have the shape of the targets; for
    targets ``[b]`` they may also be ``[b, 1]``."""
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
        values: ``values(outputs, targets)`` returns the numbers whose mean is the metric: one for each sample ``[b]``,
            or one for each entry of the targets ``[b, ...]``. If it returns a tuple of two tensors ``[b]``, the metric
            is the sum of the first divided by the sum of the second.
        mode: ``max`` if larger values are better, or ``min``.
        finish: a function that turns the mean into the metric, such as the exponential for perplexity. By default the
            metric is the mean itself.
    """

    values: Loss
    mode: str
    finish: Callable[[float], float] = float


@dataclass(frozen=True)
class Task:
    """The loss with which a model is trained, and the metrics with which it is evaluated.

    Args:
        kind: ``classification``, ``multilabel``, ``regression``, ``tokens`` or ``other``.
        loss: ``loss(outputs, targets)`` returns the loss of each sample ``[b]``, or of each entry of the targets ``[b,
            ...]``.
        metrics: the metrics by name, which are evaluated on the test set.
        main: the metric by which models are compared: ``loss``, or a name in ``metrics``.
        mode: ``max`` if larger values of the main metric are better, or ``min``.
        followed: the name of the metric that is also recorded during training, on each client's mini-batches; None to
            record none.
        ignored: the target of tokens that do not count, or None if all tokens count.
        loss_per_entry: whether the loss returns a value for each token, not for each sample.
        class_axis: the axis of the logits ``[b, ...]`` that has the classes.
        smoothing: the label smoothing in training. Each target has the weight 1 - smoothing, and all classes share the
            weight ``smoothing`` (C. Szegedy et al.: Rethinking the Inception Architecture for Computer Vision. CVPR
            2016, section 7).
        counting: None if all targets have the same weight in a mean loss. Otherwise ``counting(targets)`` returns the
            weight of each target, by which the loss must already have multiplied its values, as torch's cross-entropy
            with class weights does. The mean loss is the sum of the values divided by the sum of the weights.
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
        """The task's loss and the functions of its metrics, as a list. Any of them may be user-defined, in which case
        its code has to be sent to other processes."""
        return [self.loss, *(metric.values for metric in self.metrics.values())]

    def on(self, device: torch.device) -> Task:
        """Returns the task for computations on ``device``: the tensors of its loss, such as class weights, are copied
        there."""
        if device.type == "cpu" or not isinstance(self.loss, nn.Module):
            return self
        return replace(self, loss=copy.deepcopy(self.loss).to(device))

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Returns the loss of each sample, ``[b]``, for a model's ``outputs`` and the ``targets [b, ...]``. If the loss
        gives a value for each token, the loss of a sample is the mean over its tokens that count."""
        found = self.loss(outputs, targets)
        if self.counting is not None:
            weights = sums_of_samples(self.counting(targets))
            return sums_of_samples(found) / torch.where(weights > 0, weights, 1)
        return self._means(found, targets)

    def training_losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Returns the loss of each sample in training, ``[b]``, for a model's ``outputs``. It is what :meth:`losses`
        returns, but with label smoothing if ``smoothing`` is set."""
        if not self.smoothing:
            return self.losses(outputs, targets)
        ignored = -100 if self.ignored is None else self.ignored
        each = F.cross_entropy(
            outputs.movedim(self.class_axis, 1), targets, reduction="none", ignore_index=ignored,
            label_smoothing=self.smoothing,
        )  # fmt: skip
        return self._means(each, targets)

    def weights(self, targets: Tensor) -> Tensor | None:
        """Returns how much each sample counts in the mean loss of several samples, float32 ``[b]``: the number of its
        tokens that count, or the weight of its class. Returns None if all samples count the same."""
        if self.counting is not None:
            return sums_of_samples(self.counting(targets))
        if not self.loss_per_entry or self.ignored is None:
            return None
        return (targets != self.ignored).flatten(1).sum(1).float()

    def sums(self, name: str, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Evaluates a metric on a batch, in a form that can be added up over batches: returns a numerator and a
        denominator for each sample, both ``[b]``. A metric of many samples is the sum of their numerators divided by
        the sum of their denominators (:meth:`value`). A denominator of None means 1 for every sample.

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
        """Returns a numerator and a denominator for each sample, both ``[b]``: the sum of ``found [b, ...]`` over the
        sample's tokens that count, and the number of these tokens. If all entries count, the numerator is the sample's
        mean, and the denominator is None."""
        if found.dim() == 1:
            return found, None
        if self.ignored is None or found.shape != targets.shape:
            return found.flatten(1).to(torch.float32).mean(1), None
        real = targets != self.ignored
        return torch.where(real, found, 0).flatten(1).sum(1, dtype=torch.float32), real.flatten(1).sum(1).float()

    def value(self, name: str, total: float, count: float) -> float:
        """Returns the metric ``name`` (or ``loss``) of some samples, such as the test set, from sums over these
        samples: ``total`` is the sum of the numerators that :meth:`sums` returns, and ``count`` that of the
        denominators. The result is ``total / count``, to which the metric's ``finish`` is applied. If ``count`` is 0,
        the quotient is NaN."""
        mean = total / count if count else math.nan
        return mean if name == "loss" else self.metrics[name].finish(mean)


def mean_loss(each: Tensor, weights: Tensor | None) -> Tensor:
    """Returns the loss of a mini-batch as a scalar: the mean of its samples' losses ``each [b]``, weighted by ``weights
    [b]``, or unweighted if ``weights`` is None. If all weights are 0, the mean is 0."""
    return each.mean() if weights is None else (each * weights).sum() / weights.sum().clamp(min=LEAST_WEIGHT)


def sums_of_samples(values: Tensor) -> Tensor:
    """Adds up the values of each sample, for example of its tokens: returns sums ``[b]`` for ``values [b, ...]``.
    Values ``[b]`` are returned unchanged."""
    return values if values.dim() == 1 else values.flatten(1).sum(1, dtype=torch.float32)


def exponential(mean: float) -> float:
    """Returns e to the power of ``mean``. If ``mean`` is a mean cross-entropy, this is the perplexity. The result is
    infinity if it is too large for a float."""
    try:
        return math.exp(mean)
    except OverflowError:
        return math.inf


def task_of(kind: str, axis: int, ignored: int) -> Task:
    """Returns the :class:`Task` for a ``kind`` of problem, with the default loss and metrics of that kind. For
    ``other`` there are no metrics, and the loss is cross-entropy until the user's loss replaces it.

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
