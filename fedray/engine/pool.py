"""Who simulates clients. The server gives tasks to a pool and takes results in whatever order they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedray.core.vectors import Vector
from fedray.engine.packing import Packed
from fedray.engine.states import State, StateFile
from fedray.engine.tasks import AnyTask, Handle
from fedray.engine.worker import Worker


class Pool(Protocol):
    """A set of workers.

    ``slots``: tasks that are worked on at once; ``at_once``: the part of its even share of the work left that a worker
    may be given with one task. ``publish`` makes a broadcast available to all of them; ``map`` runs
    tasks and yields ``(task, result)`` as they finish; ``sticky`` tasks go to the worker that did the phase before on
    the same clients. ``keep`` makes vectors available for many rounds, under a name, and ``fetch`` gives them back;
    ``store`` writes what a handle of kept vectors or of a state names to a file, and ``drop`` forgets it.
    """

    slots: int

    @property
    def at_once(self) -> float: ...

    def publish(self, vectors: Mapping[str, Vector]) -> Handle: ...

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]: ...

    def keep(self, name: str, vectors: State) -> Handle: ...

    def fetch(self, handle: Handle) -> State: ...

    def store(self, handle: Handle, target: Path) -> None: ...

    def drop(self, handles: Iterable[Handle]) -> None: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Held:
    """A handle in the same process: it is what it names."""

    value: Any


class LocalPool:
    """One worker in this process: the reference for every other pool, and the way to debug."""

    slots, at_once = 1, 0.5

    def __init__(self, worker: Worker) -> None:
        self.worker, self.states = worker, worker.clients.states
        worker.clients.fetch = lambda handle: handle.value

    def publish(self, vectors: Mapping[str, Vector]) -> Handle:
        return Held(Packed.of(vectors))

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        for task in tasks:
            yield task, self.worker.run(task)

    def keep(self, name: str, vectors: State) -> StateFile:
        return self.states.write(name, vectors)

    def fetch(self, handle: StateFile) -> State:
        return self.states.read(handle)

    def store(self, handle: StateFile, target: Path) -> None:
        self.states.store(handle, target)

    def drop(self, handles: Iterable[StateFile]) -> None:
        self.states.drop(handles)

    def close(self) -> None:
        pass
