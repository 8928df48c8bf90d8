"""Keeps a folder to one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from fedray.errors import UserError

PATIENCE = 20.0
"""Seconds to wait for whoever has the folder: the processes of a killed run may need a moment to end."""


@contextlib.contextmanager
def locked(folder: Path, busy: str, say: Callable[[str], None], patience: float = PATIENCE) -> Iterator[None]:
    """Hold ``folder``, which need not exist yet, against other processes.

    If another process has it, ``say`` is told so at once. Raises :class:`UserError`, with ``busy``, if that process has
    it for ``patience`` seconds more, and OSError if the folder can't be written to.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("a+") as file:
        if not _take(file):
            owner = _owner(file)
            say(f"{folder} is in use by {owner}; waiting up to {patience:g} s for it to end ...")
            deadline = time.monotonic() + patience
            while not _take(file):
                if time.monotonic() > deadline:
                    raise UserError(f"{folder} {busy} ({owner})")
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


def _take(file: TextIO) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(file: TextIO) -> str:
    """Who wrote its name into the lock's file when it took it."""
    file.seek(0)
    return file.read().strip() or "another process"
