"""Which columns of a table hold the inputs, the targets and the clients, and which of its rows are test samples.

This is the same for a DataFrame, csv files and Hugging Face data sets. This module only handles names of columns; it
reads no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedray.config import TARGET_COLUMN, DataConfig
from fedray.errors import UserError, closest, near_miss

CLIENT = "client"
"""The default name of the column with the clients."""

HELD_OUT = 5
"""Where data come without test samples, one in this many samples of each user, class or other group is one."""

LISTED = 20
"""If no column has a similar name, a message lists all columns, provided that there are at most this many."""


@dataclass(frozen=True)
class Columns:
    """The roles of a table's columns: the one with the targets, the one with the clients, and those with the inputs.

    Args:
        target: the column with the targets.
        client: the column with the clients. None stands for the column :data:`CLIENT`, if the table has one.
        inputs: the columns with the inputs; None for all other columns.
        target_key, client_key, inputs_key: what messages call these settings: keys of the configuration, or arguments
            of simulate().

    Example:
        >>> Columns(target="price", client="town").find(["rooms", "area", "town", "price"], "visits.csv", needed=True)
        ('town', ['rooms', 'area'])
    """

    target: str = TARGET_COLUMN
    client: str | None = None
    inputs: tuple[str, ...] | None = None
    target_key: str = "data.target_column"
    client_key: str = "data.client_column"
    inputs_key: str = "data.input_columns"

    @classmethod
    def of(cls, data: DataConfig) -> Columns:
        """Returns the columns that a configuration names in its section ``data``: ``target_column``, ``client_column``
        and ``input_columns``."""
        inputs = None if data.input_columns is None else tuple(data.input_columns)
        return cls(data.target_column, data.client_column, inputs)

    @property
    def keys_set(self) -> list[str]:
        """The keys among ``target_key``, ``client_key`` and ``inputs_key`` whose columns the user has set."""
        changed = {
            self.target_key: self.target != TARGET_COLUMN,
            self.client_key: self.client is not None,
            self.inputs_key: self.inputs is not None,
        }
        return [key for key, is_set in changed.items() if is_set]

    def require(self, there: Sequence[Any], name: str, column: str, key: str) -> None:
        """Raises :class:`UserError` if the table called ``name``, which has the columns ``there``, lacks ``column``.

        ``key`` is the setting that asks for the column; the message names it.
        """
        if column not in there:
            known = list(map(str, there))
            shown = known if len(known) <= LISTED or closest(column, known) else []
            raise UserError(f"{name} has no column {column!r} ({key}){near_miss(column, shown)}")

    def find_client(self, there: Sequence[Any], name: str, needed: bool) -> str | None:
        """Returns the name of the column with the clients, or None if the table has none.

        ``there`` are the table's columns, and ``name`` is what messages call the table. ``needed`` is false for a test
        set, which need not have the column that the user named. Raises :class:`UserError` if a needed column is
        missing, or if the table has no column :data:`CLIENT` but one with a similar name.
        """
        if self.client is not None:
            if needed:
                self.require(there, name, self.client, self.client_key)
            return self.client if self.client in there else None
        if CLIENT in there:
            return CLIENT
        others = [str(column) for column in there if column != self.target and column not in (self.inputs or ())]
        near = closest(CLIENT, others, cutoff=0.8)
        if near is not None:
            raise UserError(
                f"{name} has no column {CLIENT!r}, but {near!r}: give {self.client_key}={near!r} if it holds the "
                "clients, and rename it if it is a feature"
            )
        return None

    def find(self, there: Sequence[Any], name: str, needed: bool) -> tuple[str | None, list[Any]]:
        """Finds out which columns of a table hold the clients and the inputs.

        ``there`` are the table's columns, and ``name`` is what messages call the table. ``needed`` is false for a test
        set, which need not have a column of clients. Returns the column with the clients, or None if there is none
        (:meth:`find_client`), and the list of columns with the inputs. Raises :class:`UserError` if a column is
        missing, is named twice, or has two roles.
        """
        self.require(there, name, self.target, self.target_key)
        client = self.find_client(there, name, needed)
        others = {self.target: "the targets"} | ({} if client is None else {client: "the clients"})
        if self.inputs is None:
            found = [column for column in there if column not in others]
        else:
            found = list(self.inputs)
            for column in found:
                self.require(there, name, column, "data.input_columns")
                if column in others:
                    raise UserError(f"data.input_columns: {column!r} is the column of {others[column]} in {name}")
        if not found:
            raise UserError(f"{name} has no column of inputs beside {' and '.join(map(repr, others))}")
        twice = [column for place, column in enumerate(found) if column in found[:place]]
        if twice:
            where = f"{name} has two columns" if self.inputs is None else "data.input_columns names twice"
            raise UserError(f"{where} {str(twice[0])!r}")
        return client, found


def in_order_of(wanted: Sequence[Any], there: Sequence[Any], names: tuple[str, str]) -> Sequence[Any]:
    """Checks that a test set has the same input columns as the training set, and returns them in the training
    set's order.

    ``wanted`` are the input columns of the training set, and ``there`` those of the test set. The order matters because
    a model knows its inputs by their order. ``names`` are what messages call the two sets. Raises :class:`UserError` if
    one set has a column that the other lacks.
    """
    lacking = [str(column) for column in wanted if column not in there]
    surplus = [str(column) for column in there if column not in wanted]
    if lacking or surplus:
        which = f"lacks column {lacking[0]!r}" if lacking else f"has column {surplus[0]!r}"
        raise UserError(
            f"{names[1]} {which}, which {names[0]} {'has' if lacking else 'does not have'}; both need the same features"
        )
    return wanted


def held_out(count: int, groups: Any = None) -> np.ndarray:
    """Chooses test samples where data come without a test set: every fifth sample of each group, in the order of
    the samples.

    Returns booleans [count], which are true for the test samples. ``groups`` has the group of each sample, such as its
    client. Without it all samples are one group.
    """
    codes = np.zeros(count, np.int64) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], codes[order])
    tests = np.empty(count, np.bool_)
    tests[order] = (np.arange(count) - starts) % HELD_OUT == HELD_OUT - 1
    return tests


def divide(count: int, clients: Any, where: Any, lacks: str) -> tuple[np.ndarray, str]:
    """Chooses test rows for data without a test set: every fifth row, or every fifth row of each client.

    Returns booleans [count], which are true for the test rows, and a line about the choice for the user. ``clients``
    has the client of each row, or is None. In messages ``where`` is the name of the data, and ``lacks`` is what the
    data lack, such as ``test set``. Raises :class:`UserError` if there are too few rows for a test row.
    """
    tests = held_out(count, clients)
    if not tests.any():
        raise UserError(f"{where} is too short: of {count} rows none is a fifth one, so that none is a test row")
    of_each = "" if clients is None else "of each client, "
    return tests, f"warning: {where} has no {lacks}: {of_each}every fifth row is a test row"
