"""A user's own data as a source: arrays, a torch Dataset, or a DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from fedray.data.source import Source, validate
from fedray.errors import UserError, near_miss

Arrays = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]


def own_source(data: Any, test: Any, client_column: str, label_column: str) -> Source:
    """A checked :class:`Source` of ``data`` (training) and ``test``, each in any form that simulate() takes.

    Clients given with the samples (a third array, a client column) may have any names; they are numbered in their
    order.
    """
    if isinstance(data, Source):
        if test is not None:
            raise UserError("test=... must not be given with a Source, which has its own test set")
        # what was read from files may have been changed since
        return validate(replace(data, files=()))
    if test is None:
        raise UserError("simulate(data=...) needs test=... in the same form")
    x, y, client = _arrays(data, "data", client_column, label_column)
    x_test, y_test, client_test = _arrays(test, "test", client_column, label_column)
    numbers: dict[str, np.ndarray | None] = {"client_train": None, "client_test": None}
    if client is not None:
        names = np.unique(client)
        numbers["client_train"] = np.searchsorted(names, client)
        if client_test is not None:
            place = np.minimum(np.searchsorted(names, client_test), len(names) - 1)
            numbers["client_test"] = np.where(names[place] == client_test, place, -1)
    labels = [np.asarray(a) for a in (y, y_test)]
    classes = int(max(a.max(initial=-1) for a in labels)) + 1 if all(a.dtype.kind in "iu" for a in labels) else 0
    return validate(
        Source(name="own", x_train=x, y_train=y, x_test=x_test, y_test=y_test, classes=classes, **numbers)  # type: ignore[arg-type]
    )


def _arrays(data: Any, name: str, client_column: str, label_column: str) -> Arrays:
    if isinstance(data, pd.DataFrame):
        return _frame(data, name, client_column, label_column)
    if isinstance(data, (tuple, list)) and len(data) in (2, 3) and not hasattr(data, "__getitems__"):
        x, y, *rest = (np.asarray(part) for part in data)
        return x, y, rest[0] if rest else None
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return _dataset(data, name)
    raise UserError(
        f"simulate({name}=...) must be arrays (x, y), a torch Dataset or a DataFrame, not {type(data).__name__}"
    )


def _frame(frame: pd.DataFrame, name: str, client_column: str, label_column: str) -> Arrays:
    if label_column not in frame.columns:
        raise UserError(f"{name} has no column {label_column!r}{near_miss(label_column, map(str, frame.columns))}")
    features = frame.drop(columns=[label_column, client_column], errors="ignore")
    texts = [str(column) for column in features.columns if features[column].dtype.kind not in "biuf"]
    if texts:
        raise UserError(f"{name}: column {texts[0]!r} is not numeric")
    client = frame[client_column].to_numpy() if client_column in frame.columns else None
    return features.to_numpy(np.float32), frame[label_column].to_numpy(), client


def _dataset(dataset: Sequence[Any], name: str) -> Arrays:
    if len(dataset) == 0:
        raise UserError(f"{name} is an empty data set")
    try:
        pairs = [(np.asarray(x), int(y)) for x, y in (dataset[i] for i in range(len(dataset)))]
    except (TypeError, ValueError):
        raise UserError(f"the items of {name} must be (x, y) with a whole-number label y") from None
    return np.stack([x for x, _ in pairs]), np.array([y for _, y in pairs], dtype=np.int64), None
