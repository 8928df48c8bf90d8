"""Makes sure that only one run at a time writes a remote folder.

Whoever writes keeps a small file there, and changes it every few seconds. Another one that wants to write watches the
file: if it changes, its writer lives. So no clocks are compared.
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
    """Raised if another run has begun to write the remote folder of this one."""


class Owner:
    """The right of this process to write the remote folder ``storage``, from :meth:`claim` to :meth:`release`."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.token, self._beats = storage, uuid.uuid4().hex, 0
        self._lock, self._released = threading.Lock(), False

    def claim(self, say: Callable[[str], None]) -> None:
        """Takes the folder. If another process has it, ``say`` shows a line, and :class:`UserError` is raised if that
        process still writes after :data:`PATIENCE` seconds."""
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
        """Shows others that this process lives. Returns whether its file was still there; raises :class:`Taken` if it
        is another's."""
        with self._lock:
            if self._released:
                return True
            found = self.storage.read_object(NAME)
            if found is not None and found.get("token") != self.token:
                raise Taken(f"{self.storage.shown} is now written by another run ({_name(found)}): this one ends")
            self._write()
            return found is not None

    def release(self) -> None:
        """Gives the folder up."""
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
    """Returns whether the process that wrote ``found`` was one of this machine and has ended."""
    is_of_here = found.get("node") == platform.node() and found.get("kernel") == _kernel()
    return is_of_here and _start_of(found["number"]) != found.get("start")


def _kernel() -> list[str]:
    """Returns what tells the numbers of processes here from those elsewhere: the boot of the machine, and the
    namespace, as containers have their own."""
    return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]


def _start_of(process: int) -> str | None:
    """Returns when a process of this machine was started, in the system's units, or None if there is no such
    process."""
    try:
        # the second field, the name, may have blanks, and ends with the last bracket
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
