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
    """A set of workers that simulate clients, of which ``slots`` do tasks at the same time.

    A class of your own with these methods is an engine (``engine.kind=file.py:Class``). It is made with the server's
    :class:`~fedray.engine.worker.Worker`, which has the experiment, the data and the folder of the clients' states.
    Whoever does a task, its result has the same bits. :class:`fedray.testing.PoolContract` tests all of this;
    :class:`LocalPool` has everything but other workers, so that a subclass needs only :meth:`publish` and :meth:`map`.

    Example:
        class Backwards(LocalPool):
            def map(self, tasks, sticky=False):
                yield from super().map(tasks[::-1], sticky)
    """

    slots: int

    @property
    def task_fraction(self) -> float:
        """The fraction of an even share of the work left that one task should be (see :mod:`fedray.engine.cutting`)."""

    def publish(self, vectors: Mapping[str, Vector]) -> Handle:
        """Makes a broadcast available to all workers, and returns what names it in tasks.

        Args:
            vectors: Models ``[row_width]`` and tensors, float32, by name. The server may change them once the phase is
                over, and a later phase of the round may need them as they were.
        """

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        """Does all tasks, and yields each with its result, in any order. The task is the same object.

        The files of clients' new states are there after :meth:`settle`.

        Args:
            tasks: What is to be done, the largest tasks first.
            sticky: Whether it is faster if a task goes to the worker that did the phase before for the same clients. If
                it goes to another one, that begins with the phase before.

        Raises:
            ClientError: The code of a client raised; it names the client.
            UserError: A task can't be done as the user asked for it.
        """

    def settle(self) -> None:
        """Waits until the states that the results name are in their files."""

    def keep(self, name: str, vectors: State) -> Handle:
        """Keeps vectors, arrays by name, for many rounds, until they are dropped. Returns what names them."""

    def fetch(self, handle: Handle) -> State:
        """Returns the vectors that :meth:`keep` kept."""

    def store(self, handle: Handle, target: Path) -> None:
        """Writes kept vectors, or a client's state, to the file ``target`` (safetensors), for a checkpoint."""

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
