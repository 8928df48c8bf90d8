"""What clients keep from one participation to the next: a file each, outside of every process.

The system keeps the files in memory while there is room for them, and they are on disk when there is none. A process
that dies takes none along, and a checkpoint is another name for the same file, not a copy of it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from fedray.config import Config
from fedray.errors import StateLost, UserError

State = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class StateFile:
    """A client's state as it was after one round: a safetensors file on node ``node`` that nobody ever changes."""

    node: str
    path: str

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


class StateFolder:
    """Where the processes of node ``node`` keep states. It is theirs alone, and made when it is first needed."""

    def __init__(self, path: Path, node: str = "") -> None:
        self.path, self.node = path, node

    @classmethod
    def of_run(cls, config: Config, node: str = "", server: str = "") -> StateFolder:
        """Below ``engine.spill_dir``; else in the run folder on the server's node, in a temporary one elsewhere."""
        run = Path(config.run.output).absolute() / str(config.run.name)
        own = "fedray-" + hashlib.sha256(f"{platform.node()} {os.getuid()} {run}".encode()).hexdigest()[:16]
        if config.engine.spill_dir:
            return cls(Path(config.engine.spill_dir).absolute() / own, node)
        return cls(run / ".states" if node == server else Path(tempfile.gettempdir()) / own, node)

    def write(self, name: str, state: State) -> StateFile:
        """Keep ``state`` as ``name``, whole or not at all."""
        # Unlike other files (fedray/files.py) it is not flushed to the disk, because an fsync for each of many small
        # files takes far longer than writing them. After a crash only states that a checkpoint names are read, and a
        # checkpoint flushes all of them at once.
        target, staging = self.path / name, self.path / f".{name}.{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            save_file({key: np.ascontiguousarray(value) for key, value in state.items()}, staging)
            staging.rename(target)
        except Exception as error:  # safetensors has errors of its own
            with contextlib.suppress(OSError):
                staging.unlink(missing_ok=True)
            size = sum(value.nbytes for value in state.values()) / 1e6
            raise UserError(
                f"the state {name} ({size:.3g} MB) can't be written to {self.path}: {_reason(error)}; "
                "engine.spill_dir names another place"
            ) from None
        return StateFile(self.node, str(target))

    def read(self, file: StateFile) -> dict[str, NDArray[np.float32]]:
        """The arrays in ``file``, in fresh memory; :class:`StateLost` if it is not there any more."""
        try:
            return load_file(file.path)
        except OSError as error:
            raise StateLost(f"a client's state is gone: {file.path} ({_reason(error)})") from None

    def store(self, file: StateFile, target: Path) -> None:
        """Make ``target`` another name of ``file``, or a copy where the two are on different disks."""
        try:
            os.link(file.path, target)
        except FileNotFoundError as error:
            raise StateLost(f"a client's state is gone: {file.path} ({_reason(error)})") from None
        except OSError:
            shutil.copyfile(file.path, target)

    def adopt(self, source: Path) -> StateFile:
        """A file of ours with the content, and the name, of ``source``."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = StateFile(self.node, str(self.path / source.name))
        Path(file.path).unlink(missing_ok=True)
        self.store(StateFile(self.node, str(source)), Path(file.path))
        return file

    def drop(self, files: Iterable[StateFile]) -> None:
        """Forget files that nobody needs any more."""
        for file in files:
            Path(file.path).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    full = os.strerror(errno.ENOSPC)
    return full if full in str(error) else str(error)
