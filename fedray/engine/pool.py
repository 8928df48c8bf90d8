"""Who simulates clients. The server gives tasks to a pool and takes results in whatever order they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedray.engine.tasks import AnyTask, ChunkResult, Handle
from fedray.engine.worker import Worker


class Pool(Protocol):
    """A set of workers.

    ``slots``: tasks that are worked on at once. ``publish`` makes a broadcast available to all of them; ``map`` runs
    tasks and yields ``(task, result)`` as they finish, with the states in results replaced by handles; ``sticky`` tasks
    go to the worker that did the phase before on the same chunk.
    """

    slots: int

    def publish(self, tensors: dict[str, Tensor]) -> Handle: ...

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]: ...

    def fetch(self, handles: Sequence[Handle]) -> list[Any]: ...

    def hold(self, states: Iterable[dict[str, Any]]) -> list[Handle]: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Held:
    """A handle in the same process: it is what it names."""

    value: Any


class LocalPool:
    """One worker in this process: the reference for every other pool, and the way to debug."""

    slots = 1

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        worker.fetch = lambda handle: handle.value

    def publish(self, tensors: dict[str, Tensor]) -> Handle:
        return Held(tensors)

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        for task in tasks:
            result = self.worker.run(task)
            if isinstance(result, ChunkResult):
                result.states = self.hold(result.states)
            yield task, result

    def fetch(self, handles: Sequence[Handle]) -> list[Any]:
        return [handle.value for handle in handles]

    def hold(self, states: Iterable[dict[str, Any]]) -> list[Handle]:
        return [Held(state) for state in states]

    def close(self) -> None:
        pass
