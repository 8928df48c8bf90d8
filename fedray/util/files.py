"""Writes files so that a reader always sees either the complete old or the complete new content, even after a power
failure."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from fedray.errors import UserError


def in_home(path: str | Path) -> Path:
    """Returns a path that the user wrote, with a ``~`` at its beginning replaced by the user's home folder.

    Raises :class:`UserError` if there is no home folder, as for a user who is not in the system's list of users.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path}: there is no home folder here, as $HOME is not set: give the whole path") from None


FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
"""The operating system's messages when a disk is full, a quota is exceeded, or a file is too large."""


@contextlib.contextmanager
def room_for(path: Path) -> Iterator[None]:
    """A context in which ``path`` is written. If the disk is full, the error becomes a :class:`UserError` that names
    ``path``; other errors stay as they are."""
    try:
        yield
    except Exception as error:  # libraries have errors of their own
        reason = next((each for each in FULL if each in str(error)), None)
        if reason is None or isinstance(error, UserError):
            raise
        raise UserError(f"can't write {path}: {reason}; make room, and give the same command again") from None


@contextlib.contextmanager
def replacement_of(path: Path) -> Iterator[Path]:
    """A context for writing the file ``path`` so that it is never incomplete. It yields a temporary path beside
    ``path``, to which the new content must be written. At the end this file replaces ``path`` in one step.

    If there is an error, ``path`` is not changed, and the unfinished file is removed.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with room_for(path):
            yield staging
            move_whole(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes ``text`` to ``path`` in UTF-8, replacing the old file in one step (:func:`replacement_of`)."""
    with replacement_of(path) as staging:
        staging.write_text(text, encoding="utf-8")


def is_there(name: str) -> bool:
    """Returns whether a word of the user's is the path of a file or folder. One that is too long is none. Raises
    PermissionError if the user may not look."""
    try:
        os.stat(name)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return False
    return True


def sha256_of_file(path: Path) -> str:
    """Returns the sha256 of a file's content, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def free_name(path: Path) -> Path:
    """Returns a path to which ``path`` can be renamed, to keep it as a backup: the first of NAME.bak-1, NAME.bak-2, ...
    in the same folder that does not exist yet."""
    names = (path.with_name(f"{path.name}.bak-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def move_whole(source: Path, target: Path) -> None:
    """Renames the finished file or folder ``source`` to ``target`` on the same disk. The content of ``source`` is
    written to the disk first, so that ``target`` is complete even after a power failure."""
    sync(source)
    source.replace(target)
    # a rename changes the folder, whose new list of names must reach the disk, too
    sync(target.parent)


def sync(path: Path) -> None:
    """Waits until the content of the file ``path``, or the list of names in the folder ``path``, has reached the
    disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
