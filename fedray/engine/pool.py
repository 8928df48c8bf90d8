"""The interface of those who simulate clients. The server gives tasks to a pool, and takes the results in whatever
order they come."""

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
    """A set of workers. ``slots`` of them do tasks at the same time."""

    slots: int

    @property
    def task_fraction(self) -> float:
        """The fraction of an even share of the work left that one task should be (see :mod:`fedray.engine.cutting`)."""

    def publish(self, vectors: Mapping[str, Vector]) -> Handle:
        """Makes a broadcast available to all workers."""

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        """Does all tasks, and yields each with its result, in any order.

        With ``sticky`` a task goes to the worker that did the phase before for the same clients, if it is still there.
        The files of clients' new states are there after :meth:`settle`.
        """

    def settle(self) -> None:
        """Waits until the states that the results name are in their files."""

    def keep(self, name: str, vectors: State) -> Handle:
        """Keeps vectors for many rounds, until they are dropped."""

    def fetch(self, handle: Handle) -> State:
        """Returns the vectors that :meth:`keep` kept."""

    def store(self, handle: Handle, target: Path) -> None:
        """Writes kept vectors, or a client's state, to the file ``target``."""

    def drop(self, handles: Iterable[Handle]) -> None:
        """Forgets kept vectors, or states of clients."""

    def close(self) -> None:
        """Stops the workers."""


@dataclass(eq=False)
class LocalHandle:
    """A handle within one process: it simply holds what it names."""

    value: Any


class LocalPool:
    """A pool of one worker in this process. It is the reference for every other pool, and the way to debug."""

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
            # a file that is still to be written would be there afterwards
            self.settle()
        self.states.drop(handles)

    def close(self) -> None:
        self.worker.clients.traffic.close()
