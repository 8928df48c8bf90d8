"""Pools of workers for tests: one that runs every task more than once, and one that pickles everything as Ray does."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np
import torch

from fedray.client.optimizer import LocalOptimizer
from fedray.core.structure import map_leaves
from fedray.core.vectors import Vector
from fedray.engine.clients import Clients
from fedray.engine.pool import LocalPool
from fedray.engine.ray.copies import travelled
from fedray.engine.state.packing import Enclosed, Packed
from fedray.engine.state.states import StateFolder
from fedray.engine.tasks import AnyTask, Handle, PhaseResult, PhaseTask, Task
from fedray.engine.worker import Worker


class DoublingPool(LocalPool):
    """A pool of workers for tests, which checks that tasks are pure. Each task is run at least twice, by different
    workers. They must get the same result, and must not change the task's inputs. If the algorithm's method ``step`` is
    marked ``in_place``, which allows it to overwrite models, the result must also be the same when it makes new models.

    ``worker`` is the worker in the server's process, whose result is used. The work is divided as for three workers,
    and the results come in the reverse order of the tasks.
    """

    slots, task_fraction = 3, 0.3

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.experiment, self.data = worker.experiment, worker.data

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        for task in reversed(tasks):
            before = self._digests_of(task)
            again = self._found(self._run_again(task))
            in_place = getattr(self.experiment.algorithm.step, "in_place", False)
            with mock.patch.object(LocalOptimizer, "in_place", property(lambda self: False, lambda self, value: None)):
                with_new_models = self._found(self._run_again(task)) if in_place else again
            for _, result in super().map([task]):
                found = self._found(result)
                for name, value in found.items():
                    assert value == again[name], f"a task run again gave other {name}"
                    assert value == with_new_models[name], f"a step that is declared in_place gives other {name} so"
                assert self._digests_of(task) == before, "a task changed what it was given"
                yield task, result

    def _run_again(self, task: Task) -> Any:
        clients = Clients(self.experiment, self.data, self.states, fetch=lambda handle: handle.value)
        return Worker(clients).run(task)

    def _found(self, result: Any) -> dict[str, Any]:
        """Returns what must be the same in ``result`` if a phase is run again: hashes of sums and states, weights and
        scalars. Results of other tasks are not compared."""
        if not isinstance(result, PhaseResult):
            return {}
        return {
            "sums": {name: hashes(partial.nodes) for name, partial in result.sums.items()},
            "weights": {name: partial.scale for name, partial in result.sums.items()},
            "scalars": result.scalars,
            "states": [hashes(self.states.read(file)) for file in result.states],
        }

    def _digests_of(self, task: Task) -> list[dict[Any, str]]:
        handles = task.broadcasts if isinstance(task, PhaseTask) else [task.broadcast]
        states = [file for file in getattr(task, "states", ()) if file is not None]
        return [hashes(handle.value.arrays) for handle in handles] + [hashes(self.states.read(file)) for file in states]


class PicklingPool(LocalPool):
    """A pool of workers for tests, which behaves like Ray's client actors without Ray: its workers are in this process,
    but share no memory with the server or with each other.

    The experiment, the data, tasks and results are pickled on their way, and arrays arrive read-only. The workers take
    turns, and results come in another order than tasks. A run that has the same result on this pool as on the local
    pool has the same result on Ray, too, unless starting or losing processes makes a difference.

    Args:
        worker: The server's own worker, from which the pool's workers get the experiment and the data.
        workers: The number of workers in the pool.
    """

    def __init__(self, worker: Worker, workers: int = 2) -> None:
        super().__init__(worker)
        self.slots, self._published = workers, 0
        device = str(worker.clients.device)
        self.workers: list[Worker] = []
        for _ in range(workers):
            experiment, data = travelled((worker.experiment, worker.data))
            states = StateFolder(self.states.path, self.states.node)
            self.workers.append(Worker(Clients(experiment, data, states, device, fetch=lambda handle: handle.packed)))
        self.owners: dict[int, int] = {}

    def publish(self, vectors: Mapping[str, Vector]) -> Handle:
        self._published += 1
        packed = Packed.pack(vectors).numpy()
        return Enclosed(self._published, Packed(map_leaves(np.array, packed.arrays), packed.widths))

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        done: deque[tuple[AnyTask, Any]] = deque()
        for number, task in enumerate(tasks):
            at = self.owners.get(task.start, 0) if sticky else number % self.slots
            if isinstance(task, PhaseTask):
                self.owners[task.start] = at
            result = self.workers[at].run(travelled(task))
            if isinstance(result, PhaseResult):
                for partial in result.sums.values():
                    partial.pack()
            done.appendleft((task, travelled(result)))
            if len(done) == self.slots:
                yield from _emptied(done)
        yield from _emptied(done)

    def settle(self) -> None:
        # a worker returns its result only after its files are written
        pass

    def close(self) -> None:
        super().close()
        for worker in self.workers:
            worker.clients.traffic.close()


def pickling_workers(workers: int) -> AbstractContextManager[Any]:
    """Returns a context in which runs on the local engine use a :class:`PicklingPool`, whose workers behave like Ray's
    client actors. Tests use it to check what would happen on Ray.

    Args:
        workers: The number of workers in the pool, each of which stands for a client actor of Ray.

    Example:
        with pickling_workers(2):
            result = simulate(config)
    """

    def make_pool(worker: Worker) -> PicklingPool:
        return PicklingPool(worker, workers)

    return mock.patch("fedray.engine.local_engine.LocalPool", make_pool)


def hashes(tensors: Mapping[Any, Any]) -> dict[Any, str]:
    """Returns a hash for each array or tensor in ``tensors``, by the same names, so that tests can compare models and
    states to the bit. A hash is a SHA-256 as a hexadecimal text."""
    arrays = {
        name: value.cpu().numpy() if isinstance(value, torch.Tensor) else value for name, value in tensors.items()
    }
    return {name: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest() for name, a in sorted(arrays.items())}


def _emptied(done: deque[tuple[AnyTask, Any]]) -> Iterator[tuple[AnyTask, Any]]:
    while done:
        yield done.popleft()
