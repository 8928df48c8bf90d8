"""The interface of pools of workers, which simulate clients. The server gives tasks to a pool, and takes the results in
any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from fedray.core.vectors import Vector
from fedray.engine.state.packing import Packed
from fedray.engine.state.states import State, StateFile
from fedray.engine.tasks import AnyTask, Handle
from fedray.engine.worker import Worker


class Pool(Protocol):
    """A set of workers that simulate clients. ``slots`` is the number of tasks that they do at the same time.

    A user-defined class with these methods is an engine (``engine.kind=file.py:Class``). It is instantiated with the
    server's :class:`~fedray.engine.worker.Worker`, which has the experiment, the data and the folder of the clients'
    states. The result of a task must have the same bits whichever worker does it. :class:`fedray.testing.PoolContract`
    tests all of this. A subclass of :class:`LocalPool` only needs :meth:`publish` and :meth:`map`.

    Example:
        class Backwards(LocalPool):
            def map(self, tasks, sticky=False):
                yield from super().map(tasks[::-1], sticky)
    """

    slots: int

    @property
    def task_fraction(self) -> float:
        """The size that a task should have, as a fraction of an even share of the remaining work
        (:mod:`fedray.engine.cutting`)."""

    def publish(self, vectors: Mapping[str, Vector]) -> Handle:
        """Makes a broadcast available to all workers, and returns a handle by which tasks refer to it.

        Args:
            vectors: Models ``[row_width]`` and tensors, float32, by name. The server may change them after the phase.
                But tasks of later phases in the same round may still need the original values.
        """

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        """Does all tasks, and yields each task (the same object) with its result, in any order.

        The files with clients' new states need not exist before :meth:`settle`.

        Args:
            tasks: The tasks, the largest ones first.
            sticky: Whether a task is done faster by the worker that did the phase before for the same clients. Any
                other worker repeats that phase first.

        Raises:
            ClientError: The code of a client raised. The error names the client.
            UserError: A task can't be done as the user asked for it.
        """

    def settle(self) -> None:
        """Waits until all states that results refer to are in their files."""

    def keep(self, name: str, vectors: State) -> Handle:
        """Stores arrays, by name, until they are dropped, possibly for many rounds. Returns a handle of them."""

    def fetch(self, handle: Handle) -> State:
        """Returns the arrays that :meth:`keep` stored."""

    def store(self, handle: Handle, target: Path) -> None:
        """Writes stored arrays, or a client's state, to the file ``target`` (safetensors), for a checkpoint."""

    def drop(self, handles: Iterable[Handle]) -> None:
        """Deletes stored arrays, or states of clients."""

    def close(self) -> None:
        """Stops the workers."""


@dataclass(eq=False)
class LocalHandle:
    """A handle within one process, which simply holds the object that it names."""

    value: Any


class LocalPool:
    """A pool of one worker in this process. It is the reference for all other pools, and the best one for debugging."""

    slots, task_fraction = 1, 0.5

    def __init__(self, worker: Worker) -> None:
        self.worker, self.states = worker, worker.clients.states
        worker.clients.fetch = lambda handle: handle.value

    def publish(self, vectors: Mapping[str, Vector]) -> Handle:
        return LocalHandle(Packed.pack(vectors))

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        for task, following in zip_longest(tasks, tasks[1:]):
            yield task, self.worker.run(task, following, settled=False)

    def settle(self) -> None:
        self.worker.settle()

    def keep(self, name: str, vectors: State) -> StateFile:
        return self.states.write(name, vectors)

    def fetch(self, handle: StateFile) -> State:
        return self.states.read(handle)

    def store(self, handle: StateFile, target: Path) -> None:
        self.states.store(handle, target)

    def drop(self, handles: Iterable[StateFile]) -> None:
        handles = list(handles)
        if handles:
            # otherwise a file that is still being written would exist afterwards
            self.settle()
        self.states.drop(handles)

    def close(self) -> None:
        self.worker.clients.traffic.close()
