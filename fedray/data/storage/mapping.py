"""Writes the samples of a data set into files that are mapped into memory, once on each machine.

A folder of such files is complete whenever it exists, because it is written under another name and then renamed. If the
writing is interrupted, the next call continues where it stopped: a journal lists what is already on the disk.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from fedray.core.structure import leaves
from fedray.data.storage.lazy import LazyItems
from fedray.data.storage.mapped import AGAIN, COLUMNS, describe_folder, file_names, open_folder
from fedray.errors import UserError
from fedray.util.cache import cache_folder
from fedray.util.files import move_whole, sync, write_whole

CHUNK_BYTES = 4 << 20
"""The approximate size of a chunk in bytes. The journal records a chunk when all of its items are on the disk."""

RESERVE = 64 << 20
"""The number of bytes that are left free on the disk to which mapped arrays are written."""


_one_at_a_time = threading.Lock()
"""Held while items are read from a data set that several threads can't read at the same time."""


@dataclass(frozen=True)
class Filling:
    """Fills files with the inputs of a Dataset's items, in chunks that can be copied in any order and in parallel. The
    files already have their final size.

    ``items`` reads the inputs. ``files`` has the path of one file if an input is an array, or of one file for each
    array of a tuple or dict. ``starts`` has, for each file, the number of bytes before the first item. A chunk has
    ``size`` items; the last one may have fewer.
    """

    items: LazyItems
    files: tuple[str, ...]
    starts: tuple[int, ...]
    size: int

    @property
    def chunks(self) -> range:
        return range(-(-len(self.items) // self.size))

    def load(self, chunk: int) -> list[np.ndarray]:
        """Reads the items of the chunk with the number ``chunk``. Returns an array ``[items, ...]`` for each file."""
        first = chunk * self.size
        with contextlib.nullcontext() if self.items.parallel else _one_at_a_time:
            rows = [leaves(self.items.read(i)) for i in range(first, min(len(self.items), first + self.size))]
        return [np.concatenate(parts) for parts in zip(*rows, strict=True)]

    def write(self, chunk: int, blocks: Sequence[np.ndarray]) -> int:
        """Writes the items of a chunk to their places in the files, and waits until they are on the disk.

        ``blocks`` are the arrays that :meth:`load` returned for ``chunk``. Returns the number of items that
        were written.
        """
        for file, start, block in zip(self.files, self.starts, blocks, strict=True):
            with open(file, "r+b") as opened:
                opened.seek(start + chunk * self.size * (block.nbytes // len(block)))
                opened.write(np.ascontiguousarray(block).data)
                opened.flush()
                os.fsync(opened.fileno())
        return len(blocks[0])


Reader = Callable[[Filling, int], list[np.ndarray]]
"""A function that does ``filling.load(chunk)``, in this process or elsewhere."""

Progress = Callable[[int, int], None]
"""A function ``progress(done, total)`` that is called with the numbers of items that are read so far, and in total."""


def readers_here() -> list[Reader]:
    """Returns functions that read items of a Dataset in this process, one function for each processor of this machine.
    They are called in parallel. ``reader(filling, chunk)`` returns what ``filling.load(chunk)`` of a :class:`Filling`
    does: the arrays of the chunk with the number ``chunk``."""
    return [Filling.load] * (os.cpu_count() or 1)


def silent(done: int, total: int) -> None:
    """Shows no progress. It is the default of the argument ``progress`` of :func:`map_arrays`."""


def folder_of(key: str) -> Path:
    """Returns the folder in the user's cache for the mapped arrays whose content has the digest ``key``."""
    return cache_folder() / "mapped" / key


def map_arrays(
    arrays: Mapping[str, Any],
    folder: Path,
    progress: Progress = silent,
    readers: Callable[[Path], Sequence[Reader]] = lambda folder: readers_here(),
) -> dict[str, Any]:
    """Writes samples into the files of ``folder``, if they are not there yet, and returns them mapped into memory.

    The result has the names and structures of ``arrays``. Items that were read before an error are kept, and the next
    call continues from there.

    Args:
        arrays: maps each name, such as ``x``, to an array, a tuple or dict of arrays, or a :class:`LazyItems`, whose
            items are read one by one.
        folder: the folder, whose name depends on the content of the arrays (:func:`folder_of`).
        progress: ``progress(done, total)`` is called during the writing, whenever some items have been read one by one:
            ``done`` of ``total`` so far.
        readers: ``readers(path)`` returns functions like those of :func:`readers_here`, which read items in parallel;
            ``path`` is the folder in which the files are while they are written.

    Raises:
        UserError: the disk is too small, an item can't be read, or another version of fedray has written the folder.
    """
    if not (folder / COLUMNS).exists():
        try:
            _write(arrays, folder, progress, readers)
        except OSError as error:
            raise UserError(f"data.access=mapped: can't write to {folder.parent}: {error.strerror or error}") from None
    return open_folder(arrays, folder)


def _write(
    arrays: Mapping[str, Any], folder: Path, progress: Progress, readers: Callable[[Path], Sequence[Reader]]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f"{folder.name}.partial")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if (folder / COLUMNS).exists():  # another process has written it meanwhile
            return
        if folder.exists():
            raise UserError(f"{folder} lacks {COLUMNS}: {AGAIN}")
        _check_space(arrays, staging)
        staging.mkdir(exist_ok=True)
        lazy = {name: tree for name, tree in arrays.items() if isinstance(tree, LazyItems)}
        for name in arrays.keys() - lazy.keys():
            for file, leaf in zip(file_names(name, arrays[name]), leaves(arrays[name]), strict=True):
                np.save(staging / file, leaf, allow_pickle=False)
        if lazy:
            _fill_all(lazy, staging, progress, readers(staging))
        names = [file for name, tree in arrays.items() for file in file_names(name, tree)]
        for file in names:
            sync(staging / file)
        for journal in staging.glob("*.done"):
            journal.unlink()
        describe_folder(staging, names)
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


def _fill_all(lazy: Mapping[str, LazyItems], staging: Path, progress: Progress, readers: Sequence[Reader]) -> None:
    """Copies all items of some Datasets, ``lazy``, into files in ``staging``, with ``readers`` in parallel."""
    total, done = sum(map(len, lazy.values())), 0
    for name, items in lazy.items():
        files = [staging / file for file in file_names(name, items)]
        journal = staging / f"{name}.done"
        filling, read = _begun(items, files, journal)
        done += sum(min(filling.size, len(items) - chunk * filling.size) for chunk in read)
        progress(done, total)
        with journal.open("a") as log:
            for chunk, count in _read_by(readers, filling, [chunk for chunk in filling.chunks if chunk not in read]):
                log.write(f"{chunk}\n")
                log.flush()
                done += count
                progress(done, total)


def _begun(items: LazyItems, files: Sequence[Path], journal: Path) -> tuple[Filling, set[int]]:
    """Prepares ``files`` for the items. Returns the :class:`Filling` that copies the items into them, and the numbers
    of the chunks that are already in the files.

    ``journal`` lists these chunks, below a line with the size of a chunk and the number of items. If there is no
    journal, or this line differs, the files are made again.
    """
    size = max(1, CHUNK_BYTES // items.bytes_each)
    heading = f"{size} {len(items)}"
    # a last line without a line break was not written completely
    lines = journal.read_text().split("\n")[:-1] if journal.exists() else []
    if lines[:1] != [heading]:
        lines = [heading]
        for file, form in zip(files, leaves(items.first), strict=True):
            shape = (len(items), *form.shape[1:])
            np.lib.format.open_memmap(file, mode="w+", dtype=form.dtype, shape=shape).flush()
            with file.open("r+b") as opened:
                # if the disk is too small, this fails now rather than in the middle
                os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    write_whole(journal, "".join(f"{line}\n" for line in lines))
    starts = [np.load(file, mmap_mode="r").offset for file in files]
    return Filling(items, tuple(map(str, files)), tuple(starts), size), {int(line) for line in lines[1:]}


def _read_by(readers: Sequence[Reader], filling: Filling, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Reads and writes chunks with ``readers`` in parallel. Yields each chunk's number with its number of items.

    Stops at the first error.
    """
    free: queue.SimpleQueue[Reader] = queue.SimpleQueue()
    for reader in readers:
        free.put(reader)

    def read(chunk: int) -> tuple[int, int]:
        reader = free.get()
        try:
            return chunk, filling.write(chunk, reader(filling, chunk))
        finally:
            free.put(reader)

    with ThreadPoolExecutor(len(readers)) as threads:
        reading = [threads.submit(read, chunk) for chunk in chunks]
        try:
            for each in as_completed(reading):
                yield each.result()
        finally:
            threads.shutdown(cancel_futures=True)
