"""Turns columns of Arrow tables into NumPy arrays. Nothing is rounded or filled in; values that do not fit are
errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedray.errors import UserError


def column_array(column: pa.ChunkedArray | pa.Array, name: str, first: int = 0) -> np.ndarray:
    """Converts a column of an Arrow table to a NumPy array: ``[n]``, or ``[n, ...]`` for a column of sequences.

    The column holds numbers, booleans, texts or dates, or sequences of them. Raises :class:`UserError` for any other
    type. It also raises one, which names the row, for a missing value, a NaN, and sequences that are empty or differ in
    length.

    Args:
        column: the column.
        name: what error messages call the column.
        first: the number of the column's first row, from which error messages count rows.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # older versions of Arrow leave extension types in chunks
        array = pa.concat_arrays([chunk.storage for chunk in array.chunks])
    shape = [len(array)]
    while True:
        if isinstance(array.type, pa.ExtensionType):
            array = array.storage
        per_row = int(np.prod(shape[1:]))
        _refuse_missing(array, name, first, per_row)
        if not _is_list(array.type):
            break
        shape.append(_length(array, name, first, per_row))
        array = array.flatten()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    whole = pa.types.is_boolean(kind) or pa.types.is_integer(kind)
    text_or_date = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_date(kind)
    if not (whole or pa.types.is_floating(kind) or text_or_date or pa.types.is_timestamp(kind)):
        raise UserError(f"{name} holds {kind}; fedray reads numbers, texts, dates, images, and sequences of numbers")
    values: np.ndarray = array.to_numpy(zero_copy_only=False).reshape(shape)
    if values.dtype.kind == "f" and np.isnan(values).any():
        rows = np.isnan(values).reshape(shape[0], -1).any(axis=1)
        raise UserError(f"{name} has NaN in row {first + int(rows.argmax())} ({int(rows.sum())} such rows)")
    return values


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _refuse_missing(array: Any, name: str, first: int, per_row: int) -> None:
    if array.null_count:
        missing = np.asarray(pc.is_null(array))
        row, rows = first + int(missing.argmax()) // per_row, int(missing.sum())
        raise UserError(f"{name} has nothing in row {row} ({rows} such {'rows' if per_row == 1 else 'values'})")


def _length(array: Any, name: str, first: int, per_row: int) -> int:
    """Returns the common length of all sequences in an Arrow array. Raises :class:`UserError` if their
    lengths differ."""
    lengths = np.asarray(pc.list_value_length(array))
    other = lengths != lengths[0]
    if other.any():
        place = int(other.argmax())
        raise UserError(
            f"{name} has {lengths[place]} values in row {first + place // per_row}, {lengths[0]} in row {first}; all "
            "must be equally many"
        )
    if not lengths[0]:
        raise UserError(f"{name} has an empty sequence in row {first}")
    return int(lengths[0])
