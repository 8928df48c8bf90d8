"""Makes sure that only one process at a time uses a folder."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

from fedray.errors import UserError

PATIENCE = 20.0
"""How many seconds to wait for a lock, because the processes of a killed run may need a moment to end."""


@contextlib.contextmanager
def folder_lock(folder: Path, busy: str, say: Callable[[str], None], patience: float = PATIENCE) -> Iterator[None]:
    """Keeps other processes that use this function out of ``folder``, in a ``with`` statement. The folder need not
    exist yet.

    The lock ends with this process at the latest, even if it is killed. If another process holds the lock, ``say`` is
    called immediately with a line about that. Raises :class:`UserError` if that process still holds the lock after
    ``patience`` seconds; its message is the folder's path and the text ``busy``, such as "is in use". Raises OSError if
    the folder can't be written to.
    """
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f".{folder.name}.lock"
    # on a file system without locks filelock would use a file whose existence is the lock: a killed run leaves it
    # behind, and the next run would wait for a process that has ended
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        holder = path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
        say(f"{folder} is in use by {holder}; waiting up to {patience:g} s for it to end ...")
        try:
            lock.acquire(timeout=patience, poll_interval=0.1)
        except Timeout:
            raise UserError(f"{folder} {busy} ({holder})") from None
    try:
        # filelock does not say who holds a lock, so the holder's name is written into the lock's file
        path.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
        yield
    finally:
        lock.release()
