"""Turns labels and clients into whole numbers. Names (texts, dates, categories, false and true) are numbered, and the
list of names is returned, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedray.data.sources.features import as_array
from fedray.errors import UserError, near_miss

Names = tuple[str, ...]

LISTED = 20
"""If no name is similar to an unknown one, a message lists all names, provided that there are at most this many."""


def encode(
    where: str,
    given: Mapping[str, Any],
    names: Sequence[str] | None = None,
    names_key: str = "class_names",
    lenient: Sequence[str] = (),
) -> tuple[dict[str, np.ndarray], Names | None]:
    """Turns the labels of samples, or their clients, into whole numbers, in the same way for all sets of samples.

    Whole numbers stay as they are. Names (texts, dates, booleans, pandas categories) are numbered: in the order of
    ``names``; or else in the order of the first array's pandas categories; or else in sorted order.

    Returns a dict with the numbers of each set, int64 [n], under the keys of ``given``, and the tuple of names in the
    order of their numbers. The latter is None for whole numbers, unless ``names`` is set. Raises :class:`UserError`,
    which names array and row, for a missing label, a fraction, an unknown name, or numbers in one set and names in
    another.

    Args:
        where: the beginning of error messages.
        given: the labels or clients in each set, [n], by the name of the array; the training set's is first
            (``y_train``, say).
        names: all names, in the order in which they are numbered; None if the user gave no such list.
        names_key: what error messages call ``names``.
        lenient: the keys of ``given`` for which an unknown name becomes -1 instead of an error.
    """
    first = next(iter(given))
    given = {key: array_or_categories(where, key, values) for key, values in given.items()}
    kinds = {key: "names" if are_names(values) else "numbers" for key, values in given.items()}
    for key, kind in kinds.items():
        if kind != kinds[first]:
            raise UserError(
                f"{where}: {first} holds {kinds[first]} and {key} {kind}; they must be alike (texts, dates, true and "
                "false, and pandas' categories are names)"
            )
    if kinds[first] == "numbers":
        return {key: whole_numbers(where, key, values) for key, values in given.items()}, _texts(names)
    holder = first if names is None else names_key
    known = [str(name) for name in (names_of(where, first, given[first]) if names is None else names)]
    number, arrays = {name: place for place, name in enumerate(known)}, {}
    for key, values in given.items():
        column = _column(where, key, values)
        _refuse_missing(where, key, column)
        arrays[key] = np.array([number.get(str(value), -1) for value in column.tolist()], dtype=np.int64)
        if key not in lenient and (arrays[key] < 0).any():
            row = int(np.argmin(arrays[key]))
            name = str(column[row])
            hint = near_miss(name, known) if len(known) <= LISTED else ""
            raise UserError(f"{where}: {key} has {name!r} in row {row}, which {holder} does not have{hint}")
    return arrays, tuple(known)


def encode_clients(
    where: str, train: Any, test: Any = None, names: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray | None, Names | None]:
    """Turns the clients of training and test samples, which may be names, into numbers, as :func:`encode` does.

    Returns a tuple of three: the clients of the training samples, int64 [n]; those of the test samples, int64 [n], or
    None if ``test`` is None; and the clients' names, or None if they are just numbers. A test sample gets -1 if its
    client is an unknown name, such as one that no training sample has. Raises :class:`UserError` for a wrong client.

    Args:
        where: the beginning of error messages.
        train, test: the client of each sample; ``test`` is None if the clients of the test samples are not known.
        names: the names of all clients in the order of their numbers, or None if the user gave no such list.
    """
    given = {"client_train": train} | ({} if test is None else {"client_test": test})
    arrays, known = encode(where, given, names, "client_names", lenient=("client_test",))
    numbers = arrays["client_train"]
    largest = len(known) if known is not None else np.inf
    wrong = (numbers < 0) | (numbers >= largest)
    if wrong.any():
        row = int(np.argmax(wrong))
        why = "clients are 0, 1, 2, ..." if numbers[row] < 0 else f"but client_names has {largest} names"
        mark = ";" if numbers[row] < 0 else ","
        raise UserError(f"{where}: client_train has client {numbers[row]} in row {row}{mark} {why}")
    return numbers, arrays.get("client_test"), known


def _texts(names: Sequence[Any] | None) -> Names | None:
    return None if names is None else tuple(map(str, names))


def whole_numbers(where: str, key: str, values: Any) -> np.ndarray:
    """Converts labels, or other values that must be whole numbers, to int64 [n]; false becomes 0, and true 1.

    Raises :class:`UserError`, which names the row, for a value that the conversion would change, such as a fraction.
    The message begins with ``where``, and calls the values ``key``, such as ``y_train``.
    """
    values = _column(where, key, values)
    if values.dtype.kind == "O":
        _refuse_missing(where, key, values)
        values = _numbers_of_objects(where, key, values)
    if values.dtype.kind == "f":
        changed = ~(values == np.trunc(values)) | (np.abs(values) >= 2.0**63)
        if changed.any():
            row = int(np.argmax(changed))
            raise UserError(f"{where}: {key} must hold whole numbers, not {values[row]:g} as in row {row}")
    elif values.dtype.kind not in "iub":
        raise UserError(f"{where}: {key} must hold whole numbers or names, not {values.dtype}")
    if values.dtype == np.uint64 and values.max(initial=0) > np.iinfo(np.int64).max:
        raise UserError(f"{where}: {key} has a number beyond int64 in row {int(values.argmax())}")
    return np.ascontiguousarray(values, dtype=np.int64)


def names_of(where: str, key: str, values: Any) -> list[Any]:
    """Returns the different names that occur in an array of labels or clients, in the order in which they are numbered.

    This is the order of the pandas categories, if there are any. Otherwise false comes before true, and all other names
    are sorted. Raises :class:`UserError` for a missing value, and for two categories that look the same when written as
    text, such as 1 and "1".

    Args:
        where: the beginning of error messages.
        key: what error messages call the array, such as ``y_train``.
        values: the name of each sample's label or client, [n].
    """
    categories = _categories(values)
    if categories is not None:
        (text, count), *_ = Counter(map(str, categories)).most_common(1) or [("", 0)]
        if count > 1:
            raise UserError(f"{where}: {key} has {count} categories that are {text!r} when written as text")
        return list(categories)
    column = _column(where, key, values)
    _refuse_missing(where, key, column)
    different = set(column.tolist())
    return [False, True] if different <= {False, True} else sorted(different)


def _categories(values: Any) -> Any:
    """Returns the categories of a categorical pandas column, and None for all other values."""
    return getattr(getattr(values, "dtype", None), "categories", None)


def has_categories(values: Any) -> bool:
    """Returns whether ``values`` is a categorical column of pandas."""
    return _categories(values) is not None


def array_or_categories(where: str, key: str, values: Any) -> Any:
    """Converts labels or clients to a NumPy array, but returns a categorical pandas column unchanged, because an array
    would lose the order of its categories.

    Error messages begin with ``where`` and call the values ``key``, such as ``y_train``.
    """
    return as_array(where, key, values) if _categories(values) is None else values


def are_names(values: Any) -> bool:
    """Returns whether ``values``, which are labels or clients, are names. Names have to be turned into numbers; labels
    and clients that are numbers already do not.

    ``values`` is an array or a pandas column. Texts, dates, booleans and pandas categories are names.
    """
    if _categories(values) is not None:
        return True
    values = np.asarray(values)
    if values.dtype.kind != "O":
        return values.dtype.kind in "USbM"
    from pandas.api.types import infer_dtype

    return infer_dtype(values, skipna=True) in ("string", "boolean", "date", "datetime")


def _column(where: str, key: str, values: Any) -> np.ndarray:
    column: np.ndarray = np.asarray(values)
    if column.ndim != 1:
        raise UserError(
            f"{where}: {key} must hold one number or name per sample (shape [n]), not shape {list(column.shape)}"
        )
    if column.dtype.kind == "S":
        column = np.char.decode(column, "utf-8", "replace")
    elif column.dtype.kind == "M":
        _refuse_missing(where, key, column)
        column = np.datetime_as_string(column)
    return column


def _refuse_missing(where: str, key: str, values: np.ndarray) -> None:
    from pandas import isna

    missing = isna(values)
    if missing.any():
        rows = int(np.count_nonzero(missing))
        raise UserError(f"{where}: {key} has nothing in row {int(np.argmax(missing))} ({rows} such rows)")


def _numbers_of_objects(where: str, key: str, values: np.ndarray) -> np.ndarray:
    for row, value in enumerate(values):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise UserError(
                f"{where}: {key} holds numbers and other things, as {value!r} in row {row}; labels and clients must be "
                "all numbers or all names"
            )
    limits = np.iinfo(np.int64)
    for row, value in enumerate(values):
        if isinstance(value, int) and not limits.min <= value <= limits.max:
            raise UserError(f"{where}: {key} has a number beyond int64 in row {row}")
    return np.array(values.tolist())
