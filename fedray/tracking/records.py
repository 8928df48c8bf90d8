"""Digests of a run's records. They show whether a file was damaged or changed later.

A checkpoint holds the digests of the tables up to its round, and summary.json those of the whole run.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedray.errors import UserError
from fedray.util.files import sha256_of_file

KEY = "records"
"""The key of the digests in a checkpoint's record and in summary.json. They are listed by file name."""

FILES = ("partition.parquet", "model.safetensors", "model-best.safetensors")
"""The files that a run writes in one piece."""


class RowsDigest:
    """A digest (sha256) of the rows of a CSV file of a run, such as metrics.csv, which is updated with each new row.

    Empty cells and the order of columns make no difference, so that a column may be added to the file.
    """

    def __init__(self, rows: Iterable[Mapping[Any, Any]] = ()) -> None:
        self._sha256 = hashlib.sha256()
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[Any, Any]) -> None:
        """Updates the digest with the next row of the CSV file. ``row`` has the texts of the cells by column."""
        cells = sorted(f"{name}={value}" for name, value in row.items() if value not in ("", None))
        self._sha256.update("\0".join([*cells, "\n"]).encode(errors="replace"))

    @property
    def value(self) -> str:
        return self._sha256.hexdigest()


class PartsDigest:
    """A digest (sha256) of a folder of Parquet files, such as clients.parquet, which is updated with each new file.

    Each file has the rows of some rounds.
    """

    def __init__(self, folder: Path) -> None:
        self._sha256 = hashlib.sha256()
        for path in sorted(folder.glob("part-*.parquet")):
            self.add(path)

    def add(self, path: Path) -> None:
        """Updates the digest with a file of the folder. Files must be added in the order of their rounds."""
        self._sha256.update(f"{path.name} {sha256_of_file(path)}\n".encode())

    @property
    def value(self) -> str:
        return self._sha256.hexdigest()


def changed(folder: Path, recorded: Any, names: Iterable[str]) -> Iterator[str]:
    """Yields those of the files ``names`` in a run's folder that are damaged, missing or changed since the run wrote
    them.

    ``recorded`` are the digests of the files, by name, as summary.json or a checkpoint has them. Files without a
    recorded digest, as in runs of older versions of fedray, are not yielded.
    """
    for name in names:
        known = recorded.get(name) if isinstance(recorded, Mapping) else None
        if known is not None and digest_of(folder / name) != known:
            yield name


def check_file(folder: Path, name: str) -> None:
    """Checks that the file ``name`` in the run folder ``folder`` is as the run wrote it, and raises :class:`UserError`
    if not.

    The file is compared with the digest in the run's summary.json. Nothing is checked if there is no readable
    summary.json.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return
    if isinstance(summary, dict) and any(changed(folder, summary.get(KEY), (name,))):
        raise UserError(f"{folder / name} is damaged: it is not what the run recorded")


def digest_of(path: Path) -> str | None:
    """Returns the digest (sha256) of a file of a run, or of a folder of Parquet files, or None if it does not exist.

    Of a CSV file the rows are hashed, so that empty cells and the order of the columns do not matter; of other files
    the content.
    """
    if not path.exists():
        return None
    if path.is_dir():
        return PartsDigest(path).value
    if path.suffix == ".csv":
        with path.open(newline="", errors="replace") as file:
            return RowsDigest(csv.DictReader(file)).value
    return sha256_of_file(path)
