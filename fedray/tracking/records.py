"""Digests of what a run has recorded, by which it is noticed that a file was damaged or changed since.

A checkpoint holds those of the tables up to its round, and summary.json those of the whole run.
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
"""The key of a checkpoint's record, and of summary.json, under which the digests are, by the file's name."""

FILES = ("partition.parquet", "model.safetensors", "model-best.safetensors")
"""The files that a run writes as a whole."""


class RowsDigest:
    """The digest of rows of a CSV file, which grows with them.

    Empty cells do not count, nor does the order of columns, so that a column may be added to the file.
    """

    def __init__(self, rows: Iterable[Mapping[Any, Any]] = ()) -> None:
        self._sha256 = hashlib.sha256()
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[Any, Any]) -> None:
        """Adds a row: its cells as texts, by column."""
        cells = sorted(f"{name}={value}" for name, value in row.items() if value not in ("", None))
        self._sha256.update("\0".join([*cells, "\n"]).encode(errors="replace"))

    @property
    def value(self) -> str:
        return self._sha256.hexdigest()


class PartsDigest:
    """The digest of a folder of files, each with the rows of some rounds, which grows with them."""

    def __init__(self, folder: Path) -> None:
        self._sha256 = hashlib.sha256()
        for path in sorted(folder.glob("part-*.parquet")):
            self.add(path)

    def add(self, path: Path) -> None:
        """Adds the file of the rounds that come next."""
        self._sha256.update(f"{path.name} {sha256_of_file(path)}\n".encode())

    @property
    def value(self) -> str:
        return self._sha256.hexdigest()


def changed(folder: Path, recorded: Any, names: Iterable[str]) -> Iterator[str]:
    """Yields those of the files ``names`` in a run's folder that are not as they were ``recorded``.

    Files without a digest, which older versions of fedray have written, are left out.
    """
    for name in names:
        known = recorded.get(name) if isinstance(recorded, Mapping) else None
        if known is not None and digest_of(folder / name) != known:
            yield name


def check_file(folder: Path, name: str) -> None:
    """Raises :class:`UserError` if a file of the run in ``folder`` is not what the run recorded, by its summary.json.

    Nothing is known of it if there is no summary.json that can be read.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return
    if isinstance(summary, dict) and any(changed(folder, summary.get(KEY), (name,))):
        raise UserError(f"{folder / name} is damaged: it is not what the run recorded")


def digest_of(path: Path) -> str | None:
    """Returns the digest of a file or a folder of a run's, or None if it is not there."""
    if not path.exists():
        return None
    if path.is_dir():
        return PartsDigest(path).value
    if path.suffix == ".csv":
        with path.open(newline="", errors="replace") as file:
            return RowsDigest(csv.DictReader(file)).value
    return sha256_of_file(path)
