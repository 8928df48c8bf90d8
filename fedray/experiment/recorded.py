"""Which columns of metrics.csv a run will have, for the keys of the configuration that name some."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedray.config import Config
from fedray.core.task import Task
from fedray.data.federated import FederatedData
from fedray.errors import UserError, near_miss
from fedray.system.devices import devices_of

STOPPING = ("train_loss", "iterations", "bytes_down", "bytes_up", "flops", "virtual_seconds", "joules", "epsilon")
"""The columns that ``run.stop_at`` may name beside those of evaluated models. How long a run took on this machine is
none of them, because the result would depend on it."""


LOCAL = "local"
"""What columns about the models of the cohort's clients, before these are averaged, begin with."""


def recorded_metrics(task: Task, label: str) -> list[str]:
    """Returns the names of the metrics for which metrics.csv has columns ``<label>_<metric>``. ``label`` is a split
    ("test", "validation" or "train"), :data:`LOCAL`, or the name of a further model.

    "test" and :data:`LOCAL` have the loss and all metrics of ``task``. Other labels have only the main metric and the
    accuracy, as far as the task has them.
    """
    if label in ("test", LOCAL):
        return ["loss", *task.metrics]
    # train_loss is the loss of local training
    known = task.metrics if label == "train" else ("loss", *task.metrics)
    return [name for name in known if name in (task.main, "accuracy")]


FRACTIONS = ("accuracy", "f1")
"""The metrics that are at most 1."""


def check_reached(config: Config, task: Task, data: FederatedData) -> None:
    """Raises :class:`UserError` if ``run.stop_at`` or ``run.targets`` has a value that no model can reach, and if
    ``run.stop_at`` names a column that a run has not, or one that would make the length of a private run depend on
    single clients."""
    stop_at = config.run.stop_at
    named = [*stop_at.items()] if isinstance(stop_at, dict) else [(task.main, stop_at)] if stop_at is not None else []
    reached = [("stop_at", *each) for each in named] + [("targets", task.main, value) for value in config.run.targets]
    for key, name, value in reached:
        if name.removeprefix("test_").removeprefix("validation_").removeprefix("train_") in FRACTIONS and value > 1:
            raise UserError(f"run.{key}={value:g}: {name} is a fraction of 1 (did you mean {value / 100:g}?)")
    for column in stop_at if isinstance(stop_at, dict) else ():
        check_column("run.stop_at", column, ("test", "validation", "train"), STOPPING, config, task, data)
        if config.privacy.is_on and column != "epsilon" and not column.startswith(("test_", "validation_")):
            raise UserError(
                f"run.stop_at: with privacy, {column} must not decide when the run ends, as single clients decide it; "
                "use epsilon, or a metric of the test set"
            )


def check_column(
    key: str, name: str, splits: Iterable[str], others: Iterable[str], config: Config, task: Task, data: FederatedData
) -> None:
    """Raises :class:`UserError` if a run has no column ``name``, which the configuration's ``key`` names.

    ``splits`` are those whose metrics may be named ("test", "validation", "train"), and ``others`` further columns.
    """
    of = {f"{split}_{metric}": split for split in splits for metric in recorded_metrics(task, split)}
    known = [*of, *others]
    if name not in known:
        raise UserError(f"{key}: there is no column {name!r} in this task{near_miss(name, known)}")
    if name in ("virtual_seconds", "joules") and not config.system.is_on:
        raise UserError(f"{key}: {name} is not recorded without a virtual clock (system.*); use bytes or flops")
    if name == "joules":
        watts = devices_of(config.system, data.clients, config.run.seed, data.client_names).watts
        if not np.isfinite(watts[data.sizes() > 0]).all():
            raise UserError(f"{key}: joules are not known, because system.watts is not, or a device's profile lacks it")
    if name == "epsilon" and not config.privacy.is_on:
        raise UserError(f"{key}: epsilon is not recorded without privacy")
    needed = {
        "test": (config.run.eval_test and len(data.y_test), "a test set (run.eval_test)"),
        "train": (len(data.train_subset), "run.eval_train_samples, the samples to evaluate it on"),
        "validation": (len(data.validation), "data.validation_samples"),
    }
    there, what = needed[of[name]] if name in of and name not in others else (True, "")
    if not there:
        raise UserError(f"{key}: {name} needs {what}")
