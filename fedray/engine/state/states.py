"""Keeps client states (what clients keep from one participation to the next) in files, one for each client.

The operating system caches the files in memory as long as there is room. If a process dies, no state is lost. A
checkpoint does not copy the files, but makes hard links to them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import Tensor

from fedray.config import Config
from fedray.errors import StateLost, UserError
from fedray.util.folder_use import FolderUse, owner_of

FOLDER_PREFIX = "fedray-"
"""The beginning of the names of folders with clients' states that are not in a run folder; a digest follows."""

OF_SERVER = ".states"
"""The name of the folder with clients' states within a run folder, on the server's node."""

ENDING_SECONDS = 5.0
"""How many seconds to wait at the end of a run until its processes are gone, before the folder is removed. One that was
still writing would make it anew."""

State = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class StateFile:
    """A client's state after one round, in the safetensors file ``path`` on one machine. ``node`` is Ray's id of the
    machine, and empty without Ray. The content of the file never changes."""

    node: str
    path: str

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return os.path.basename(self.path)


class StateFolder:
    """The folder ``path`` in which the processes on one machine keep the files with clients' states of one run. It is
    created when it is first needed.

    ``node`` is Ray's id of the machine, and empty without Ray. ``run`` is the path of the run folder. It is written
    into a file in the folder, so that people who find the folder know which run it belongs to. ``run`` is empty if
    ``path`` is inside the run folder.
    """

    def __init__(self, path: Path, node: str = "", run: str = "") -> None:
        self.path, self.node = path, node
        self._use = FolderUse(path, run)

    @classmethod
    def of_run(cls, config: Config, node: str = "", server: str = "") -> StateFolder:
        """Returns the folder for clients' states of the run with this ``config`` on this machine. ``node`` is Ray's id
        of this machine, and ``server`` Ray's id of the machine on which the server runs; without Ray both are empty.

        The folder is below ``engine.spill_dir`` if that is set. Otherwise it is in the run folder on the server's
        machine, and in the folder for temporary files on other machines.
        """
        run = config.run.place.absolute() / str(config.run.name)
        own = FOLDER_PREFIX + hashlib.sha256(f"{platform.node()} {os.getuid()} {run}".encode()).hexdigest()[:16]
        if config.engine.spill_dir:
            return cls(Path(config.engine.spill_dir).absolute() / own, node, str(run))
        if node == server:
            return cls(run / OF_SERVER, node)
        return cls(Path(tempfile.gettempdir()) / own, node, str(run))

    def write(self, name: str, state: State) -> StateFile:
        """Writes the arrays of ``state`` to the file ``name`` in this folder, and returns the file, which is never
        visible in an incomplete form. Raises :class:`UserError` if the file can't be written."""
        # Unlike other files (fedray/util/files.py) it is not flushed to the disk, because an fsync for each of many
        # small files takes far longer than writing them. After a crash only states that a checkpoint names are read,
        # and a checkpoint flushes all of them at once.
        target, staging = self.path / name, self.path / f".{name}.{os.getpid()}"
        try:
            self._use.begin()
            save_file({key: np.ascontiguousarray(value) for key, value in state.items()}, staging)
            staging.rename(target)
        except Exception as error:  # safetensors has errors of its own
            with contextlib.suppress(OSError):
                staging.unlink(missing_ok=True)
            size = sum(value.nbytes for value in state.values()) / 1e6
            raise UserError(
                f"the state {name} ({size:.3g} MB) can't be written to {self.path} on {platform.node()}: "
                f"{_reason(error)}; "
                "engine.spill_dir names another place"
            ) from None
        return self.file(name)

    def file(self, name: str) -> StateFile:
        """Returns the file ``name`` of this folder as a :class:`StateFile`, whether it already exists or not."""
        return StateFile(self.node, str(self.path / name))

    def read(self, file: StateFile) -> dict[str, NDArray[np.float32]]:
        """Returns the float32 arrays in ``file`` by name, in fresh memory. Raises :class:`StateLost` if it is gone."""
        try:
            return load_file(file.path)
        except OSError as error:
            raise StateLost(f"a client's state is gone: {file.path} ({_reason(error)})") from None

    def read_into(self, file: StateFile, memory: Tensor) -> dict[str, Tensor]:
        """Reads ``file`` into ``memory``, a uint8 tensor that has the size of the file, and returns the arrays by name,
        as float32 views into ``memory``.

        This takes a fifth of the time of :meth:`read`, which has to wait for fresh memory page by page. Raises
        :class:`StateLost` if the file is gone.
        """
        whole, place = memory.numpy().data, 0
        try:
            with open(file.path, "rb", buffering=0) as source:
                while place < len(whole) and (count := source.readinto(whole[place:])):
                    place += count
        except OSError as error:
            raise StateLost(f"a client's state is gone: {file.path} ({_reason(error)})") from None
        # the format of safetensors: the length of a header in JSON, the header, and the numbers
        start = 8 + int.from_bytes(whole[:8], "little")
        found = {}
        for name, entry in json.loads(bytes(whole[8:start])).items():
            assert entry["dtype"] == "F32"
            begin, end = entry["data_offsets"]
            found[name] = memory[start + begin : start + end].view(torch.float32).view(entry["shape"])
        return found

    def store(self, file: StateFile, target: Path) -> None:
        """Makes ``target`` a hard link to ``file``, for a checkpoint, or a copy if they are on different disks. Raises
        :class:`StateLost` if the file is gone."""
        try:
            os.link(file.path, target)
        except FileNotFoundError as error:
            raise StateLost(f"a client's state is gone: {file.path} ({_reason(error)})") from None
        except OSError:
            shutil.copyfile(file.path, target)

    def adopt(self, source: Path) -> StateFile:
        """Returns a new state file in this folder, made from ``source``, the file of a client's state in a checkpoint.
        The new file has the same name. It is a hard link to ``source``, or a copy if they are on different disks."""
        self._use.begin()
        file = StateFile(self.node, str(self.path / source.name))
        Path(file.path).unlink(missing_ok=True)
        self.store(StateFile(self.node, str(source)), Path(file.path))
        return file

    def drop(self, files: Iterable[StateFile]) -> None:
        """Removes ``files``, states that are no longer needed, from the disk."""
        for file in files:
            Path(file.path).unlink(missing_ok=True)

    def hold(self) -> None:
        """Makes the folder, and keeps other runs from removing it for as long as this process lives. Every process that
        writes files here does this first."""
        self._use.begin()

    def clear(self, patience: float = 0.0) -> None:
        """Removes the folder with everything in it. Before that, it waits up to ``patience`` seconds for other
        processes that use the folder to end. After this time the folder is removed even if they still use it."""
        self._use.remove(patience, anyway=True)

    def clear_others(self) -> None:
        """Removes the folders beside this one in which other runs have left clients' states, for example on a node that
        was lost. Nobody can use these states any more, because a run that goes on takes them from its checkpoint."""
        for path in self.path.parent.glob(f"{FOLDER_PREFIX}{'[0-9a-f]' * 16}"):
            if path != self.path and owner_of(path):
                FolderUse(path).remove(patience=0)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    full = os.strerror(errno.ENOSPC)
    return full if full in str(error) else str(error)
