"""Which columns of a table hold the inputs, the targets and the clients, and which of its rows are test samples.

The rules are the same for DataFrames, csv files and Hugging Face data sets. This module only handles names of columns
and numbers of rows; it reads no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedray.config import MAX_LENGTH, TARGET_COLUMN, DataConfig
from fedray.errors import UserError, closest, near_miss

CLIENT = "client"
"""The default name of the column with the clients."""

HELD_OUT = 5
"""Where data come without test samples, one in this many samples of each user, class or other group is one."""

LISTED = 20
"""If no column has a similar name, a message lists all columns, provided that there are at most this many."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table that hold the targets, the clients and the inputs, as far as the user has named them.

    Args:
        target: the name of the column with the targets.
        client: the name of the column with the client of each row. None stands for the column ``client``, if the table
            has one.
        inputs: the names of the columns with the inputs. None stands for all columns without targets or clients.
        tokenizer: what turns inputs that are texts into tokens: a folder, or a name on the hub; None if there are none.
        length: the number of tokens of each row.
        target_key, client_key, inputs_key: what error messages call the settings by which the user names these columns:
            keys of the configuration, or arguments of simulate().

    Example:
        >>> Columns(target="price", client="town").find(["rooms", "area", "town", "price"], "visits.csv", needed=True)
        ('town', ['rooms', 'area'])
    """

    target: str = TARGET_COLUMN
    client: str | None = None
    inputs: tuple[str, ...] | None = None
    tokenizer: str | None = None
    length: int = MAX_LENGTH
    target_key: str = "data.target_column"
    client_key: str = "data.client_column"
    inputs_key: str = "data.input_columns"

    @classmethod
    def of(cls, data: DataConfig) -> Columns:
        """Makes the :class:`Columns` that a configuration describes by ``target_column``, ``client_column`` and
        ``input_columns`` in its section ``data``."""
        inputs = None if data.input_columns is None else tuple(data.input_columns)
        return cls(
            data.target_column, data.client_column, inputs, data.tokenizer, data.max_length or MAX_LENGTH
        )  # fmt: skip

    @property
    def keys_set(self) -> list[str]:
        """The settings by which the user has named columns, as a list of their names: ``target_key`` if ``target`` is
        not the default, and ``client_key`` and ``inputs_key`` if ``client`` and ``inputs`` are not None."""
        changed = {
            self.target_key: self.target != TARGET_COLUMN,
            self.client_key: self.client is not None,
            self.inputs_key: self.inputs is not None,
            "data.tokenizer": self.tokenizer is not None,
        }
        return [key for key, is_set in changed.items() if is_set]

    def require(self, there: Sequence[Any], name: str, column: str, key: str) -> None:
        """Checks that a table has the column ``column``, and raises :class:`UserError` if it does not.

        ``there`` has the names of all columns of the table. The error message calls the table ``name``, and shows
        ``key``, the setting that names the column, such as ``data.target_column``.
        """
        if column not in there:
            known = list(map(str, there))
            shown = known if len(known) <= LISTED or closest(column, known) else []
            raise UserError(f"{name} has no column {column!r} ({key}){near_miss(column, shown)}")

    def find_client(self, there: Sequence[Any], name: str, needed: bool) -> str | None:
        """Returns the name of the column with the clients of a table, or None if the table has no such column.

        Raises :class:`UserError` if a needed column is missing. It also raises it if the user named no column and the
        table has none called ``client``, but one with a similar name, such as ``clients``.

        Args:
            there: the names of all columns of the table.
            name: what error messages call the table.
            needed: whether a column that the user named must exist; false for a test set, which may lack it.
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
        """Returns the name of the column with the clients, or None if there is none, and the list of columns with the
        inputs.

        Raises :class:`UserError` if a column, such as that of the targets, is missing, is named twice, or has two
        roles.

        Args:
            there: the names of all columns of the table.
            name: what error messages call the table.
            needed: whether a column of clients that the user named must exist; false for a test set, which may lack it.
        """
        self.require(there, name, self.target, self.target_key)
        client = self.find_client(there, name, needed)
        others = {self.target: "the targets"} | ({} if client is None else {client: "the clients"})
        if self.inputs is None:
            found = [column for column in there if column not in others]
        else:
            found = list(self.inputs)
            for column in found:
                self.require(there, name, column, self.inputs_key)
                if column in others:
                    raise UserError(f"{self.inputs_key}: {column!r} is the column of {others[column]} in {name}")
        if not found:
            raise UserError(f"{name} has no column of inputs beside {' and '.join(map(repr, others))}")
        twice = [column for place, column in enumerate(found) if column in found[:place]]
        if twice:
            where = f"{name} has two columns" if self.inputs is None else f"{self.inputs_key} names twice"
            raise UserError(f"{where} {str(twice[0])!r}")
        return client, found


def in_order_of(wanted: Sequence[Any], there: Sequence[Any], names: tuple[str, str]) -> Sequence[Any]:
    """Checks that a test set has the same input columns as the training set, and returns these in the training set's
    order.

    The order matters because a model tells its inputs apart by their order. ``wanted`` has the names of the training
    set's input columns, and ``there`` those of the test set's. ``names`` is what error messages call the two sets.
    Raises :class:`UserError` if one set has a column that the other lacks.
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
    """Chooses test samples for data that come without a test set: every fifth sample of each group.

    ``groups`` has the group of each of the ``count`` samples, such as its client or class; None makes all samples one
    group. Returns booleans [count], which are true for the test samples. A group of fewer than five samples has no test
    sample.
    """
    codes = np.zeros(count, np.int64) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], codes[order])
    tests = np.empty(count, np.bool_)
    tests[order] = (np.arange(count) - starts) % HELD_OUT == HELD_OUT - 1
    return tests


def divide(count: int, clients: Any, where: Any, lacks: str) -> tuple[np.ndarray, str]:
    """Chooses test rows for a table without a test set: every fifth row of each client, or simply every fifth row if
    the table has no clients.

    Returns booleans [count], which are true for the test rows, and a warning that tells the user about this choice.
    Raises :class:`UserError` if there are too few rows for a single test row.

    Args:
        count: the number of rows.
        clients: the client of each row, or None if the table has no clients.
        where: what messages call the table.
        lacks: what the warning calls the missing test set, after "no", such as ``test set``.
    """
    tests = held_out(count, clients)
    if not tests.any():
        raise UserError(f"{where} is too short: of {count} rows none is a fifth one, so that none is a test row")
    of_each = "" if clients is None else "of each client, "
    return tests, f"warning: {where} has no {lacks}: {of_each}every fifth row is a test row"
