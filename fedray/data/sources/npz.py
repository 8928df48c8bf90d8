"""The source ``npz``: the user's arrays in one file that numpy.savez wrote."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedray.config import IGNORED
from fedray.data.sources.source import Source, from_fields
from fedray.data.sources.targets import AUTO
from fedray.data.storage.cache import file_stamp
from fedray.errors import UserError
from fedray.util.files import in_home

ARRAYS = [field.name for field in fields(Source) if "_" in field.name]


def npz(root: str | None, kind: str = AUTO, ignored: int = IGNORED) -> Source:
    """Reads the user's arrays from the npz file ``root``: those that are named like the fields of :class:`Source`,
    such as ``x_train``.

    ``kind`` and ``ignored`` are the configuration's ``task.kind`` and ``task.ignore_index``. The classes are 0 to the
    largest label in all sets, or the labels' names. Inputs of type uint8 are scaled to 0..1. Other arrays in the file
    are ignored.

    Raises :class:`UserError`, which names the file, if it can't be read or something in it is wrong.
    """
    if root is None:
        raise UserError("data.source=npz needs data.root: the path of the .npz file")
    path = in_home(root)
    files = (file_stamp(path),) if path.is_file() else ()
    given = _read(path)
    return replace(from_fields(path.stem, given, str(path), kind, ignored), files=files)


def _read(path: Path) -> dict[str, Any]:
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
            return given
    except OSError as error:
        raise UserError(f"can't read data.root={path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
