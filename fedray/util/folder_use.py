"""Marks folders for temporary files as in use, so that nobody removes them too early, and everybody may afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from pathlib import Path

OWNER = ".run"
"""The file of such a folder that names whom it belongs to."""


class FolderUse:
    """The use of a folder for temporary files by this process and others, each with an instance of its own.

    Who uses the folder shares a lock on it, which the system gives up when the process ends, however it ends. So a
    folder that nobody has locked is one that its users have left behind. systemd, where it cleans ``/tmp`` of old
    files, respects these locks too. ``owner`` is written into the folder, for people who find it.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        self.path, self.owner = path, owner
        self._descriptor: int | None = None
        self._mutex = threading.Lock()

    def begin(self) -> None:
        """Makes the folder if it does not exist, readable by this user alone, and locks it for as long as this process
        lives. Raises OSError if it can't be made."""
        with self._mutex:
            while not self._is_current():
                self._end()
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                # it may be removed between these lines, by who found it without a lock
                with contextlib.suppress(FileNotFoundError):
                    self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                    # without locks on this file system, nobody else can tell that the folder is in use
                    with contextlib.suppress(OSError):
                        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
                    if self.owner:
                        (self.path / OWNER).write_text(f"{self.owner}\n", encoding="utf-8")

    def remove(self, patience: float, anyway: bool = False) -> bool:
        """Removes the folder with everything in it, after waiting up to ``patience`` seconds until no other process
        uses it. If one still does then, or it can't be known, the folder is removed only if ``anyway`` is true. Returns
        whether the folder is gone."""
        with self._mutex:
            if not self._is_current():
                self._end()
                with contextlib.suppress(OSError):
                    self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            if self._descriptor is not None and (self._alone(patience) or anyway):
                shutil.rmtree(self.path, ignore_errors=True)
            self._end()
        return not self.path.exists()

    def _alone(self, patience: float) -> bool:
        assert self._descriptor is not None
        deadline = time.monotonic() + patience
        while (used := _used(self._descriptor)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return used is False and self._is_current()

    def _is_current(self) -> bool:
        """Returns whether the folder that this instance has opened is still the one at its path."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def _end(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def in_use(folder: Path) -> bool | None:
    """Returns whether a process has marked ``folder`` as in use, or None if that can't be known: on a file system
    without locks, or in a folder of another user."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        return _used(descriptor)
    finally:
        os.close(descriptor)


def owner_of(folder: Path) -> str:
    """Returns whom ``folder`` belongs to, as :class:`FolderUse` has written it, or an empty text."""
    try:
        return (folder / OWNER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _used(descriptor: int) -> bool | None:
    """Returns whether another process has locked the open folder, or None if that can't be known. If none has, this one
    has it alone until ``descriptor`` is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
