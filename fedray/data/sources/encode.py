"""Turns labels and clients into whole numbers. Names (texts, categories, false and true) are numbered, and kept."""

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
    """Turns the labels of several arrays, which may be names, into numbers of classes.

    Returns the labels of each array in ``given`` as int64 [n], by the name of the array, and the names of the classes.
    Labels that are whole numbers are not changed; their classes have names only if ``names`` is given, and otherwise
    None is returned for the names. Labels that are names are numbered in the order of ``names``, which messages call
    ``names_key``. Without ``names`` they are numbered in the order of the first array's pandas categories, if it has
    such, or else in sorted order. In the arrays listed in ``lenient``, an unknown name becomes -1.

    Raises :class:`UserError`, which begins with ``where`` and names array and row, for a missing label, a fraction, or
    an unknown name.
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
    """Turns the clients of training and test samples, which may be names, into numbers.

    Returns ``client_train`` and ``client_test`` as int64 [n], and the clients' names, or None if they are just
    numbers. Clients are numbered as labels are (:func:`encode`). Test samples of clients without training samples get
    -1; ``client_test`` is None if ``test`` is. Raises :class:`UserError`, which begins with ``where``, for a client
    that is wrong.
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
    """Converts ``values`` to int64 [n], if this changes no value.

    Raises :class:`UserError`, which begins with ``where``, calls the values ``key`` and names the row, for a value that
    the conversion would change, such as a fraction.
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
    elif values.dtype.kind not in "iu":
        raise UserError(f"{where}: {key} must hold whole numbers or names, not {values.dtype}")
    if values.dtype == np.uint64 and values.max(initial=0) > np.iinfo(np.int64).max:
        raise UserError(f"{where}: {key} has a number beyond int64 in row {int(values.argmax())}")
    return np.ascontiguousarray(values, dtype=np.int64)


def names_of(where: str, key: str, values: Any) -> list[Any]:
    """Returns the different names among ``values``, which are labels or clients, in the order in which they
    are numbered.

    This is the order of the pandas categories, if there are any. Otherwise false comes before true, and all other names
    are sorted. In messages ``where`` and ``key`` say which values these are.
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


def array_or_categories(where: str, key: str, values: Any) -> Any:
    """Returns ``values`` as an array, or unchanged if they are a categorical pandas column, which keeps the order of
    its names.

    In messages ``where`` and ``key`` say which values these are.
    """
    return as_array(where, key, values) if _categories(values) is None else values


def are_names(values: Any) -> bool:
    """Returns whether ``values``, which are labels or clients, are names that have to be numbered.

    Texts, dates, booleans and pandas categories are names.
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
    try:
        return np.array(values.tolist())
    except OverflowError:
        raise UserError(f"{where}: {key} has a number beyond int64") from None
