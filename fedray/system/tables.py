"""Reads the CSV files that say what clients' devices are and when they can be reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedray.errors import UserError, near_miss
from fedray.util.csv_table import read_csv_table


class Table(NamedTuple):
    """A table about clients: the numbers of the ``clients`` in its rows, ``[rows]``, the other ``columns`` by name,
    ``[rows]`` each, and the ``lines`` of the file on which the rows begin."""

    clients: NDArray[np.int64]
    columns: dict[str, NDArray[np.float64]]
    lines: list[int]


def read_table(
    path: str, key: str, needed: Sequence[str], further: Sequence[str], clients: int, names: Sequence[str] | None
) -> Table:
    """Reads a CSV file with a line for each client, or several.

    Args:
        path: The file.
        key: The configuration's key that names it, such as ``system.devices``, for messages.
        needed: The columns that the file must have; the first one is ``client``.
        further: The columns that it may have, of which there must be at least one if there are any.
        clients: The number of clients. In the column ``client`` they are numbered from 0.
        names: The clients' names, which may stand in the column ``client`` instead, or None.

    Raises:
        UserError: The file can't be read, a row has more or fewer cells than the header, a column is missing or
            unknown, a cell is not a number, or there is no such client.
    """
    where = f"{key}={path}"
    texts, lines = read_csv_table(path, where)
    known = (*needed, *further)
    for column in texts:
        if column not in known:
            raise UserError(f"{where} has an unknown column {column!r}{near_miss(column, known)}")
    for column in needed:
        if column not in texts:
            raise UserError(f"{where} has no column {column!r}; its columns may be {', '.join(known)}")
    if further and not set(further) & set(texts):
        raise UserError(f"{where} has none of the columns {', '.join(further)}")
    found = {
        column: np.array(
            [_number(cell, column, f"{where}, line {line}") for cell, line in zip(cells, lines, strict=True)]
        )
        for column, cells in texts.items()
        if column != "client"
    }
    return Table(_clients([cell.strip() for cell in texts["client"]], lines, clients, names, where), found, lines)


def _number(cell: str, column: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    # Python's own numbers may have marks between digits: 1_000
    if not math.isfinite(number) or "_" in cell:
        raise UserError(f"{where}: {column} must be a number, not {cell!r}")
    return number


def _clients(
    cells: Sequence[str], lines: Sequence[int], clients: int, names: Sequence[str] | None, where: str
) -> NDArray[np.int64]:
    """Returns the numbers of the clients in the column ``client``, ``[rows]``. Where clients have names that are also
    numbers, all cells are taken for names if they can be, or else all for numbers."""
    by_number = {str(number): number for number in range(clients)}
    by_name = {name: number for number, name in enumerate(names or ())}
    different = set(cells)
    chosen = by_name if different <= by_name.keys() else by_number if different <= by_number.keys() else None
    found = []
    for cell, line in zip(cells, lines, strict=True):
        either = {known[cell] for known in (by_name, by_number) if cell in known}
        if not either:
            hint = f"clients are numbered from 0 to {clients - 1}" + (" or named as in the data" if names else "")
            raise UserError(f"{where}, line {line}: there is no client {cell!r}; {hint}")
        if chosen is None and len(either) > 1:
            raise UserError(
                f"{where}, line {line}: {cell!r} is the number of one client and the name of another, and the file has "
                "both names and numbers: use one of them"
            )
        found.append(min(either) if chosen is None else chosen[cell])
    return np.array(found, np.int64)
