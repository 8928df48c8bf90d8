"""The interface of pools: the workers of a run, which train and evaluate clients. The server gives tasks to a pool, and
takes the results in any order."""

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


@dataclass(frozen=True)
class Region:
    """A group of workers that are near each other, such as those on one host: ``workers`` is their number, and
    ``speed`` says how fast they are together, in any unit."""

    workers: int
    speed: float = 1.0


class Pool(Protocol):
    """The interface of a pool: the workers of a run, which train and evaluate clients.

    A user-defined class with these methods can be used as an engine (``engine.kind=file.py:Class``). The class is
    called with one argument, a :class:`~fedray.engine.worker.Worker`. This object does tasks in the server's process,
    and has the experiment, the data and the folder of the clients' states. The result of a task must have the same bits
    whichever worker does it. :class:`fedray.testing.PoolContract` tests a class for all this. A subclass of
    :class:`LocalPool` only needs :meth:`publish` and :meth:`map`.

    Example:
        class Backwards(LocalPool):
            def map(self, tasks, sticky=False):
                yield from super().map(tasks[::-1], sticky)
    """

    @property
    def slots(self) -> int:
        """The number of tasks that the workers do at the same time. It may change between rounds."""

    @property
    def regions(self) -> Sequence[Region]:
        """The groups of workers that are near each other, such as those of one host. The cohort is divided so that each
        group gets neighbouring clients. All groups together have ``slots`` workers."""

    @property
    def task_fraction(self) -> float:
        """How large the next task of a round should be, as a fraction of an even share, which is the remaining work
        divided by the number of workers. 0.5, for example, means half an even share
        (:func:`fedray.engine.cutting.cut_into_tasks`)."""

    def publish(self, vectors: Mapping[str, Vector]) -> Handle:
        """Makes the models and tensors of a broadcast available to all workers. Returns a handle, a reference by which
        tasks name the broadcast.

        Args:
            vectors: Models ``[row_width]`` and tensors, float32, by name. The server may overwrite them once the phase
                is over. So a pool must copy them if a task of a later phase in the same round may still read them, to
                repeat this phase.
        """

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        """Does all tasks, and yields each task (the same object) with its result, in any order.

        The files with the clients' new states need not be complete before :meth:`settle` returns.

        Args:
            tasks: The tasks, the largest ones first.
            sticky: Whether a task is done faster by the worker that did the previous phase for the same clients. Any
                other worker runs the previous phase again first.

        Raises:
            ClientError: The code of a client raised an exception. The error names the client.
            UserError: A task can't be done with the user's configuration, for example because memory is not enough.
        """

    def settle(self) -> None:
        """Waits until the new states of all clients are in their files. The server calls it at the end of a round,
        because the results of tasks only name these files."""

    def keep(self, name: str, vectors: State) -> Handle:
        """Stores the arrays ``vectors`` (by name) under ``name``, for example a model of an earlier round, and returns
        a handle with which :meth:`fetch` finds the arrays. They stay stored until :meth:`drop` is called, possibly for
        many rounds."""

    def fetch(self, handle: Handle) -> State:
        """Returns arrays that :meth:`keep` has stored, by name. ``handle`` is what :meth:`keep` returned for them.
        Raises :class:`StateLost` if they have been dropped."""

    def store(self, handle: Handle, target: Path) -> None:
        """Writes the arrays to which ``handle`` refers into the safetensors file ``target``, for a checkpoint. The
        arrays are a client's state, or were stored by :meth:`keep`."""

    def drop(self, handles: Iterable[Handle]) -> None:
        """Deletes the arrays to which ``handles`` refer: clients' states, or arrays that :meth:`keep` has stored. The
        caller must not need them any more."""

    def close(self) -> None:
        """Stops the workers at the end of the run."""


@dataclass(eq=False)
class LocalHandle:
    """A handle (a reference to published data, such as a broadcast) for use within one process. It simply holds the
    data themselves, ``value``."""

    value: Any


class LocalPool:
    """The pool of the local engine: a single worker, ``worker``, does all tasks in this process. All other pools must
    give the same results. It is the best pool for debugging."""

    slots, task_fraction = 1, 0.5

    @property
    def regions(self) -> Sequence[Region]:
        return [Region(self.slots)]

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
