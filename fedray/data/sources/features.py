"""Reads the inputs of a data set: arrays of any shape and type, or tuples and dicts of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedray.core.structure import leaves, map_leaves, outline
from fedray.errors import UserError
from fedray.usercode.importing import as_user_error

_STORED = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.complex128): np.complex64}
"""Types that torch can't index or has no use for, each with the type that is stored instead."""


class ReadLater:
    """Inputs that are read only when they are used. ``first`` has their form: it is the first sample, with n = 1."""

    first: Any


def read_features(where: str, name: str, x: Any, samples: int) -> Any:
    """Converts the inputs of all samples of a set, as the user or a source gives them, to arrays ``[n, ...]`` of the
    types that fedray stores.

    Returns one array, or a tuple or dict of arrays if ``x`` is one. Floats become float32, and complex numbers
    complex64. Booleans and whole numbers are not changed, except that uint16 becomes int32, and uint32 and uint64
    become int64. A ``LazyItems``, which reads inputs from a Dataset only when they are used, is returned unchanged.
    Raises :class:`UserError` for anything that can't be used, such as NaN; the message names the array and the row.

    Args:
        where: the beginning of error messages.
        name: what error messages call the inputs, such as ``x_train``.
        x: the inputs. A dict holds the model's named inputs, and a tuple its positional inputs. But in a tuple with
            ``samples`` elements each element is a sample.
        samples: the number of samples.
    """
    if isinstance(x, ReadLater):
        return x
    if isinstance(x, Mapping):
        if not x:
            raise UserError(f"{where}: {name} is a dict without inputs")
        return {str(key): read_features(where, f"{name}[{key!r}]", part, samples) for key, part in x.items()}
    if isinstance(x, tuple) and x and len(x) != samples and all(np.ndim(part) > 0 for part in x):
        return tuple(read_features(where, f"{name}[{place}]", part, samples) for place, part in enumerate(x))
    return _read_array(where, name, x)


def form_of(x: Any) -> Any:
    """Returns arrays that show the structure, shapes and types of the inputs ``x``, without reading all samples.

    For inputs in memory these are the inputs themselves, ``[n, ...]``. For those that are read later it is the first
    sample, with n = 1.
    """
    return x.first if isinstance(x, ReadLater) else x


def _read_array(where: str, name: str, x: Any) -> np.ndarray:
    x = as_array(where, name, x)
    # torch knows neither other orders of bytes nor longer numbers
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    if x.dtype == np.clongdouble:
        x = x.astype(np.complex128)
    if x.dtype in (np.float64, np.float16, np.longdouble):
        # a number that is too large for float32 becomes infinite, which is refused below
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    if x.dtype.kind not in "biufc":
        raise UserError(f"{where}: {name} is of type {x.dtype}; features must be numbers")
    if x.dtype == np.uint64 and x.max(initial=0) > np.iinfo(np.int64).max:
        raise UserError(f"{where}: {name} has a number beyond int64 in row {int(x.argmax()) // max(1, x[0].size)}")
    x = x.astype(_STORED.get(x.dtype, np.int64 if x.dtype == np.uint64 else x.dtype), copy=False)
    if x.ndim < 2:
        raise UserError(
            f"{where}: {name} has shape {list(x.shape)}; features must be [samples, ...], and a single number for each "
            "sample [samples, 1]"
        )
    if not x.size:
        raise UserError(f"{where}: {name} is empty (shape {list(x.shape)})")
    if x.dtype.kind in "fc":
        finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
        if not finite.all():
            row = int(np.argmin(finite))
            what = "NaN" if np.isnan(x[row]).any() else "an infinite number"
            raise UserError(f"{where}: {name} has {what} in row {row} ({int((~finite).sum())} such rows)")
    return np.ascontiguousarray(x)


def as_array(where: str, name: str, values: Any) -> np.ndarray:
    """Converts a list, a pandas column or other values to a NumPy array. Rows that are arrays or lists are stacked.

    Raises :class:`UserError` if this fails, for example because a row differs in shape or type from row 0. The message
    begins with ``where``, and calls the values ``name``.
    """
    if np.ma.is_masked(values):
        row = int(np.argwhere(np.ma.getmaskarray(values))[0][0])
        raise UserError(f"{where}: {name} has nothing in row {row}, where it is masked")
    with as_user_error(f"{where}: {name} can't be read as an array"):
        try:
            found = np.asarray(values)
            is_list = found.dtype.kind == "U" and found.ndim == 1 and not hasattr(values, "dtype")
            if is_list and not all(isinstance(each, str) for each in values):
                # NumPy makes texts of numbers, too, and of what is missing
                found = np.asarray(list(values), dtype=object)
            if found.dtype == object and _is_table_of_numbers(values):
                # numbers of several types, or of pandas' own ones
                found = values.to_numpy(np.float64, na_value=np.nan)
            unequal = found.dtype == object and found.ndim == 1 and len(found) > 0 and np.ndim(found[0]) > 0
        except ValueError:  # rows of unequal shapes
            unequal = True
        if unequal:
            found = stack_samples(f"{where}: row", name, values)
    return found


def _is_table_of_numbers(values: Any) -> bool:
    # whoever has a table has imported pandas; a run's actors have no table
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(values, pandas.DataFrame):
        return False
    return all(map(pandas.api.types.is_numeric_dtype, values.dtypes))


def alike(where: str, name: str, x: Any, first: Any) -> Any:
    """Checks that the inputs ``x`` of a test or public set match the training inputs ``first``, and returns ``x``.

    Raises :class:`UserError` if the structures, the shapes of a sample, or the types do not match. The message begins
    with ``where``, and calls the inputs ``name``, such as ``x_test``.
    """
    whole, x, first = x, form_of(x), form_of(first)
    if outline(x) != outline(first):
        raise UserError(f"{where}: {name} is {outline(x)}, x_train {outline(first)}; they must be alike")

    def check(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.shape[1:] != b.shape[1:]:
            raise UserError(
                f"{where}: samples of {name} have shape {list(a.shape[1:])}, those of x_train {list(b.shape[1:])}"
            )
        both_whole = a.dtype != np.uint8 and b.dtype != np.uint8 and a.dtype.kind in "iu" and b.dtype.kind in "iu"
        if a.dtype != b.dtype and not both_whole:
            raise UserError(f"{where}: {name} is {a.dtype}, x_train {b.dtype}; they must be alike")
        return a

    map_leaves(check, x, first)
    return whole


def count_samples(where: str, name: str, x: Any) -> int:
    """Returns the number of samples in the inputs ``x``, which are an array, or a tuple or dict of arrays.

    Raises :class:`UserError` if the arrays have different numbers of samples. The message begins with ``where``, and
    calls the inputs ``name``, such as ``x_train``.
    """
    found = {len(leaf) for leaf in leaves(x)}
    if len(found) > 1:
        raise UserError(f"{where}: the inputs of {name} have {' and '.join(map(str, sorted(found)))} samples")
    return found.pop()


def as_sample(x: Any) -> Any:
    """Converts the inputs of one sample to an array, or to a tuple or dict of arrays. A tuple of single numbers becomes
    one array."""
    if isinstance(x, tuple) and all(np.ndim(part) == 0 for part in x):
        return np.asarray(x)
    return map_leaves(np.asarray, x)


def stack_samples(unit: str, name: str, samples: Iterable[Any]) -> Any:
    """Joins the inputs of single samples into arrays with a row for each sample.

    Returns an array ``[n, ...]``, or a tuple or dict of such arrays if each sample is a tuple or dict. Raises
    :class:`UserError` for the first sample that differs in structure, shape or type from sample 0.

    Args:
        unit: what error messages call a sample, such as ``item`` in "item 3 of train".
        name: what error messages call all samples.
        samples: the inputs of each sample.
    """
    kept = list(map(as_sample, samples))
    for number, sample in enumerate(kept):
        if outline(sample) != outline(kept[0]):
            raise UserError(
                f"{unit} {number} of {name} is {outline(sample)}, the first one {outline(kept[0])}; make them alike"
            )
    return map_leaves(lambda *rows: _stack(unit, name, rows), *kept)


def _stack(unit: str, name: str, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    first = arrays[0]
    for number, array in enumerate(arrays):
        if array.shape != first.shape:
            raise UserError(
                f"{unit} {number} of {name} has shape {list(array.shape)}, the first one {list(first.shape)}; all "
                "must be equally large"
            )
        if array.dtype != first.dtype:
            raise UserError(f"{unit} {number} of {name} is {array.dtype}, the first one {first.dtype}; make them alike")
    return np.stack(arrays)
