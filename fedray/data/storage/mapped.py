"""Arrays in files that are mapped into memory: a machine has one copy, which all its processes read.

``columns.json``, in the folder of these files, holds the version of the layout and the sha256 of each file. Each
machine hashes a file once, and again when the file's size, times or inode have changed.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedray.core.structure import leaves, map_leaves
from fedray.data.sources.features import form_of
from fedray.data.storage.cache import file_stamp, remembered
from fedray.errors import UserError
from fedray.util.files import sha256_of_file, write_whole

FORMAT = 2
"""The version of the layout of a folder of mapped arrays. Folders with another version are not read."""

COLUMNS = "columns.json"

AGAIN = "remove the folder, and it is made again"


@dataclass(frozen=True)
class MappedFile:
    """Names the file of a mapped array. Instead of the array, this object is sent to other processes, which open the
    file.

    ``path`` is the path of the file, and ``sha256`` its digest. The digest is None if fedray has not recorded one, for
    example for a file of the user's. Then only the machine ``made_on``, on which this object was made, may read it.
    """

    path: str
    sha256: str | None
    made_on: str

    def open(self) -> np.ndarray:
        """Returns the array in this file, mapped into memory.

        Raises :class:`UserError` if the file is not on this machine, is damaged, or has other content than its
        digest says.
        """
        path, here = Path(self.path), platform.node()
        if not path.exists():
            raise UserError(
                f"{path} is not on {here}: with data.access=mapped every machine needs it. fedray data prepare, with "
                "the same settings, makes it on all machines of the cluster; or let $XDG_CACHE_HOME name a folder that "
                "they share"
            )
        if self.sha256 is not None:
            if _sha256(path) != self.sha256:
                raise UserError(f"{path} on {here} is not as it was made (its sha256 differs): {AGAIN}")
        elif here != self.made_on:
            raise UserError(
                f"{path} is an array of yours that is mapped from a file of {self.made_on}, which {here} can't check: "
                "use data.access=mapped, or memory"
            )
        try:
            found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}): {AGAIN}") from None
        return found


def is_mapped(array: Any) -> bool:
    """Returns whether ``array`` is mapped from a file that holds nothing else. If so, the file's path can be sent to
    another process in place of the array."""
    if not isinstance(array, np.memmap) or array.filename is None:
        return False
    return array.offset + array.nbytes == os.path.getsize(array.filename)


def shipped(array: Any) -> Any:
    """Returns what to send to another process in place of ``array``, so that samples in a file need not be copied.

    It is a :class:`MappedFile` if the array is mapped from a file, and otherwise the array itself. In the other process
    :func:`received` turns it into the array again.
    """
    if not is_mapped(array):
        return array
    path = Path(str(array.filename))
    recorded = recorded_sums(path.parent) if (path.parent / COLUMNS).exists() else {}
    return MappedFile(str(path), recorded.get(path.name), platform.node())


def open_file(path: Path) -> np.ndarray:
    """Returns the array in the file ``path``, mapped into memory. The file must be listed in ``columns.json`` in its
    folder (:func:`describe_folder`).

    Raises :class:`UserError` if the folder does not list the file, or if the file has changed since it was written.
    """
    sums = recorded_sums(path.parent)
    if path.name not in sums:
        raise UserError(f"{path.parent} lacks {path.name}: {AGAIN}")
    return MappedFile(str(path), sums[path.name], platform.node()).open()


def received(shipped: Any) -> Any:
    """Returns the array for ``shipped``, which another process has made by :func:`shipped`. If it is a
    :class:`MappedFile`, the file is opened on this machine."""
    return shipped.open() if isinstance(shipped, MappedFile) else shipped


def file_names(name: str, tree: Any) -> list[str]:
    """Returns the names of the files that hold the inputs or targets ``tree`` (arrays), one name for each array.

    ``name`` is what ``tree`` is called, such as ``x``. The files are ``x.npy`` for a single array, and ``x-0.npy``,
    ``x-1.npy``, ... for a tuple or dict of arrays.
    """
    count = len(leaves(form_of(tree)))
    return [f"{name}.npy"] if count == 1 else [f"{name}-{place}.npy" for place in range(count)]


def open_folder(arrays: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Maps the arrays in the files of ``folder`` into memory, and returns them under the names in ``arrays``.

    ``arrays`` maps each name, such as ``x``, to what was written to the files: an array, a tuple or dict of arrays, or
    a ``LazyItems``, which reads items one by one. The result maps it to a mapped array, or to a tuple or dict of mapped
    arrays. Raises :class:`UserError` if
    the folder was written by another version of fedray, or has changed since it was written.
    """
    mapped = {}
    for name, tree in arrays.items():
        files = iter(file_names(name, tree))
        mapped[name] = map_leaves(lambda _, files=files: open_file(folder / next(files)), form_of(tree))
    return mapped


def describe_folder(folder: Path, names: list[str]) -> None:
    """Writes ``columns.json``, which marks a folder of mapped arrays as complete.

    It lists the sha256 of each of the files ``names`` in ``folder``, and the version of the folder's layout.
    """
    sums = {name: _sha256(folder / name) for name in names}
    write_whole(folder / COLUMNS, json.dumps({"format": FORMAT, "sha256": sums}, indent=1))


def recorded_sums(folder: Path) -> dict[str, str]:
    """Returns the sha256 of each file in a folder of mapped arrays, a dict by file name, as they were when the files
    were written.

    Raises :class:`UserError` if ``columns.json``, which lists them, is damaged or from another version of fedray.
    """
    try:
        found = json.loads((folder / COLUMNS).read_text())
        if found["format"] == FORMAT:
            return dict(found["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is damaged ({error}): {AGAIN}") from None
    raise UserError(f"{folder} was made by another version of fedray: {AGAIN}")


def _sha256(path: Path) -> str:
    """Returns the sha256 of a file. This machine's cache keeps the digest until the file changes."""
    # the path is left out, because it changes when a finished folder is renamed
    known = ["mapped", platform.node(), *file_stamp(path)[1:]]
    return remembered(known, lambda: {"sha256": sha256_of_file(path)})["sha256"]
