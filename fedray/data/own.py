"""Makes a source of the data that a user hands over from Python: arrays, a torch Dataset, or a DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedray.core.seeds import global_generators
from fedray.data.source import DEFAULT, Source, from_fields, stack_samples, validate
from fedray.errors import UserError, closest, near_miss
from fedray.importing import as_user_error

CLIENT = "client"
"""The column that holds the clients, unless the user names another one."""

READ_TWICE = 16
"""The number of items of a Dataset that are read two more times, to find out whether its transforms are random."""


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
) -> Source:
    """Returns a checked :class:`Source` of ``data`` (the training set) and ``test``, in any form that simulate() takes.

    Labels, and the clients that come with the samples (a third array, or a column), may have any names, which are
    numbered and kept. Raises :class:`UserError` if something is wrong with the data.
    """
    if normalization != DEFAULT:
        raise UserError(
            f"data.normalization={normalization} is for sources that know it; data=... is used as it is given"
        )
    if isinstance(data, Source):
        if test is not None:
            raise UserError("test=... must not be given with a Source, which has its own test set")
        # the user may have changed what was read from the files, so that the files say nothing about it any more
        return validate(replace(data, files=()))
    if test is None:
        raise UserError("data=... needs test=... in the same form")
    columns = Columns(label_column, client_column)
    if columns != Columns() and not isinstance(data, pd.DataFrame):
        raise UserError("client_column and label_column name columns of a DataFrame, but data is none")
    given = _read_fields(data, "data", "train", columns)
    if isinstance(data, pd.DataFrame) and isinstance(test, pd.DataFrame):
        _require(test, "test", columns.label, "label_column")
        test = _in_order_of(data, test, others=(columns.label, columns.client or CLIENT))
    elif _is_arrays(data) and _is_arrays(test) and all(isinstance(each[0], pd.DataFrame) for each in (data, test)):
        test = (_in_order_of(data[0], test[0]), *test[1:])
    return from_fields("own", given | _read_fields(test, "test", "test", columns), where="data")


def _read_fields(data: Any, name: str, part: str, columns: Columns) -> dict[str, Any]:
    """Returns fields of a :class:`Source` from ``data``, not yet checked.

    They are ``x_<part>``, ``y_<part>`` and, if there are clients, ``client_<part>``.
    """
    if isinstance(data, pd.DataFrame):
        found = _read_frame(data, name, columns)
    elif _is_arrays(data):
        found = tuple(data)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        found = _read_dataset(data, name)
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


def _read_dataset(dataset: Sequence[Any], name: str) -> tuple[Any, ...]:
    """Reads all items of a Dataset. The global random generators, which its transforms may use, are restored
    afterwards."""
    if len(dataset) == 0:
        raise UserError(f"{name} is an empty data set")
    with global_generators():
        items = [_read_item(dataset, name, i) for i in range(len(dataset))]
    _refuse_random(dataset, name, items)
    labels = np.empty(len(items), dtype=object)
    labels[:] = [label for _, label in items]
    return stack_samples("item", name, [x for x, _ in items]), labels


def _read_item(dataset: Sequence[Any], name: str, i: int) -> tuple[np.ndarray, Any]:
    with as_user_error(f"item {i} of {name} can't be read"):
        item = dataset[i]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise UserError(f"item {i} of {name} is no pair (x, y), but {type(item).__name__}")
        x, label = np.asarray(item[0]), np.asarray(item[1])
    if label.size != 1:
        raise UserError(
            f"item {i} of {name} has a label of shape {list(label.shape)}; labels must be one number or name"
        )
    return x, label.reshape(()).item()


def _refuse_random(dataset: Sequence[Any], name: str, items: Sequence[tuple[np.ndarray, Any]]) -> None:
    """Raises :class:`UserError` if the items of a Dataset are random, because they are read only once for all rounds.

    To find out, some items are read again with other states of the global random generators.
    """
    for seed in (1, 2):
        with global_generators(seed):
            for i in np.unique(np.linspace(0, len(items) - 1, READ_TWICE).astype(int)).tolist():
                (x, label), (again, label_again) = items[i], _read_item(dataset, name, i)
                if not np.array_equal(x, again, equal_nan=x.dtype.kind == "f") or str(label) != str(label_again):
                    raise UserError(
                        f"item {i} of {name} differs when it is read again, as with random transforms; it would stay "
                        "as first read in all rounds: give it without them, and data.augment=crop_flip for images"
                    )
