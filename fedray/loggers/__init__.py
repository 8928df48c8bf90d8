"""Tools of others that show runs as they go on: MLflow, Weights & Biases and trackio (``run.loggers``).

A logger has the methods of a callback (:class:`fedray.Callback`), but no run waits for it. It imports its tool when the
run starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedray.loggers.logger import Logger
from fedray.loggers.mlflow import MLflow
from fedray.loggers.trackio import Trackio
from fedray.loggers.wandb import WeightsAndBiases
from fedray.usercode.extensions import Entry, check_entry, make
from fedray.usercode.importing import as_user_error

LOGGERS: Mapping[str, type[Logger]] = {"mlflow": MLflow, "trackio": Trackio, "wandb": WeightsAndBiases}
"""The loggers, by the names that ``run.loggers`` has for them."""


def prepare(entries: Sequence[Entry], group: str | None) -> None:
    """Lets the loggers that ``run.loggers`` names prepare for runs of ``group`` that will begin side by side. Raises
    :class:`UserError` if one can't."""
    for entry in entries:
        name, logger = check_entry(entry, "run.loggers", LOGGERS), make(entry, "run.loggers", LOGGERS)
        if hasattr(logger, "prepare"):
            with as_user_error(f"run.loggers: {name} failed in prepare"):
                logger.prepare(group)
