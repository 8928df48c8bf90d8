"""Checks what a user hands over from Python, before data are read or Ray is started."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from fedray.errors import UserError


def list_of(kind: type, value: Any, what: str) -> list[Any]:
    """Returns an argument as a list of values of one ``kind``, such as ``str``. Raises :class:`UserError` if it is
    something else; ``what`` says which argument takes what, as in "by= takes a list of keys"."""
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        found = list(value)
        if all(isinstance(each, kind) and not isinstance(each, bool) for each in found):
            return found
    raise UserError(f"{what}, not {value!r}")


def override_texts(overrides: Any) -> list[str]:
    """Returns the argument ``overrides`` as a list of texts such as ``train.lr=0.1``. Raises :class:`UserError` if it
    is something else."""
    return list_of(str, overrides, "overrides= takes a list of texts, as in ['train.lr=0.1']")


def place_of(named: Any) -> str:
    """Returns the path or URI of what a user names by a text, a path or a result that knows its folder, such as a
    :class:`fedray.RunResult`. Raises :class:`UserError` if it is something else."""
    if not isinstance(named, str | os.PathLike):
        raise UserError(f"a folder or file is named by a text, a path or a result, not by {named!r}")
    return str(os.fspath(named))


def whole_number(value: Any, name: str) -> int:
    """Returns the argument ``name``, a whole number of at least 1. Raises :class:`UserError` if it is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name} must be a whole number, not {value!r}")
    if value < 1:
        raise UserError(f"{name} must be at least 1, not {value}")
    return int(value)


def check_objects(data: Any, loss: Any, metrics: Any) -> None:
    """Raises :class:`UserError` if one of these arguments of :func:`fedray.simulate` can't be what it is taken for."""
    if isinstance(data, str | Path):
        raise UserError(f"data= takes the samples themselves, not {str(data)!r}: data.source names a data set")
    if loss is not None and not callable(loss):
        raise UserError(f"loss= must be a function of outputs and targets, not {loss!r}: task.loss names one")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UserError(f"metrics= must be a mapping from names to functions, not {metrics!r}: task.metrics names some")
    for name, metric in (metrics or {}).items():
        if not callable(metric):
            raise UserError(f"metric {name!r} must be a function of outputs and targets, not {metric!r}")


def as_text(value: Any, key: str) -> str:
    """Returns a value from Python as it is written on a command line. Raises :class:`UserError`, whose message begins
    with ``key``, if no file can hold it."""
    try:
        # numbers of NumPy
        return json.dumps(value, default=lambda each: each.item())
    except (AttributeError, TypeError, ValueError):
        raise UserError(f"{key} has a value of the type {type(value).__name__}, which no file can hold") from None


def callbacks_of(callbacks: Any) -> list[Any]:
    """Returns the argument ``callbacks`` as a list. Raises :class:`UserError` if it is something else."""
    return list_of(object, callbacks, "callbacks= takes a list of callbacks")
