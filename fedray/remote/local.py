"""The folder on this machine whose files are mirrored: what is in it, and which remote state it had last."""

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
    """What shows whether a file has changed: its size, its time and its inode."""

    size: int
    time: int
    inode: int


def aside_of(folder: Path) -> Path:
    """Returns the folder beside ``folder`` that its mirror uses. It also marks ``folder`` as one that has a mirror of
    its own, so that the mirror of a folder above leaves it out."""
    return folder.with_name(f".{folder.name}.mirror")


def commits_of(folder: Path) -> list[str]:
    """Returns the names of the remote states of which ``folder`` has everything."""
    with contextlib.suppress(OSError):
        return (folder / COMMIT).read_text(encoding="utf-8").split()
    return [EMPTY]


def was_mirrored(folder: Path) -> bool:
    """Returns whether ``folder`` has had a remote state, or was to become one."""
    return (folder / COMMIT).exists()


def note_commits(folder: Path, *commits: str) -> None:
    write_whole(folder / COMMIT, " ".join(commits) + "\n")


def set_aside(folder: Path) -> Path:
    """Renames ``folder`` to a name such as NAME.bak-1, which is returned."""
    return folder.rename(free_name(folder))


def scan(folder: Path) -> dict[str, Stamp]:
    """Returns the files in ``folder`` and below it, by their names relative to it. Hidden ones, and folders that have a
    mirror of their own, as those of a sweep's trials, are left out."""
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
    """Makes ``frozen`` another name of the file ``path``, which stays when the file is removed or replaced, and returns
    its stamp. Where the disk knows no such names it is a copy. A file to which is appended grows under both names."""
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
