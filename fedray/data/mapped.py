"""Arrays in files that are mapped into memory: written once on a machine, and read by all its processes without a copy.

A folder of such files is whole or not there at all: it is written elsewhere and then renamed. ``columns.json`` in it
names the version of the layout.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from fedray.core.structure import leaves, map_leaves
from fedray.data.features import form_of
from fedray.data.find import cache_folder
from fedray.data.lazy import LazyItems
from fedray.errors import UserError
from fedray.files import move_whole, sync, write_whole

FORMAT = 1
"""The layout of a folder of mapped arrays. A folder of another one is not read."""

COLUMNS = "columns.json"

CHUNK_BYTES = 4 << 20
"""The bytes of items that are read before it is noted that they are on the disk."""

RESERVE = 64 << 20
"""The bytes that stay free on a disk on which mapped arrays are written."""


@dataclass(frozen=True)
class MappedFile:
    """The file of a mapped array. It is what other processes are sent in place of the array."""

    path: str

    def open(self) -> np.ndarray:
        """Returns the array, which is read from the file where it is used.

        Raises :class:`UserError` if the file is not on this machine, or is cut short.
        """
        try:
            return np.load(self.path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise UserError(
                f"{self.path} is not on {platform.node()}: with data.access=mapped every machine needs the same files "
                "at the same path; copy the folder there, or set $XDG_CACHE_HOME to a folder that all of them share"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path} is damaged ({error}): remove its folder, and it is made again") from None


def is_mapped(array: Any) -> bool:
    """Returns whether ``array`` is all of a file of mapped arrays."""
    if not isinstance(array, np.memmap) or array.filename is None:
        return False
    return array.offset + array.nbytes == os.path.getsize(array.filename)


def shipped(array: Any) -> Any:
    """Returns what another process is sent for ``array``: the file of a mapped one, and any other itself."""
    return MappedFile(str(array.filename)) if is_mapped(array) else array


def received(shipped: Any) -> Any:
    """Returns the array for what :func:`shipped` made of it."""
    return shipped.open() if isinstance(shipped, MappedFile) else shipped


def map_arrays(arrays: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Returns ``arrays``, by name, as mapped arrays. The values may be tuples and dicts of arrays, or lazy items.

    They are in the cache under ``key``, a digest of their content, and are written only if they are not there yet.

    Raises :class:`UserError` if the disk is too small, an item can't be read, or what is in the cache is of another
    version of fedray. What was read until then is kept, so that the next call goes on.
    """
    folder = cache_folder() / "mapped" / key
    if not (folder / COLUMNS).exists():
        try:
            _write(arrays, folder)
        except OSError as error:
            raise UserError(f"data.access=mapped: can't write to {folder.parent}: {error.strerror or error}") from None
    return _read(arrays, folder)


def _names(name: str, tree: Any) -> list[str]:
    count = len(leaves(form_of(tree)))
    return [f"{name}.npy"] if count == 1 else [f"{name}-{place}.npy" for place in range(count)]


def _write(arrays: Mapping[str, Any], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f"{folder.name}.partial")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if (folder / COLUMNS).exists():  # another process has written it meanwhile
            return
        _check_space(arrays, staging)
        staging.mkdir(exist_ok=True)
        for name, tree in arrays.items():
            files = [staging / file for file in _names(name, tree)]
            if isinstance(tree, LazyItems):
                _fill(tree, files, staging / f"{name}.done")
            else:
                for file, leaf in zip(files, leaves(tree), strict=True):
                    np.save(file, leaf, allow_pickle=False)
            for file in files:
                sync(file)
        for journal in staging.glob("*.done"):
            journal.unlink()
        write_whole(staging / COLUMNS, json.dumps({"format": FORMAT}))
        move_whole(staging, folder)


def _check_space(arrays: Mapping[str, Any], staging: Path) -> None:
    needed = sum(
        tree.bytes_each * len(tree) if isinstance(tree, LazyItems) else sum(leaf.nbytes for leaf in leaves(tree))
        for tree in arrays.values()
    )
    there = sum(path.stat().st_blocks * 512 for path in staging.glob("*")) if staging.exists() else 0
    free = shutil.disk_usage(staging.parent).free + there
    if needed + RESERVE > free:
        raise UserError(
            f"data.access=mapped needs {needed / 1e9:.3g} GB in {staging.parent}, where {free / 1e9:.3g} GB are free; "
            "$XDG_CACHE_HOME may name a folder on another disk"
        )


def _fill(items: LazyItems, files: Sequence[Path], journal: Path) -> None:
    """Reads all items once, with a thread for each processor, into ``files`` (one for each part of an input).

    ``journal`` lists the parts of the data set that are on the disk, so that a process that was killed goes on there.
    """
    forms, count = leaves(items.first), len(items)
    shapes = [(count, *form.shape[1:]) for form in forms]
    size = max(1, CHUNK_BYTES // items.bytes_each)
    chunks = range(-(-count // size))
    if not journal.exists():
        for file, form, shape in zip(files, forms, shapes, strict=True):
            np.lib.format.open_memmap(file, mode="w+", dtype=form.dtype, shape=shape).flush()
    columns = [np.lib.format.open_memmap(file, mode="r+") for file in files]
    done = {int(line) for line in journal.read_text().split()} if journal.exists() else set()

    def read(chunk: int) -> int:
        for i in range(chunk * size, min(count, (chunk + 1) * size)):
            for column, leaf in zip(columns, leaves(items.read(i)), strict=True):
                column[i] = leaf[0]
        for column in columns:
            column.flush()
        return chunk

    with journal.open("a") as log, ThreadPoolExecutor(os.cpu_count()) as threads:
        waiting = [threads.submit(read, chunk) for chunk in chunks if chunk not in done]
        try:
            for future in as_completed(waiting):
                log.write(f"{future.result()}\n")
                log.flush()
        finally:
            threads.shutdown(cancel_futures=True)


def _read(arrays: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / COLUMNS).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is damaged ({error}): remove it, and it is made again") from None
    if found.get("format") != FORMAT:
        raise UserError(f"{folder} was made by another version of fedray: remove it, and it is made again")
    mapped = {}
    for name, tree in arrays.items():
        files = iter(_names(name, tree))
        mapped[name] = map_leaves(lambda _, files=files: MappedFile(str(folder / next(files))).open(), form_of(tree))
    return mapped
