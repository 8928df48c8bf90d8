"""Makes sure that only one run at a time writes to a remote folder.

The process that writes keeps a small file there, the owner file, and changes it every few seconds. Another process that
wants to write watches this file for a while: if it changes, its writer is still running. So the clocks of two machines
are never compared.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedray.errors import UserError
from fedray.remote.manifest import FOLDER
from fedray.remote.storage import Storage

NAME = f"{FOLDER}/owner.json"

PATIENCE = 20.0
"""The seconds for which a file is watched. A writer must change it more often than this, even on a slow connection."""


class Taken(UserError):
    """Raised if another run has begun to write to the remote folder that belonged to this run."""


class Owner:
    """The right of this process to write to the remote folder ``storage``, which it has from :meth:`claim` to
    :meth:`release`."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.token, self._beats = storage, uuid.uuid4().hex, 0
        self._lock, self._released = threading.Lock(), False

    def claim(self, say: Callable[[str], None]) -> None:
        """Reserves the remote folder for this process. If another process has reserved it, waits up to :data:`PATIENCE`
        seconds for that one to end, and tells the user with ``say(line)``.

        Raises :class:`UserError` if the other process is still writing after this time. If nothing was heard of it,
        this process takes its place.
        """
        first = found = self.storage.read_object(NAME)
        if first is not None and not _has_died_here(first):
            say(f"{self.storage.shown} is in use by {_name(first)}; waiting up to {PATIENCE:g} s for it to end ...")
            end = time.monotonic() + PATIENCE
            while found is not None and time.monotonic() < end:
                time.sleep(1)
                found = self.storage.read_object(NAME)
            if found is not None and found != first:
                raise UserError(
                    f"{self.storage.shown} is being written by another run ({_name(found)}); choose another name"
                )
            if found is not None:
                say(f"{_name(found)} has not been heard of for {PATIENCE:g} s: going on in its place")
        self._write()

    def keep(self) -> bool:
        """Changes the owner file, which shows other processes that this one still runs. Must be called every few
        seconds.

        Returns whether the owner file was still there. Raises :class:`Taken` if another process has written it.
        """
        with self._lock:
            if self._released:
                return True
            found = self.storage.read_object(NAME)
            if found is not None and found.get("token") != self.token:
                raise Taken(f"{self.storage.shown} is now written by another run ({_name(found)}): this one ends")
            self._write()
            return found is not None

    def release(self) -> None:
        """Gives up the right to write to the remote folder: removes the owner file, which reserves the folder for this
        process, unless another process has taken it over."""
        with self._lock:
            self._released = True
            found = self.storage.read_object(NAME)
            if found is not None and found.get("token") == self.token:
                self.storage.delete(NAME)

    def _write(self) -> None:
        self._beats += 1
        number = os.getpid()
        process = {"node": platform.node(), "number": number, "start": _start_of(number), "kernel": _kernel()}
        record = {"token": self.token, "beat": self._beats, **process}
        self.storage.write(NAME, json.dumps(record).encode())


def _name(found: dict[str, Any]) -> str:
    return f"process {found.get('number', '?')} on {found.get('node', '?')}"


def _has_died_here(found: dict[str, Any]) -> bool:
    """Returns whether the content ``found`` of an owner file is of a process of this machine that has ended."""
    is_of_here = found.get("node") == platform.node() and found.get("kernel") == _kernel()
    return is_of_here and _start_of(found["number"]) != found.get("start")


def _kernel() -> list[str]:
    """Returns the ids of this machine's boot and of the process namespace (each container has its own). The numbers of
    two processes can only be compared if both ids are equal."""
    return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]


def _start_of(process: int) -> str | None:
    """Returns when a process of this machine was started, in the system's units, or None if there is no such
    process."""
    try:
        # the second field, the name, may have blanks, and ends with the last bracket
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
