"""Fits a task to a model: tries whether outputs, loss and metrics are what the task needs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedray.config import TaskConfig
from fedray.core.seeds import Purpose, stream
from fedray.core.structure import leaves, map_leaves
from fedray.core.task import Counting, Loss, Metric, Task, cross_entropy, sums_of_samples, task_of
from fedray.errors import UserError, near_miss
from fedray.models.behaviour import without_traces
from fedray.models.loss_reads import OfModel
from fedray.models.outputs import class_axis, first_outputs, misfit, note_on_probabilities, outputs_of
from fedray.models.reduction import notes_on_parameters, require_same_mean, without_reduction
from fedray.usercode.importing import as_user_error

TRIALS, LARGEST, SIZES = 3, 250, (2, 7, 50, 120)
"""A loss or a metric is tried on ``TRIALS`` batches of ``LARGEST`` samples, and on their first ``SIZES`` samples."""

PLAIN_MEAN = (
    "return the loss of each sample (reduction='none'), of which fedray takes the plain mean; a weighted loss of "
    "torch's is handed over itself (loss=nn.CrossEntropyLoss(weight=...)), and has its weighted mean"
)
"""The advice for a loss that returns a mean."""

MOST_NUMBERS = 20_000_000
"""The largest number of entries in the outputs on which a loss or metric is tried. Larger outputs are tried with fewer
samples."""


def fit_task(
    section: TaskConfig,
    kind: str,
    name: str,
    module: nn.Module,
    x: Any,
    y: Tensor,
    classes: int,
    loss: Loss | None,
    metrics: Mapping[str, Loss],
    custom: Any = None,
) -> tuple[Task, list[str]]:
    """Makes the task of a run, that is, its loss and metrics, after trying them on outputs of the model. Returns the
    task, and a list of notes about it for the user.

    Args:
        section: The section ``task`` of the configuration.
        kind: The kind of task that the data are for, such as ``classification``.
        name: The model's name in messages.
        module: The model.
        x: Inputs ``[b, ...]`` of some samples of the data.
        y: Their targets ``[b, ...]``.
        classes: The number of classes in the data.
        loss: The loss that the user or the model defines, or None for the default of the kind of task.
        metrics: The user's metrics by name.
        custom: The model that the user passed from Python, or None if the configuration names the model. If it is a
            module, losses and metrics must not read its tensors either, because fedray trains copies of it.

    Raises:
        UserError: The model's outputs do not fit the targets, or a loss or metric can't be used.
    """
    notes: list[str] = []
    outputs = first_outputs(module, x, name)
    obstacle = misfit(kind, outputs, y, classes)
    others = [type(each).__name__ for each in leaves(outputs) if not isinstance(each, Tensor)]
    if loss is not None and others:
        raise UserError(
            f"model {name} must give tensors, alone or in tuples, named tuples and dicts, and not {others[0]}"
        )
    if obstacle and loss is not None and section.kind == "auto":
        notes.append(f"warning: task.kind=other, because model {name} {obstacle}: models are compared by the loss")
        kind, obstacle = "other", None
    if obstacle:
        raise UserError(f"model {name} {obstacle}")
    if kind == "other" and loss is None:
        raise UserError("task.kind=other needs a user-defined loss: simulate(..., loss=...)")
    task = task_of(kind, class_axis(kind, outputs, y), section.ignore_index)
    of_model = None
    if loss is not None or metrics:
        with without_traces(module), as_user_error(f"model {name} failed in training mode"):
            of_model = OfModel([module, *([custom] if isinstance(custom, nn.Module) else [])], x)
    trial = _Trial(task, outputs, y, classes, of_model)
    if kind == "multilabel" and loss is not None and not metrics and ((outputs >= 0) & (outputs <= 1)).all():
        notes.append(
            f"warning: the outputs of model {name} lie between 0 and 1, but the metrics of task.kind=multilabel take "
            "an output above 0 for a yes: let the model return logits (with nn.BCEWithLogitsLoss)"
        )
    notes += note_on_probabilities(task, outputs, name) if loss in (None, cross_entropy) else []
    if loss is not None:
        task, lines = _with_loss(task, trial, loss)
        notes += lines
    task = replace(task, smoothing=_smoothing(section, kind, loss))
    task = _with_metrics(task, trial, section, metrics)
    with as_user_error(f"model {name} failed in training mode"):
        outputs = outputs_of(module, x, training=True)
    if obstacle := misfit(kind, outputs, y, classes):
        raise UserError(f"model {name}, in training mode, {obstacle}")
    return task, notes


def _with_loss(task: Task, trial: _Trial, custom: Loss) -> tuple[Task, list[str]]:
    """Returns ``task`` with the loss ``custom``, which the user or the model defines, after trying it on the batches of
    ``trial``. Also returns a list of notes about it for the user."""
    loss, counting = without_reduction(custom, "the loss", trial.y)
    trial, per_entry, has_parameters = trial.check("the loss", loss, PLAIN_MEAN)
    task = replace(task, loss=loss, loss_per_entry=per_entry, counting=counting)
    trial.check_mean("the loss", custom, task)
    trial.require_gradient("the loss", loss)
    notes = notes_on_parameters(custom, has_parameters)
    if trial.depends_on_batch("the loss", loss):
        notes.append(
            "warning: the loss of a sample depends on the other samples of its batch, so test_loss depends on the "
            "size of evaluation batches, and train_loss on train.batch_size"
        )
    return task, notes


def _smoothing(section: TaskConfig, kind: str, loss: Loss | None) -> float:
    """Returns the label smoothing of ``section``, the section ``task`` of the configuration. Raises :class:`UserError`
    if it is set although the loss is not fedray's cross-entropy: for other kinds of tasks, or if ``loss`` is not None.
    """
    if section.label_smoothing and (loss is not None or kind not in ("classification", "tokens")):
        what = "a loss that you or the model define" if loss is not None else f"task.kind={kind}"
        raise UserError(f"task.label_smoothing is for cross-entropy, not for {what}")
    return section.label_smoothing


def _described(outputs: Any, targets: Tensor) -> str:
    """Returns the shapes of a batch as text: ``outputs of shape [2, 10] and targets of shape [2]``."""
    shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves(outputs))
    return f"outputs of shape {shapes} and targets of shape {list(targets.shape)}"


def _with_metrics(task: Task, trial: _Trial, section: TaskConfig, metrics: Mapping[str, Loss]) -> Task:
    """Returns ``task`` with the user's ``metrics`` (by name) in addition to its own, and with the main metric that
    ``section`` names.

    Raises :class:`UserError` for a metric that returns something else than a number for each sample, that depends on
    the other samples of a batch, or that has the name of another metric.
    """
    known = dict(task.metrics)
    for name, custom in metrics.items():
        metric, counting = without_reduction(custom, f"metric {name!r}", trial.y)
        if name in known or name in ("loss", "accuracy"):
            raise UserError(f"metric {name!r} has the name of one of fedray's metrics: choose another")
        tried, _, _ = trial.check(f"metric {name!r}", metric, "fedray takes the mean over the test set itself")
        if tried.depends_on_batch(f"metric {name!r}", metric):
            raise UserError(
                f"metric {name!r} gives a sample another value when there are other samples in its batch, so its mean "
                "would depend on the size of evaluation batches: let it look at each sample alone"
            )
        # targets may be weighted by class
        weighted = metric if counting is None else partial(_two_sums, each=metric, counting=counting)
        known[name] = Metric(weighted, section.mode)
    main = section.metric or task.main
    if main not in known and main != "loss":
        raise UserError(f"task.metric: there is no metric {main!r}{near_miss(main, ['loss', *known])}")
    of_main = "min" if main == "loss" else known[main].mode
    if section.mode not in ("auto", of_main):
        raise UserError(
            f"task.mode={section.mode}, but of {main} " + ("less" if of_main == "min" else "more") + " is better"
        )
    if of_main == "auto":
        raise UserError(f"task.mode: say whether more of your metric {main!r} is better: max or min")
    return replace(task, metrics=known, main=main, mode=of_main)


def _two_sums(outputs: Any, targets: Tensor, each: Loss, counting: Counting) -> tuple[Tensor, Tensor]:
    return sums_of_samples(each(outputs, targets)), sums_of_samples(counting(targets))


class _Trial:
    """Batches of outputs and targets on which losses and metrics are tried. They have the shapes of ``outputs``, which
    are outputs of the model, and of the targets ``y``.

    The outputs in the batches are random numbers or, if ``from_model`` is set, samples of ``outputs``. ``of_model``
    knows which tensors of the model losses and metrics must not read; None means that this is not checked.
    """

    def __init__(self, task: Task, outputs: Any, y: Tensor, classes: int, of_model: OfModel | None) -> None:
        self.kind, self.outputs, self.y, self.classes, self.of_model = task.kind, outputs, y, classes, of_model
        self.from_model = False
        # logits of long texts and large vocabularies would fill the memory
        each = sum(leaf[0].numel() for leaf in leaves(outputs) if isinstance(leaf, Tensor))
        self.largest = max(SIZES[0] + 1, min(LARGEST, MOST_NUMBERS // max(1, each)))

    def batch(self, size: int, draw: int = 0) -> tuple[Any, Tensor]:
        """Draws a batch of ``size`` samples on which a loss or metric can be tried, and returns its outputs and
        targets. ``draw`` is the seed: the same number always gives the same batch, and other numbers give other
        batches. In a classification, at least half of the samples are predicted correctly."""
        rng = stream(0, Purpose.INIT, draw)
        rows = torch.from_numpy(rng.integers(0, len(self.y), size)) if self.from_model else None

        def drawn(like: Tensor) -> Tensor:
            if rows is not None:
                return like[rows]
            noise = torch.from_numpy(rng.standard_normal((size, *like.shape[1:]), dtype=np.float32))
            return noise if like.is_floating_point() else noise.sign().to(like.dtype)

        outputs = map_leaves(drawn, self.outputs)
        if self.kind != "classification":
            return outputs, self.y[torch.from_numpy(rng.integers(0, len(self.y), size))]
        targets = torch.from_numpy(rng.integers(0, self.classes, size))
        targets[::2] = outputs[::2].argmax(1)
        return outputs, targets

    def suited_to(self, function: Loss) -> _Trial:
        """Chooses the batches on which the loss or metric ``function`` can be tried, and returns them as a trial. That
        is this trial if the function gives finite numbers for its outputs. Otherwise it is a copy whose outputs come
        from the model instead of being random numbers, as a loss that takes probabilities needs."""
        try:
            if bool(torch.as_tensor(function(*self.batch(SIZES[0]))).isfinite().all()):
                return self
        except Exception:
            # the error is raised again if the model's outputs are not suitable either
            pass
        trial = copy.copy(self)
        trial.from_model = True
        return trial

    def check(self, what: str, function: Loss, advice: str) -> tuple[_Trial, bool, bool]:
        """Checks, on small batches, that the loss or metric ``function`` gives a value for each sample or for each
        entry of the targets.

        Returns three things: a trial (batches) with outputs that suit the function (:meth:`suited_to`), whether the
        function gives a value for each entry, and whether it has trainable parameters of its own.

        ``what`` is the function's name in error messages, and ``advice`` ends the message about a wrong shape. Raises
        :class:`UserError` if the function gives anything else, or reads tensors of the model, such as its parameters.
        """
        trial, per_entry, has_parameters = self.suited_to(function), False, False
        # two sizes are tried, because one of them may happen to be the number of classes
        for size in (2, self.classes + 1 if self.kind == "classification" else 3):
            outputs, targets = trial.batch(size)
            with as_user_error(f"{what} failed on {_described(outputs, targets)}"):
                values = function(outputs, targets)
                if self.of_model is not None:
                    has_parameters = self.of_model.require_unread(what, function, outputs, targets)
            if not isinstance(values, Tensor):
                raise UserError(f"{what} must give one value per sample, a tensor [b], not {type(values).__name__}")
            per_entry = values.dim() > 1 and values.shape == targets.shape
            if values.shape != targets.shape[:1] and not per_entry:
                raise UserError(
                    f"{what} must give one value per sample, [b], not a tensor of shape {list(values.shape)}: {advice}"
                )
        return trial, per_entry, has_parameters

    def check_mean(self, what: str, loss: Any, task: Task) -> None:
        """Checks that ``task`` gives the same mean loss as ``loss``, the user's loss. This is only checked for a loss
        module of torch that returns a mean; any other loss is accepted. Raises :class:`UserError` if the means differ.
        ``what`` is the name of the loss in error messages."""
        for size in SIZES[:2]:
            outputs, targets = self.batch(size)
            with as_user_error(f"{what} failed on {_described(outputs, targets)}"):
                each, weights = task.losses(outputs, targets), task.weights(targets)
                require_same_mean(what, loss, outputs, targets, each, weights)

    def require_gradient(self, what: str, loss: Loss) -> None:
        """Checks that torch can compute the gradient of ``loss`` with respect to the outputs. Raises
        :class:`UserError` if not, which calls the loss ``what``."""
        outputs, targets = self.batch(SIZES[0])
        tracked = [leaf.requires_grad_() for leaf in leaves(outputs) if leaf.is_floating_point() or leaf.is_complex()]
        with torch.enable_grad(), as_user_error(f"the gradient of {what} can't be computed"):
            # copies, as a loss may write into outputs
            total = loss(map_leaves(lambda leaf: leaf.clone(), outputs), targets).sum()
            found = torch.autograd.grad(total, tracked, allow_unused=True) if total.requires_grad else [None]
        if all(each is None for each in found):
            raise UserError(
                f"{what} has no gradient: what it returns must be computed from the outputs by torch's functions, "
                "without detach(), item() or NumPy"
            )

    def depends_on_batch(self, what: str, function: Loss) -> bool:
        """Returns whether the value that the loss or metric ``function`` gives a sample changes with the other samples
        of its batch. For a function that draws random numbers this can't be determined, and the answer is False.
        ``what`` is the function's name in error messages."""
        for draw in range(TRIALS):
            outputs, targets = self.batch(self.largest, draw)
            for size in (size for size in SIZES if size < self.largest):
                with as_user_error(f"{what} failed on {self.largest} outputs and targets"):
                    whole, part, again = (
                        function(map_leaves(lambda each, b=b: each[:b], outputs), targets[:b]).double()[:size]
                        for b in (self.largest, size, size)
                    )
                if not torch.allclose(part, again, equal_nan=True):
                    return False
                if not torch.allclose(whole, part, rtol=1e-3, atol=1e-6, equal_nan=True):
                    return True
        return False
