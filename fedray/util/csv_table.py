"""Reads tables that users write as CSV files, so that a message can name the line of the file in which something is
wrong."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from fedray.errors import UserError, first_sentence


class CsvTable(NamedTuple):
    """The table of a CSV file, all of whose cells are texts: the columns by name, each with a cell for every row, and
    the ``lines`` of the file on which the rows begin, counted from 1, which is the header."""

    columns: dict[str, list[str]]
    lines: list[int]


def read_csv_table(path: str | Path, where: str) -> CsvTable:
    """Reads a CSV file whose first row names the columns. Blank lines are skipped, and so are spaces after a comma.

    Every row must have as many cells as the header: pandas would take the first cells of longer rows for an index, so
    that all others belong to the wrong column. ``where`` names the file in messages.

    Raises :class:`UserError` if the file can't be read, is empty, has two columns of one name, or a row has more or
    fewer cells than the header.
    """
    header: list[str] = []
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        # a byte order mark, as spreadsheets write it, is no part of the first name
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader, line = csv.reader(file, skipinitialspace=True), 1
            for cells in reader:
                began, line = line, reader.line_num + 1
                if not any(cells) and len(cells) < 2:
                    continue
                if header and len(cells) != len(header):
                    raise UserError(
                        f"{where}, line {began}: there are {len(cells)} cells, and the header has {len(header)}"
                    )
                if not header:
                    header = cells
                    continue
                rows.append(cells)
                lines.append(began)
    except OSError as error:
        raise UserError(f"can't read {where}: {error.strerror or error}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{where} is no CSV file: {first_sentence(error)}") from None
    if not header:
        raise UserError(f"{where} is empty")
    for place, name in enumerate(header):
        if name in header[:place]:
            raise UserError(f"{where} has two columns {name!r}")
    columns = zip(*rows, strict=True) if rows else ((),) * len(header)
    return CsvTable({name: [*cells] for name, cells in zip(header, columns, strict=True)}, lines)
