"""Reads the CSV files that say what clients' devices are and when they can be reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedray.errors import UserError, near_miss

if TYPE_CHECKING:
    import pandas as pd


def read_table(
    path: str, key: str, needed: Sequence[str], further: Sequence[str], clients: int, names: Sequence[str] | None
) -> dict[str, NDArray[np.float64]]:
    """Reads a CSV file with a line for each client, or several, and returns its columns, each a number ``[lines]``.

    Args:
        path: The file.
        key: The configuration's key that names it, such as ``system.devices``, for messages.
        needed: The columns that the file must have; the first one is ``client``.
        further: The columns that it may have, of which there must be at least one if there are any.
        clients: The number of clients. In the column ``client`` they are numbered from 0.
        names: The clients' names, which may stand in the column ``client`` instead, or None.

    Raises:
        UserError: The file can't be read, a column is missing or unknown, a cell is not a number, or there is no such
            client.
    """
    import pandas as pd

    where = f"{key}={path}"
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)
    except OSError as error:
        raise UserError(f"can't read {where}: {error.strerror or error}") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{where} is no CSV file: {str(error).splitlines()[0]}") from None
    known = (*needed, *further)
    for column in table.columns:
        if column not in known:
            raise UserError(f"{where} has an unknown column {column!r}{near_miss(column, known)}")
    for column in needed:
        if column not in table.columns:
            raise UserError(f"{where} has no column {column!r}; its columns may be {', '.join(known)}")
    if further and not set(further) & set(table.columns):
        raise UserError(f"{where} has none of the columns {', '.join(further)}")
    found = {column: _numbers(table[column], column, where) for column in table.columns if column != "client"}
    return {"client": _clients(table["client"], clients, names, where), **found}


def _numbers(cells: pd.Series[str], column: str, where: str) -> NDArray[np.float64]:
    import pandas as pd

    values = pd.to_numeric(cells, errors="coerce").to_numpy(np.float64)
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise UserError(f"{where}, line {wrong[0] + 2}: {column} must be a number, not {cells.iloc[wrong[0]]!r}")
    return values


def _clients(cells: pd.Series[str], clients: int, names: Sequence[str] | None, where: str) -> NDArray[np.float64]:
    number_of = {str(number): number for number in range(clients)} | {
        name: number for number, name in enumerate(names or ())
    }
    found = []
    for line, cell in enumerate(cells, start=2):
        if cell not in number_of:
            hint = f"clients are numbered from 0 to {clients - 1}" + (" or named as in the data" if names else "")
            raise UserError(f"{where}, line {line}: there is no client {cell!r}; {hint}")
        found.append(number_of[cell])
    return np.array(found, np.float64)
