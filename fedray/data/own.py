"""Makes a source of the data that a user hands over from Python: arrays, a torch Dataset, or a DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedray.config import IGNORED
from fedray.core.seeds import global_generators
from fedray.data.features import stack_samples
from fedray.data.lazy import LazyItems, random_item, read_item, stack_targets, targets_of
from fedray.data.machine import memory_of_machine
from fedray.data.source import DEFAULT, Source, from_fields, validate
from fedray.data.targets import AUTO
from fedray.errors import UserError, closest, near_miss

CLIENT = "client"
"""The column that holds the clients, unless the user names another one."""

MUCH = 0.25
"""The part of the machine's memory beyond which a Dataset is read item by item under ``data.access: auto``."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a DataFrame hold the labels and the clients; ``client`` is None unless the user named it."""

    label: str = "label"
    client: str | None = None


def own_source(
    data: Any,
    test: Any,
    client_column: str | None = None,
    label_column: str = "label",
    normalization: str = DEFAULT,
    kind: str = AUTO,
    ignored: int = IGNORED,
    access: str = "auto",
) -> Source:
    """Returns a checked :class:`Source` of ``data`` (the training set) and ``test``, in any form that simulate() takes.

    Labels, and the clients that come with the samples (a third array, or a column), may have any names, which are
    numbered and kept. ``kind`` and ``ignored`` are ``task.kind`` and ``task.ignore_index``, and ``access`` is
    ``data.access``. Raises :class:`UserError` if something is wrong with the data.
    """
    if normalization != DEFAULT:
        raise UserError(
            f"data.normalization={normalization} is for sources that know it; data=... is used as it is given"
        )
    if isinstance(data, Source):
        if test is not None:
            raise UserError("test=... must not be given with a Source, which has its own test set")
        # the user may have changed what was read from the files, so that the files say nothing about it any more
        return validate(replace(data, files=()), None, kind, ignored)
    if test is None:
        raise UserError("data=... needs test=... in the same form")
    columns = Columns(label_column, client_column)
    if columns != Columns() and not isinstance(data, pd.DataFrame):
        raise UserError("client_column and label_column name columns of a DataFrame, but data is none")
    given = _read_fields(data, "data", "train", columns, access)
    if isinstance(data, pd.DataFrame) and isinstance(test, pd.DataFrame):
        _require(test, "test", columns.label, "label_column")
        test = _in_order_of(data, test, others=(columns.label, columns.client or CLIENT))
    elif _is_arrays(data) and _is_arrays(test) and all(isinstance(each[0], pd.DataFrame) for each in (data, test)):
        test = (_in_order_of(data[0], test[0]), *test[1:])
    return from_fields("own", given | _read_fields(test, "test", "test", columns, access), "data", kind, ignored)


def _read_fields(data: Any, name: str, part: str, columns: Columns, access: str) -> dict[str, Any]:
    """Returns fields of a :class:`Source` from ``data``, not yet checked.

    They are ``x_<part>``, ``y_<part>`` and, if there are clients, ``client_<part>``.
    """
    if isinstance(data, pd.DataFrame):
        found = _read_frame(data, name, columns)
    elif _is_arrays(data):
        found = tuple(data)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        found = _read_dataset(data, name, access)
    else:
        raise UserError(f"{name}=... must be arrays (x, y), a torch Dataset or a DataFrame, not {type(data).__name__}")
    return dict(zip((f"x_{part}", f"y_{part}", f"client_{part}"), found, strict=False))


def _is_arrays(data: Any) -> bool:
    """Returns whether ``data`` consists of x, y and perhaps clients, and is not a short list of items (x, y)."""
    is_pair = isinstance(data, (tuple, list)) and len(data) in (2, 3)
    return is_pair and not all(isinstance(each, (tuple, list)) and len(each) == 2 for each in data)


def _read_frame(frame: pd.DataFrame, name: str, columns: Columns) -> tuple[Any, ...]:
    _require(frame, name, columns.label, "label_column")
    client = _client_column(frame, name, columns)
    features = frame.drop(columns=[columns.label, *([client] if client is not None else [])])
    if not features.columns.is_unique:
        twice = features.columns[features.columns.duplicated()][0]
        raise UserError(f"{name} has two columns {str(twice)!r}")
    for column in features.columns:
        if features[column].dtype.kind not in "biuf":
            raise UserError(f"{name}: column {str(column)!r} is not numeric")
    x = features.to_numpy(np.float32, na_value=np.nan)
    return (x, frame[columns.label]) if client is None else (x, frame[columns.label], frame[client])


def _require(frame: pd.DataFrame, name: str, column: str, argument: str) -> None:
    if column not in frame.columns:
        hint = near_miss(column, map(str, frame.columns))
        raise UserError(f"{name} has no column {column!r} ({argument}){hint}")


def _client_column(frame: pd.DataFrame, name: str, columns: Columns) -> str | None:
    """Returns the name of the column with the clients, or None; a test set need not have it.

    Raises :class:`UserError` if the column that the user named is missing, or a column's name is nearly ``client``.
    """
    if columns.client is not None:
        if name == "data":
            _require(frame, name, columns.client, "client_column")
        return columns.client if columns.client in frame.columns else None
    if CLIENT in frame.columns:
        return CLIENT
    near = closest(CLIENT, map(str, frame.columns.drop(columns.label)), cutoff=0.8)
    if near is not None:
        raise UserError(
            f"{name} has no column {CLIENT!r}, but {near!r}: give client_column={near!r} if it holds the clients, and "
            "rename it if it is a feature"
        )
    return None


def _in_order_of(data: pd.DataFrame, test: pd.DataFrame, others: tuple[str, ...] = ()) -> pd.DataFrame:
    """Returns ``test`` with its columns in the order of those of ``data``, since a model knows features by their order.

    The columns ``others`` are no features, and need not be in both. Raises :class:`UserError` if a feature is missing
    in one of the two.
    """
    wanted = [column for column in data.columns if column not in others]
    there = [column for column in test.columns if column not in others]
    lacking = [str(column) for column in wanted if column not in there]
    surplus = [str(column) for column in there if column not in wanted]
    if lacking or surplus:
        which = f"lacks column {lacking[0]!r}" if lacking else f"has column {surplus[0]!r}"
        raise UserError(
            f"test {which}, which data {'has' if lacking else 'does not have'}; both need the same features"
        )
    return test[[*wanted, *(column for column in others if column in test.columns)]]


def _read_dataset(dataset: Sequence[Any], name: str, access: str) -> tuple[Any, ...]:
    """Returns the inputs and targets of a Dataset, and the clients if it has an attribute ``clients``.

    The inputs are arrays, or :class:`LazyItems` if ``access`` is lazy; under ``auto`` they are lazy if items are random
    or take much memory.
    """
    if len(dataset) == 0:
        raise UserError(f"{name} is an empty data set")
    item, lazy = random_item(dataset, name), LazyItems(dataset, name)
    if item is not None and access in ("memory", "mapped"):
        raise UserError(
            f"item {item} of {name} differs when it is read again, as with random transforms; with "
            f"data.access={access} it would stay as first read in all rounds: use data.access=lazy, or give it without "
            "them, and data.augment or data.transform, which change mini-batches in training"
        )
    clients = getattr(dataset, "clients", None)
    owners = () if clients is None else (clients,)
    if access == "lazy" or item is not None or lazy.bytes_each * len(lazy) > MUCH * memory_of_machine():
        return lazy, targets_of(dataset, name), *owners
    with global_generators():
        items = [read_item(dataset, name, i) for i in range(len(dataset))]
    x, targets = (list(column) for column in zip(*items, strict=True))
    return stack_samples("item", name, x), stack_targets(name, targets), *owners
