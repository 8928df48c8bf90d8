"""The tables of a run's folder, to which each round appends rows: metrics.csv and the Parquet folders."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from fedray.errors import UserError
from fedray.tracking.records import PartsDigest, RowsDigest
from fedray.util.files import replacement_of, room_for

if TYPE_CHECKING:
    import pandas as pd

PART_ROUNDS, PART_ROWS = 500, 200_000
"""The number of rounds, or of rows, after which a file of a Parquet folder is written."""

WHOLE = ("round", "iterations", "cohort_size", "bytes_down", "bytes_up")


class RoundsFile:
    """A CSV file of a run, such as metrics.csv, to which each round appends a row.

    The attribute ``lost`` is the number of earlier rounds whose rows were missing when the file was opened. ``digest``
    is the digest of all rows.
    """

    def __init__(self, path: Path, columns: Sequence[str], after: int) -> None:
        """Opens the CSV file ``path`` of a run that continues after round ``after``, 0 for a new run, and removes the
        rows of later rounds. ``columns`` are the names of the columns."""
        self.path, self.columns = path, columns
        kept = _rows_until(path, after)
        self.lost, self.digest = after - len(kept), RowsDigest(kept)
        with replacement_of(path) as staging, staging.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self.columns)

    def append(self, row: Mapping[str, Any]) -> None:
        cells = {name: "" if row.get(name) is None else str(row[name]) for name in self.columns}
        with room_for(self.path):
            self._writer.writerow(cells)
            self._file.flush()
        self.digest.add(cells)

    def sync(self) -> None:
        with room_for(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _rows_until(path: Path, after: int) -> list[dict[str, Any]]:
    """Returns the rows of a CSV file for rounds up to ``after``, as texts by column."""
    if not after or not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.DictReader(file) if (row.get("round") or "").isdigit()]
    return [row for row in rows if int(row["round"]) <= after]


def check_numbers(path: Path, after: int) -> None:
    """Checks that a CSV file of a run has only numbers and empty cells in its rows for rounds up to ``after``. Raises
    :class:`UserError` if a cell holds anything else, because the run could not be resumed with such a row."""
    for row in _rows_until(path, after):
        for name, cell in row.items():
            try:
                float(cell or 0)
            except (TypeError, ValueError):
                what = f"column {name} has {cell!r}" if name else f"there is {','.join(cell)!r} too much"
                raise UserError(
                    f"{path} is damaged: in round {row['round']} {what}; mend it, or use run.resume=false to start over"
                ) from None


class ParquetRows:
    """A folder of Parquet files, such as clients.parquet, to which each round appends several rows, such as one for
    each client.

    Each file holds the rows of successive rounds. The attribute ``digest`` is the digest of all files.
    """

    def __init__(self, path: Path, after: int) -> None:
        """Opens the folder ``path`` of Parquet files of a run that continues after round ``after``, 0 for a new run.

        Rows of later rounds are removed.
        """
        self.path, self._rows, self._held = path, list[dict[str, Any]](), 0
        path.mkdir(exist_ok=True)
        for part in path.glob("part-*-*.parquet"):
            first, last = (int(number) for number in part.stem.split("-")[1:3])
            if first > after:
                part.unlink()
            elif last > after:
                table = pq.read_table(part)
                with replacement_of(path / _name_of_part(first, after)) as staging:
                    pq.write_table(table.filter(pa.compute.field("round") <= after), staging)
                part.unlink()
        self.digest = PartsDigest(path)

    def append(self, rows: Mapping[str, Any]) -> None:
        """Appends the rows of one round, such as a row for each client. The rows are written to a file
        later (:meth:`flush`).

        ``rows`` has a list for each column, all of the same length, except that ``round`` is a single number.
        """
        if not _length(rows):
            # its columns would have no types
            return
        self._rows.append(dict(rows))
        self._held += _length(rows)
        if len(self._rows) >= PART_ROUNDS or self._held >= PART_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes the rows that were appended since the last call into a new Parquet file. Does nothing if there are no
        such rows."""
        if not self._rows:
            return
        tables = [
            pa.table({"round": [rows["round"]] * _length(rows)} | {k: v for k, v in rows.items() if k != "round"})
            for rows in self._rows
        ]
        part = self.path / _name_of_part(self._rows[0]["round"], self._rows[-1]["round"])
        with replacement_of(part) as staging:
            pq.write_table(pa.concat_tables(tables, promote_options="permissive"), staging)
        self.digest.add(part)
        self._rows, self._held = [], 0


def _name_of_part(first: int, last: int) -> str:
    return f"part-{first:08d}-{last:08d}.parquet"


def _length(rows: Mapping[str, Any]) -> int:
    return len(next(values for name, values in rows.items() if name != "round"))


def read_parts(folder: Path) -> pd.DataFrame:
    """Reads a table from its Parquet files in ``folder``. It has the columns of all of them, because a column may begin
    in a later round; without any file it has no rows."""
    import pandas as pd

    parts = [pq.read_table(part) for part in sorted(folder.glob("part-*.parquet"))]
    if not parts:
        return pd.DataFrame({"round": pd.Series(dtype="int64"), "client": pd.Series(dtype="int64")})
    table: pd.DataFrame = pa.concat_tables(parts, promote_options="permissive").to_pandas()
    return table


def read_metrics(path: Path) -> pd.DataFrame:
    """Reads metrics.csv from the run folder ``path`` as a DataFrame with a row for each round.

    Numbers are exact to the bit, and empty cells are NaN.
    """
    with (path / "metrics.csv").open(encoding="utf-8") as file:
        names = next(csv.reader(file), [])
    kinds = {name: pa.int64() if name in WHOLE else pa.float64() for name in names}
    table = pa.csv.read_csv(path / "metrics.csv", convert_options=pa.csv.ConvertOptions(column_types=kinds))
    found: pd.DataFrame = table.to_pandas()
    return found
