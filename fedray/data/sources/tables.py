"""Reads inputs, targets and clients from DataFrames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fedray.data.sources.columns import CLIENT, Columns, in_order_of
from fedray.errors import UserError

OTHER_INPUTS = (
    "make columns of 0 and 1 of categories (pandas.get_dummies); texts need data.source=hf and data.tokenizer"
)
"""The advice for a column of inputs that are no numbers."""


def read_frame(frame: pd.DataFrame, name: str, columns: Columns, has_clients: bool = True) -> tuple[Any, ...]:
    """Reads the inputs, the targets and the clients of samples from a DataFrame, in which each row is a sample.

    Returns a tuple of two or three: the inputs, a table of float32; the column of targets; and the column of clients,
    if the table has one. Raises :class:`UserError`, which names the column, if a column is missing, exists twice, or is
    not numeric.

    Args:
        frame: the table.
        name: what error messages call it.
        columns: which columns hold the targets, the clients and the inputs.
        has_clients: whether a column of clients that the user named must exist; false for a test set.
    """
    client, inputs = columns.find(list(frame.columns), name, has_clients)
    features = frame[inputs]
    for column in features.columns:
        _require_numbers(features[column], name, columns.client_key if client is None else None)
    x = pd.DataFrame(features.to_numpy(np.float32, na_value=np.nan), columns=features.columns, copy=False)
    return (x, frame[columns.target]) if client is None else (x, frame[columns.target], frame[client])


def _require_numbers(values: pd.Series, name: str, client_key: str | None) -> None:
    """Raises :class:`UserError` if a column of inputs does not hold numbers alone. ``client_key`` is the setting that
    names the column of the clients, if the table has none yet: then a column of names may be meant to be that."""
    column = f"{name}: column {str(values.name)!r}"
    if values.dtype.kind not in "biuf":
        texts = values.astype(str)
        are_categories = isinstance(values.dtype, pd.CategoricalDtype)
        wrong = (pd.to_numeric(texts, errors="coerce").isna() | are_categories) & values.notna()
        row = int(wrong.argmax())
        example = f": {texts.iloc[row]!r} in row {row}" if wrong.any() else ""
        hint = ""
        if wrong.any() and wrong.sum() == values.notna().sum():
            hint = f"; {OTHER_INPUTS}"
            if client_key:
                hint = f"; if it says whose row it is, give {client_key}={str(values.name)!r}{hint}"
        raise UserError(f"{column} is not numeric{example}{hint}")
    missing = values.isna()
    if missing.any():
        raise UserError(f"{column} has nothing in row {int(missing.argmax())} ({int(missing.sum())} such rows)")


def with_columns_of(
    data: pd.DataFrame, test: pd.DataFrame, columns: Columns | None = None, names: tuple[str, str] = ("data", "test")
) -> pd.DataFrame:
    """Returns the table ``test`` with its columns in the order of ``data``, the training set's table.

    The order matters because a model tells its inputs apart by their order. ``columns`` says which columns are not
    inputs, and need not be in both tables; if it is None, all columns are inputs. ``names`` is what error messages call
    the two tables. Raises :class:`UserError` if one table lacks an input that the other has.
    """
    others = [] if columns is None else list(dict.fromkeys([columns.target, columns.client or CLIENT]))
    wanted = [column for column in data.columns if column not in others]
    there = [column for column in test.columns if column not in others]
    ordered = [*in_order_of(wanted, there, names), *(column for column in others if column in test.columns)]
    found: pd.DataFrame = test[ordered]
    return found
