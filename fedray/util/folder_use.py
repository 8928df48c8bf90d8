"""Marks folders for temporary files as in use, so that they are not removed while a process still needs them."""

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
    """Marks the folder ``path``, which is for temporary files, as in use by this process. Several processes may use the
    folder; each has an instance of this class.

    Each of these processes holds a shared lock on the folder, which the operating system releases when the process
    ends, even if it is killed. So a folder that nobody has locked is no longer needed, and may be removed. systemd
    respects these locks too when it removes old files from ``/tmp``. ``owner`` is a text that is written into the
    folder, to tell people who find it whom it belongs to.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        self.path, self.owner = path, owner
        self._descriptor: int | None = None
        self._mutex = threading.Lock()

    def begin(self) -> None:
        """Creates the folder if it does not exist, readable by this user alone, and locks it until :meth:`remove` is
        called or this process ends. Raises OSError if the folder can't be created."""
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
        """Ends the use of the folder, and removes it with everything in it. Before that, it waits up to ``patience``
        seconds until no other process uses the folder.

        If another process still uses it after that time, or if this can't be known, the folder is removed only if
        ``anyway`` is true. Returns whether the folder is gone.
        """
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
    """Returns whether a process has marked ``folder`` as in use by :class:`FolderUse`. Returns None if this can't be
    known, because the file system has no locks or the folder can't be opened, such as one of another user."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        return _used(descriptor)
    finally:
        os.close(descriptor)


def owner_of(folder: Path) -> str:
    """Returns the text that :class:`FolderUse` has written into ``folder`` to say whom it belongs to, or an empty text
    if there is none."""
    try:
        return (folder / OWNER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _used(descriptor: int) -> bool | None:
    """Returns whether another process has locked the open folder ``descriptor``, or None if that can't be known. If no
    other process has, this process now holds an exclusive lock until ``descriptor`` is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
