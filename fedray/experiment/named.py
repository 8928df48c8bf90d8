"""Makes the objects that a config names in ``task.loss``, ``task.metrics``, ``train.upload`` and ``train.sampling``, or
that the user has passed in their place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedray.algorithms import Algorithm
from fedray.config import Config
from fedray.config.section import in_message
from fedray.core.task import LOSSES
from fedray.core.upload import UploadStep
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.selection import SELECTIONS, Selection
from fedray.selection.selection import check_declared
from fedray.uploads import STEPS
from fedray.usercode.extensions import Entry, check_entry, is_object, make


def with_named(config: Config, custom: CustomObjects) -> CustomObjects:
    """Makes the loss and the metrics that the configuration names (``task.loss``, ``task.metrics``), and returns a copy
    of ``custom`` to which they are added.

    ``custom`` has the objects that the user passed from Python, which take precedence. If it has a loss, the loss that
    the configuration names is not made. If it has a metric of the same name as one in the configuration, it keeps its
    own.
    """
    loss, metrics = custom.loss, dict(custom.metrics)
    if loss is None and config.task.loss is not None:
        loss = _callable(config.task.loss, "task.loss")
    for metric, name in config.task.named_metrics.items():
        metrics.setdefault(metric, _callable(name, "task.metrics"))
    return replace(custom, loss=loss, metrics=metrics)


def named_uploads(config: Config, algorithm: Algorithm, custom: CustomObjects) -> tuple[UploadStep, ...]:
    """Makes the steps that ``train.upload`` names, or those that ``custom`` has in their place, and returns them in
    their order. A step is a function that is applied to clients' uploads, such as clipping.

    Some steps store values of each client from round to round. They need an algorithm that has only one phase, that is,
    whose clients send their uploads once in a round. Raises :class:`UserError` if the algorithm has several phases, if
    its clients send numbers about their uploads or something else than updates, or if a step can't be made.
    """
    entries = config.train.upload if custom.upload is None else custom.upload
    steps = tuple(_callable(entry, "train.upload") for entry in entries)
    if steps and algorithm.sends_numbers:
        raise UserError(
            f"train.upload: clients of {config.algorithm.name} send numbers besides models and vectors, such as "
            "lengths, which the steps would not change"
        )
    if steps and not algorithm.sends_updates:
        raise UserError(
            f"train.upload: clients of {config.algorithm.name} send something else than an update, or an update twice, "
            "to which the steps would not do the same"
        )
    if steps and algorithm.several_models:
        raise UserError(f"train.upload: clients of {config.algorithm.name} do not all begin with the same model")
    for number, step in enumerate(steps):
        if isinstance(step, UploadStep):
            step.follows(steps[:number])
        if getattr(step, "keeps", False) and algorithm.private_from > 1:
            raise UserError(
                f"train.upload: {type(step).__name__} keeps something of each client, and the first rounds of "
                f"{config.algorithm.name} send more than the others"
            )
        if getattr(step, "keeps", False) and len(algorithm.phases) > 1:
            raise UserError(
                f"train.upload: {type(step).__name__} keeps something of each client, which needs an algorithm of one "
                f"phase; {config.algorithm.name} has {len(algorithm.phases)}"
            )
    return steps


def selection_name(entry: Entry | Selection | type[Selection]) -> str:
    """Returns the name of the selection that ``entry``, the value of ``train.sampling``, names, such as
    ``power_of_choice``. Raises :class:`UserError` if there is none."""
    return check_entry(entry, "train.sampling", SELECTIONS, "kind")


def chosen_selection(config: Config, custom: CustomObjects) -> Selection:
    """Makes the selection of a run: the one that the user has passed, if ``custom`` has one, or else the one that
    ``train.sampling`` names. Raises :class:`UserError` if that is not possible."""
    return named_selection(config.train.sampling if custom.sampling is None else custom.sampling)


def named_selection(entry: Entry | Selection | type[Selection]) -> Selection:
    """Makes the selection that ``entry``, the value of ``train.sampling``, names, or the selection or class
    ``entry``. Raises :class:`UserError` if that is not possible."""
    found = make(entry, "train.sampling", SELECTIONS, "kind")
    check_declared(found, f"train.sampling={selection_name(entry)}")
    selection: Selection = found
    return selection


def _callable(entry: Any, key: str) -> Any:
    found = make(entry, key, STEPS if key == "train.upload" else LOSSES)
    if not callable(found):
        shown = in_message(entry) if is_object(entry) else entry
        raise UserError(f"{key}: {shown} must be a function or a class of such, not {type(found).__name__}")
    return found
