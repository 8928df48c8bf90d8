"""The source ``npz``: the user's arrays in one file that numpy.savez wrote."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedray.config import IGNORE_INDEX
from fedray.data.sources.source import Source, from_fields
from fedray.data.sources.targets import AUTO
from fedray.data.storage.cache import file_stamp
from fedray.errors import UserError, near_miss
from fedray.util.files import in_home

ARRAYS = [field.name for field in fields(Source) if "_" in field.name]


def npz(root: str | None, kind: str = AUTO, ignored: int = IGNORE_INDEX) -> Source:
    """Loads the user's arrays from an npz file, which ``numpy.savez`` writes.

    The file must have the arrays ``x_train``, ``y_train``, ``x_test`` and ``y_test``. It may have ``client_train``,
    ``client_test``, ``x_public``, ``y_public``, ``class_names``, ``client_names`` and ``column_names``
    (:class:`Source` says what they hold). A warning names other arrays, which are not read. Inputs of type uint8 are
    scaled to 0..1. Raises :class:`UserError`, which names the file, if it can't be read or something in it is wrong.

    Args:
        root: the path of the file; required.
        kind: the kind of task (``task.kind``), such as ``regression``; ``auto`` finds it from the targets.
        ignored: the target value of those tokens that losses and metrics leave out (``task.ignore_index``).
    """
    if root is None:
        raise UserError("data.source=npz needs data.root: the path of the .npz file")
    path = in_home(root)
    files = (file_stamp(path),) if path.is_file() else ()
    given, others = _read(path)
    found = from_fields(path.stem, given, str(path), kind, ignored)
    if others:
        meant = near_miss(others[0], [name for name in ARRAYS if name not in given])
        found = replace(found, notes=(*found.notes, f"warning: {path}: not read: {', '.join(others)}{meant}"))
    return replace(found, files=files)


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the arrays of a file by name, and the names of those that fedray does not read."""
    if path.is_dir():
        raise UserError(f"data.root={path} is a folder; data.source=npz needs the .npz file")
    try:
        if not zipfile.is_zipfile(path):
            path.open("rb").close()
            raise UserError(f"{path} is not an npz file, or an incomplete one; write it with numpy.savez")
        with np.load(path, allow_pickle=False) as archive:
            given = {}
            for name in ARRAYS:
                if name in archive.files:
                    try:
                        given[name] = archive[name]
                    except ValueError:
                        raise UserError(
                            f"{path}: {name} is an array of Python objects, not of numbers; cast it before numpy.savez"
                        ) from None
            return given, [name for name in archive.files if name not in ARRAYS]
    except OSError as error:
        raise UserError(f"can't read data.root={path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
