"""Looks at a folder on this machine that is kept equal to a URI: which files are in it, and which state of the remote
files it had last."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fedray.util.files import free_name, write_whole

COMMIT = ".commit"
"""The file in a folder with the name of the remote state that it had last, and before another one is made visible also
the name of that. It travels with the folder when that is renamed."""

EMPTY = "-"
"""The name of the remote state in which there is nothing yet."""

FIRST = "checkpoints"
"""The folder that is looked at before all else: a run continues from a checkpoint with tables that are newer, but not
with older ones."""


@dataclass(frozen=True)
class Stamp:
    """Facts that show whether a file has changed: its size in bytes, the time of its last change in nanoseconds, and
    its inode number."""

    size: int
    time: int
    inode: int


def aside_of(folder: Path) -> Path:
    """Returns the folder, beside ``folder``, for temporary files of the mirror of ``folder`` (the thread that copies it
    to a URI). While it exists, the mirror of a folder that contains ``folder`` leaves ``folder`` out, because
    ``folder`` is copied separately."""
    return folder.with_name(f".{folder.name}.mirror")


def commits_of(folder: Path) -> list[str]:
    """Returns the names of the states (versions of the files at a URI) with which ``folder`` agrees, unless its files
    have been changed since then.

    It is one name, or two while a new state is sent, because either of them may be the one that the URI shows. A folder
    that was only partly downloaded has a word that is the name of no state. If ``folder`` was never copied to or from a
    URI, the only name is :data:`EMPTY`.
    """
    with contextlib.suppress(OSError):
        return (folder / COMMIT).read_text(encoding="utf-8").split()
    return [EMPTY]


def was_mirrored(folder: Path) -> bool:
    """Returns whether ``folder`` was ever copied to a URI or downloaded from one, at least in part."""
    return (folder / COMMIT).exists()


def note_commits(folder: Path, *commits: str) -> None:
    write_whole(folder / COMMIT, " ".join(commits) + "\n")


def set_aside(folder: Path) -> Path:
    """Renames ``folder`` to a free name such as NAME.bak-1, and returns its new path."""
    return folder.rename(free_name(folder))


def scan(folder: Path) -> dict[str, Stamp]:
    """Finds the files in ``folder`` and below it. Returns a dict that maps each file's path relative to ``folder`` to
    its :class:`Stamp` (size, time and inode, which show later whether it has changed).

    Hidden files are left out, and so are folders that are copied to a URI separately, such as those of a sweep's
    trials.
    """
    while folder.is_dir():
        # what was listed and is gone, such as an old checkpoint, may have been replaced by what was not listed yet
        with contextlib.suppress(FileNotFoundError):
            return {path.relative_to(folder).as_posix(): stamp for path, stamp in _files(folder)}
    return {}


def _files(folder: Path) -> Iterator[tuple[Path, Stamp]]:
    entries = sorted(os.scandir(folder), key=lambda entry: (entry.name != FIRST, entry.is_file(), entry.name))
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            yield path, stamp_of(path)
        elif not (aside_of(path).exists() or (path / COMMIT).exists()):
            yield from _files(path)


def freeze(path: Path, frozen: Path) -> Stamp:
    """Makes a hard link ``frozen`` to the file ``path``, so that its content can still be read when ``path`` is removed
    or replaced. Returns the file's stamp (size, time and inode).

    If the disk can't make hard links, ``frozen`` is a copy. What is appended to ``path`` later also appears in a hard
    link.
    """
    before = stamp_of(path)
    try:
        os.link(path, frozen)
        return stamp_of(frozen)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, frozen)
        return replace(before, size=frozen.stat().st_size)


def stamp_of(path: Path) -> Stamp:
    found = path.stat()
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ino)
