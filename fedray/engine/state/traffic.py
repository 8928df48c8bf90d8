"""Reads client states from files to train clients with them, and writes new states to files.

On a GPU this happens during the computation: one thread reads the states of the next clients while others train, and
another thread writes new states. Copies between the GPU and pinned memory take milliseconds. The computing thread makes
them in the order of the computation. On a CPU, whose cores are busy anyway, states are read and written immediately.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fedray.core.vectors import Vector
from fedray.engine.state.packing import Packed, on_host, tensor_over
from fedray.engine.state.states import State, StateFile, StateFolder
from fedray.engine.tasks import Handle
from fedray.errors import StateLost

MOST_BYTES = 1 << 30
"""The most bytes of states that are read before they are needed (unless a single state is larger), and the most bytes
that wait to be written."""


class StateTraffic:
    """Reads and writes the files of clients' states (what clients keep between rounds) in ``folder``, for clients that
    are trained on ``device``.

    A state is read by its handle. This is either a :class:`StateFile` or a reference, such as that of an object in
    Ray's store. For a reference, ``fetch(handle)`` returns the arrays by name. ``beside`` says whether separate threads
    read and write the files while the clients train. None means that they do so only if ``device`` is a GPU.
    """

    def __init__(
        self, folder: StateFolder, device: torch.device, fetch: Callable[[Handle], Any], beside: bool | None = None
    ) -> None:
        self.folder, self.device, self.fetch = folder, device, fetch
        self.beside = device.type == "cuda" if beside is None else beside
        self._reader, self._writer = (ThreadPoolExecutor(1, f"states {what}") for what in ("read", "written"))
        self._coming: dict[Handle, Future[Mapping[str, Any]]] = {}
        self._going: deque[tuple[int, Future[None]]] = deque()

    def expect(self, handles: Sequence[Handle | None]) -> None:
        """Begins to read the states of the next clients in the background, so that :meth:`take` finds them in memory.
        They are read in the order of ``handles``, as far as :data:`MOST_BYTES` allow; None stands for a client without
        a state."""
        if not self.beside:
            return
        left = MOST_BYTES
        for handle in handles:
            if handle is None or handle in self._coming:
                continue
            size = _size(handle)
            if left < MOST_BYTES and size > left:
                return
            left -= size
            # this thread allocates the memory, because no other may use the GPU while a graph is captured
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self._coming[handle] = self._reader.submit(self._read, handle, memory)

    def take(self, handle: Handle) -> dict[str, Tensor]:
        """Returns the vectors of a client's state or of an earlier model, to which ``handle`` refers, by name. They are
        in the memory of the CPU, and must only be read. Waits for them if they are still being read.

        Raises :class:`StateLost` if the vectors are lost.
        """
        coming = self._coming.pop(handle, None)
        if coming is not None:
            found = coming.result()
        elif self.beside:
            self.expect([handle])
            found = self._coming.pop(handle).result()
        else:
            found = self.folder.read(handle) if isinstance(handle, StateFile) else self.fetch(handle)
        return {name: each if isinstance(each, Tensor) else tensor_over(each) for name, each in found.items()}

    def write(self, names: Sequence[str], state: Mapping[str, Vector]) -> list[StateFile]:
        """Writes the new states of C clients, which were trained together, to C files with these ``names``, and returns
        the files. ``state`` has the vectors ``[C, ...]`` by name, with one row for each client.

        The files are complete after :meth:`settle`. Raises :class:`UserError` if a state can't be written.
        """
        rows = Packed.pack(state).arrays
        each = sum(row[0].nbytes for row in rows.values())
        together = max(1, MOST_BYTES // max(1, each)) if self.beside else len(names)
        for start in range(0, len(names), together):
            part = slice(start, start + together)
            own = {name: on_host(row[part]) for name, row in rows.items()}
            if self.beside:
                self._write_later(names[part], own, each * len(names[part]))
            else:
                self._write(names[part], own)
        return [self.folder.file(name) for name in names]

    def _write_later(self, names: Sequence[str], rows: Mapping[str, Tensor], size: int) -> None:
        while self._going and size + sum(waiting for waiting, _ in self._going) > MOST_BYTES:
            self._going.popleft()[1].result()
        if self.device.type == "cpu":
            # a copy, because only the writer may use this memory
            rows = {name: row.clone() for name, row in rows.items()}
        self._going.append((size, self._writer.submit(self._write, names, rows)))

    def _write(self, names: Sequence[str], rows: Mapping[str, Tensor]) -> None:
        arrays = {key: row.numpy() for key, row in rows.items()}
        for row, name in enumerate(names):
            self.folder.write(name, {key: array[row] for key, array in arrays.items()})

    def settle(self) -> None:
        """Waits until all new states are in their files, and frees states that were read in advance but not used.
        Raises :class:`UserError` if a state can't be written."""
        self._coming.clear()
        while self._going:
            self._going.popleft()[1].result()

    def close(self) -> None:
        """Ends the threads that read and write. New states may be missing in files unless :meth:`settle` was
        called before."""
        for threads in (self._reader, self._writer):
            threads.shutdown(cancel_futures=True)

    def _read(self, handle: Handle, memory: Tensor) -> Mapping[str, Any]:
        if not isinstance(handle, StateFile):
            found: State = self.fetch(handle)
            return found
        return self.folder.read_into(handle, memory)


def _size(handle: Handle) -> int:
    """Returns the bytes of the file to which ``handle`` refers, or 0 if it refers to no file."""
    if not isinstance(handle, StateFile):
        return 0
    try:
        return os.path.getsize(handle.path)
    except OSError as error:
        raise StateLost(f"a client's state is gone: {handle.path} ({error.strerror})") from None
