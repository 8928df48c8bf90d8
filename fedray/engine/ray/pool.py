"""A pool of Ray actors. If an actor dies, it is replaced, and another one repeats its task."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.numpy import save_file

from fedray.core.structure import map_leaves
from fedray.core.vectors import Vector
from fedray.engine.ray.client_actor import StateReader, create_actor, get
from fedray.engine.ray.cluster import NO_TASK_EVENTS, gpu_share, shortage
from fedray.engine.ray.stored import StoredData
from fedray.engine.state.packing import Enclosed, Packed
from fedray.engine.state.states import State, StateFile, StateFolder
from fedray.engine.tasks import AnyTask, Handle, PhaseTask, ScoreTask, Task, working_seconds
from fedray.errors import ClientError, UserError, first_line
from fedray.experiment.experiment import Experiment

ENCLOSED_BYTES = 1 << 16
"""Broadcasts up to this many bytes travel within each task. A larger one is put into Ray's object store once, and each
actor fetches it from there, which takes about a millisecond."""

MARGIN = 1.2
"""The factor by which an actor may be slower than measured before without other actors having to wait for it."""


@dataclass
class _Sent:
    """A task that was sent to an actor."""

    actor: Any
    task: Any


class RayPool:
    """The pool of the Ray engine: the client actors of a run, which may be on many nodes. An actor that dies
    is replaced.

    ``actors`` have been started by the driver, and the pool waits for them for ``engine.start_timeout`` seconds.
    ``states`` is the folder with clients' states on the server's node. ``note(line)`` writes a line into the run's log.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: StoredData,
        actors: Sequence[Any],
        states: StateFolder,
        note: Callable[[str], None],
    ) -> None:
        self.experiment, self.data, self.states, self.note = experiment, data, states, note
        engine = experiment.config.engine
        self.patience, self.max_retries = engine.start_timeout, engine.max_retries
        self.slots = len(actors)
        self.share = {"num_cpus": engine.cpus_per_actor, "num_gpus": gpu_share(experiment)}
        self.actors: list[Any] = []
        self.starting: dict[Any, Any] = {}
        self.alive: list[Any] = []
        self.machines: list[dict[str, Any]] = []
        self.nodes: dict[Any, str] = {}
        self.readers: dict[str, Any] = {}
        self.owners: dict[int, Any] = {}
        # for each actor: the samples of its tasks, and the seconds that they took; each new task halves the weight of
        # the older ones
        self.done: dict[Any, tuple[float, float]] = {}
        self.failed_starts = 0
        self._published = 0
        # references to copies in Ray's store of files of this node, for the tasks of one phase
        self._copies: dict[Any, Any] = {}
        for actor in actors:
            self._expect(actor)
        self._await_all()

    def _expect(self, actor: Any) -> None:
        self.actors.append(actor)
        self.starting[actor.describe.remote()] = actor

    def _await_all(self) -> None:
        deadline = time.monotonic() + self.patience
        while self.starting:
            self._welcome(timeout=max(0.0, deadline - time.monotonic()))
            if self.starting and time.monotonic() >= deadline:
                waiting = len(self.starting)
                self.close()
                raise UserError(
                    f"{shortage(self.slots, self.share)}: {waiting} of them did not start in {self.patience:g} s"
                )

    def _welcome(self, timeout: float) -> None:
        """Waits for one of the actors that are starting, and adds it to the actors that get tasks.

        If none has started after ``timeout`` seconds, nothing changes. An actor that died while it started is replaced.
        An error is raised if that happened too often, or if a new actor would fail for the same reason.
        """
        ready, _ = ray.wait(list(self.starting), num_returns=1, timeout=timeout)
        for reference in ready:
            self._enter(reference)

    def _enter(self, reference: Any) -> None:
        actor = self.starting.pop(reference)
        try:
            self.nodes[actor], machine = ray.get(reference)
        except RayTaskError as error:
            raise _cause(error) from None
        except (RayActorError, OutOfMemoryError) as error:
            inner = getattr(error, "cause", None)
            if inner is not None or "creation task" in str(error):
                raise _creation_cause(error) from None
            self._remove(actor)
            self.failed_starts += 1
            self._lost(f"a client actor died while it started: {first_line(error)}", self.failed_starts)
            return
        self.failed_starts = 0
        self.machines.append(machine)
        self.note(f"client actor: pid {machine['pid']} on {machine['node']}, {machine['device']}")
        if self.experiment.keeps_states:
            self._open(self.nodes[actor])
        self.alive.append(actor)

    def _open(self, node: str) -> None:
        """Starts a :class:`StateReader` on ``node``, unless there is one or it is the server's node, and removes
        clients' states that a killed run may have left there."""
        if node != self.states.node and node not in self.readers:
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": place, **NO_TASK_EVENTS}
            reader: Any = ray.remote(StateReader).options(**options)
            self.readers[node] = reader.remote(self.experiment, self.states.node)
            get(self.readers[node].clear.remote())

    @property
    def task_fraction(self) -> float:
        """How large the next task of a round should be, as a fraction of an even share, which is the remaining work
        divided by the number of actors.

        It is small enough that the slowest actor finishes its task before the others run out of work: slowest speed /
        mean speed / :data:`MARGIN`. With speeds of 100 and 300 samples a second, it is 100 / 200 / 1.2 = 0.42. It is
        0.5 until the speed of every actor is known.
        """
        speeds = self._speeds().values()
        return min(speeds) / statistics.fmean(speeds) / MARGIN if speeds else 0.5

    def _speeds(self) -> dict[Any, float]:
        """Returns the speed of each actor in samples per second, or an empty mapping if some speeds are not known."""
        if not all(actor in self.done for actor in self.alive):
            return {}
        of_alive = {actor: self.done[actor] for actor in self.alive}
        return {actor: work / seconds for actor, (work, seconds) in of_alive.items()}

    def publish(self, vectors: Mapping[str, Vector]) -> Handle:
        packed = Packed.pack(vectors).numpy()
        if packed.bytes > ENCLOSED_BYTES:
            return ray.put(packed)
        self._published += 1
        # a copy, because the tasks of later phases contain the broadcast too, and the server may have changed its
        # vectors by then
        return Enclosed(self._published, Packed(map_leaves(np.array, packed.arrays), packed.widths))

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
        self._copies = {}
        queue: deque[Any] = deque(tasks)
        sent: dict[Any, _Sent] = {}
        losses: Counter[int] = Counter()
        while queue or sent:
            self._dispatch(queue, sent, sticky)
            ready, _ = ray.wait([*sent, *self.starting], num_returns=1, timeout=None if sent else self.patience)
            if not ready:
                raise UserError(
                    f"{shortage(self.slots, self.share)}: all client actors were lost, and none could be replaced"
                )
            (reference,) = ready
            if reference in self.starting:
                self._enter(reference)
                continue
            done = sent.pop(reference)
            try:
                result = ray.get(reference)
            except RayTaskError as error:
                raise _cause(error) from None
            except RayError as error:
                queue.appendleft(done.task)
                if done.actor in self.actors:
                    self._remove(done.actor)
                    losses[id(done.task)] += 1
                    line = f"a client actor died ({first_line(error)}); its work is done again"
                    self._lost(line, losses[id(done.task)])
                continue
            if isinstance(done.task, PhaseTask):
                self.owners[done.task.start] = done.actor
                if not done.task.phase:
                    work, before = self.done.get(done.actor, (0.0, 0.0))
                    self.done[done.actor] = work / 2 + done.task.work, before / 2 + working_seconds(result.seconds)
            yield done.task, result

    def settle(self) -> None:
        # an actor returns a result only after it has written the files
        pass

    def _dispatch(self, queue: deque[Task], sent: dict[Any, _Sent], sticky: bool) -> None:
        """Sends a task to each actor that has none. Because sending a task takes milliseconds, an actor gets a second
        task before it has finished the first, as long as more tasks are left than there are actors. A slow actor gets
        no second task, because the others can do it sooner."""
        load, speeds = Counter(id(item.actor) for item in sent.values()), self._speeds()
        usual = statistics.fmean(speeds.values()) if speeds else 0.0
        fast = {actor for actor, speed in speeds.items() if speed * MARGIN >= usual}
        for depth in (1, 2):
            for actor in self.alive:
                if load[id(actor)] >= depth:
                    continue
                if depth == 2 and (len(queue) <= self.slots or actor not in fast):
                    continue
                task = self._choose(queue, actor) if sticky else (queue[0] if queue else None)
                if task is None:
                    continue
                queue.remove(task)
                load[id(actor)] += 1
                self._send(actor, task, sent)

    def _send(self, actor: Any, task: Task, sent: dict[Any, _Sent]) -> None:
        sent[actor.run.remote(self._within_reach(task, self.nodes[actor]))] = _Sent(actor, task)

    def _within_reach(self, task: Task, node: str) -> Task:
        """Returns ``task`` with its handles replaced by handles that an actor on ``node`` can resolve."""
        if isinstance(task, ScoreTask):
            return replace(task, states=[self._near(state, node) for state in task.states])
        if not isinstance(task, PhaseTask):
            return task
        # several clients may have received the same model
        received = {each: self._copies.get(each) or self._near(each, node) for each in set(task.received)}
        self._copies |= {each: near for each, near in received.items() if near is not each}
        states = [self._near(state, node) for state in task.states]
        return replace(task, states=states, received=[received[each] for each in task.received])

    def _near(self, state: Handle | None, node: str) -> Handle | None:
        """Returns a handle of a client's state that an actor on ``node`` can resolve: a file on that node, or a
        reference to an object that Ray sends there."""
        if not isinstance(state, StateFile) or state.node == node:
            return state
        if state.node == self.states.node:
            return ray.put(self.states.read(state))
        return self.readers[state.node].read.remote(state)

    def _choose(self, queue: deque[Task], actor: Any) -> Task | None:
        """Returns the first task in ``queue`` that ``actor`` should get: one whose previous phase this actor did
        itself, or whose previous phase was done by an actor that no longer exists. Returns None if there is no
        such task."""
        for task in queue:
            owner = self.owners.get(task.start)
            if owner is actor or owner not in self.actors:
                return task
        return None

    def _lost(self, line: str, times: int) -> None:
        """Replaces an actor that died. ``line`` says so in the log. ``times`` is how often in a row this has happened;
        if it is more than ``engine.max_retries``, :class:`ClientError` is raised."""
        self.note(line)
        if times > self.max_retries:
            raise ClientError(f"{line}: {times} times in a row (engine.max_retries={self.max_retries})")
        self._expect(create_actor(self.experiment, self.data, self.states.node))

    def keep(self, name: str, vectors: State) -> StateFile:
        # a file, because an object in Ray's store would take memory for as long as any client may need it
        return self.states.write(name, vectors)

    def fetch(self, handle: StateFile) -> State:
        return self.states.read(handle)

    def store(self, handle: StateFile, target: Path) -> None:
        if handle.node == self.states.node:
            self.states.store(handle, target)
        else:
            save_file(get(self.readers[handle.node].read.remote(handle)), target)

    def drop(self, handles: Iterable[StateFile]) -> None:
        by_node: dict[str, list[StateFile]] = {}
        for handle in handles:
            by_node.setdefault(handle.node, []).append(handle)
        self.states.drop(by_node.pop(self.states.node, ()))
        for node, files in by_node.items():
            self.readers[node].drop.remote(files)

    def _remove(self, actor: Any) -> None:
        """Ends an actor, dead or alive, and removes it from the pool."""
        self.actors.remove(actor)
        if actor in self.alive:
            self.alive.remove(actor)
        ray.kill(actor)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors, self.alive, self.starting = [], [], {}
        for reader in self.readers.values():
            with contextlib.suppress(RayError):
                ray.get(reader.clear.remote(), timeout=10)
            ray.kill(reader)
        self.readers = {}


def _cause(error: RayTaskError) -> Exception:
    """Returns fedray's own exception from within the error in which Ray has wrapped it, or else Ray's error."""
    cause = error.cause
    return cause if isinstance(cause, (UserError, ClientError)) else error


def _creation_cause(error: RayError) -> Exception:
    return ClientError(f"a client actor could not be set up\n{error}")
