"""A pool of Ray actors. Whoever dies is replaced, and what it was doing is done again elsewhere."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.numpy import save_file

from fedray.core.vectors import Vector
from fedray.engine.packing import Packed
from fedray.engine.process import describe, environment, require_device, settled
from fedray.engine.ray_cluster import UNRECORDED, gpu_share, in_group, shortage
from fedray.engine.states import State, StateFile, StateFolder
from fedray.engine.stored import StoredData
from fedray.engine.tasks import AnyTask, Handle, PhaseTask, ScoreTask, Task
from fedray.engine.worker import Worker
from fedray.errors import ClientError, StateLost, UserError, first_line
from fedray.experiment import Experiment

QUICK_SECONDS = 0.05
"""An actor whose last task took no longer is given the next before it is done: sending one takes milliseconds."""

MARGIN = 1.2
"""By how much an actor may fall behind the speed at which it was seen without the others having to wait for it."""


class ClientActor:
    """Simulates whichever clients it is given."""

    def __init__(self, experiment: Experiment, data: StoredData, server: str) -> None:
        engine = experiment.config.engine
        self._settled = settled(engine.threads, engine.portable_bits)
        self._settled.__enter__()
        self.device, self.node = experiment.device, ray.get_runtime_context().get_node_id()
        states = StateFolder.of_run(experiment.config, self.node, server)
        self._refusal: UserError | None = None
        try:
            require_device(self.device)
            self.worker = Worker(experiment, data.get(), states, self.device, fetch=_get)
        except UserError as error:
            # raised from here it would be the death of an actor, whose cause Ray tells as a text
            self._refusal = error

    def describe(self) -> tuple[str, dict[str, Any]]:
        """The node, by Ray's name of it, and what decides the bits of its results."""
        if self._refusal is not None:
            raise self._refusal
        return self.node, describe(self.device)

    def run(self, task: Task) -> Any:
        return self.worker.run(task)


def create_actor(experiment: Experiment, data: StoredData, server: str) -> Any:
    """A client actor, wherever there is room, or within the placement group of a trial; ``server`` is the server's
    node."""
    engine = experiment.config.engine
    return (
        ray.remote(ClientActor)
        .options(
            num_cpus=engine.cpus_per_actor,
            num_gpus=gpu_share(experiment),
            scheduling_strategy=in_group() or "SPREAD",
            max_restarts=0,
            runtime_env={"env_vars": environment(engine.threads, engine.portable_bits)},
            **UNRECORDED,
        )
        .remote(experiment, data, server)
    )


class Keeper:
    """Hands out the clients' states that lie on a node other than the server's; outlives the client actors there."""

    def __init__(self, experiment: Experiment, server: str) -> None:
        self.states = StateFolder.of_run(experiment.config, ray.get_runtime_context().get_node_id(), server)

    def read(self, file: StateFile) -> State:
        return self.states.read(file)

    def drop(self, files: Sequence[StateFile]) -> None:
        self.states.drop(files)

    def clear(self) -> None:
        self.states.clear()


@dataclass
class _Sent:
    """A task that an actor has."""

    actor: Any
    task: Any


class RayPool:
    """Client actors, of which the first, ``actors``, are awaited for ``engine.start_timeout`` seconds."""

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
        self.keepers: dict[str, Any] = {}
        self.owners: dict[int, Any] = {}
        self.last_seconds: dict[Any, float] = {}
        # work in samples and the seconds that it took, older results counting less
        self.done: dict[Any, tuple[float, float]] = {}
        self.failed_starts = 0
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
        """Take an actor that has started among those that get work."""
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
            self._lost(f"a client actor died while it started: {_reason(error)}", self.failed_starts)
            return
        self.failed_starts = 0
        self.machines.append(machine)
        self.note(f"client actor: pid {machine['pid']} on {machine['node']}, {machine['device']}")
        if self.experiment.algorithm.stateful:
            self._open(self.nodes[actor])
        self.alive.append(actor)

    def _open(self, node: str) -> None:
        """Have a keeper on ``node``, and what a killed run may have left there removed."""
        if node != self.states.node and node not in self.keepers:
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": place, **UNRECORDED}
            keeper: Any = ray.remote(Keeper).options(**options)
            self.keepers[node] = keeper.remote(self.experiment, self.states.node)
            _get(self.keepers[node].clear.remote())

    @property
    def at_once(self) -> float:
        """What the slowest actor does while all do what is left, as a part of an even share and with a margin, by the
        speeds seen; half where one is new."""
        if not self.alive or not all(actor in self.done for actor in self.alive):
            return 0.5
        speeds = [work / seconds for work, seconds in (self.done[actor] for actor in self.alive)]
        return min(speeds) * len(speeds) / sum(speeds) / MARGIN

    def publish(self, vectors: Mapping[str, Vector]) -> Handle:
        return ray.put(Packed.of(vectors).numpy())

    def map(self, tasks: Sequence[AnyTask], sticky: bool = False) -> Iterator[tuple[AnyTask, Any]]:
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
                    line = f"a client actor died ({_reason(error)}); its work is done again"
                    self._lost(line, losses[id(done.task)])
                continue
            self.last_seconds[done.actor] = seconds = sum(result.seconds.values())
            if isinstance(done.task, PhaseTask):
                self.owners[done.task.start] = done.actor
                if not done.task.phase:
                    work, before = self.done.get(done.actor, (0.0, 0.0))
                    self.done[done.actor] = work / 2 + done.task.work, before / 2 + seconds
            yield done.task, result

    def _dispatch(self, queue: deque[Task], sent: dict[Any, _Sent], sticky: bool) -> None:
        """Give tasks to actors that have none; to quick ones a second while many are left, so that they need not wait
        for it. Whoever is slow would keep another from it."""
        load = Counter(id(item.actor) for item in sent.values())
        for depth in (1, 2):
            for actor in self.alive:
                if load[id(actor)] >= depth:
                    continue
                if depth == 2 and (
                    self.last_seconds.get(actor, math.inf) > QUICK_SECONDS or len(queue) <= 2 * self.slots
                ):
                    continue
                task = self._choose(queue, actor) if sticky else (queue[0] if queue else None)
                if task is None:
                    continue
                queue.remove(task)
                load[id(actor)] += 1
                self._send(actor, task, sent)

    def _send(self, actor: Any, task: Task, sent: dict[Any, _Sent]) -> None:
        within_reach = task
        if isinstance(task, (PhaseTask, ScoreTask)) and task.states:
            within_reach = replace(task, states=[self._near(state, self.nodes[actor]) for state in task.states])
        sent[actor.run.remote(within_reach)] = _Sent(actor, task)

    def _near(self, state: Handle | None, node: str) -> Handle | None:
        """A state as an actor on ``node`` can get it: a file there, or an object on its way from where the file is."""
        if not isinstance(state, StateFile) or state.node == node:
            return state
        if state.node == self.states.node:
            return ray.put(self.states.read(state))
        return self.keepers[state.node].read.remote(state)

    def _choose(self, queue: deque[Task], actor: Any) -> Task | None:
        """The first task whose earlier phase ``actor`` did, or whose owner is gone."""
        for task in queue:
            owner = self.owners.get(task.start)
            if owner is actor or owner not in self.actors:
                return task
        return None

    def _lost(self, line: str, times: int) -> None:
        """Replace an actor; ``times``: how often the same has happened in a row."""
        self.note(line)
        if times > self.max_retries:
            raise ClientError(f"{line}: {times} times in a row (engine.max_retries={self.max_retries})")
        self._expect(create_actor(self.experiment, self.data, self.states.node))

    def keep(self, name: str, vectors: State) -> Handle:
        # what clients need must be within reach of every node; what the server alone needs is a file beside it
        return ray.put(vectors) if self.experiment.algorithm.needs_received else self.states.write(name, vectors)

    def fetch(self, handle: Handle) -> State:
        return self.states.read(handle) if isinstance(handle, StateFile) else _get(handle)

    def store(self, handle: Handle, target: Path) -> None:
        if isinstance(handle, StateFile) and handle.node == self.states.node:
            self.states.store(handle, target)
        elif isinstance(handle, StateFile):
            save_file(_get(self.keepers[handle.node].read.remote(handle)), target)
        else:
            save_file(_get(handle), target)

    def drop(self, handles: Iterable[Handle]) -> None:
        by_node: dict[str, list[StateFile]] = {}
        for handle in handles:
            if isinstance(handle, StateFile):
                by_node.setdefault(handle.node, []).append(handle)
        self.states.drop(by_node.pop(self.states.node, ()))
        for node, files in by_node.items():
            self.keepers[node].drop.remote(files)

    def _remove(self, actor: Any) -> None:
        """Give an actor up, whether it is dead or not."""
        self.actors.remove(actor)
        if actor in self.alive:
            self.alive.remove(actor)
        ray.kill(actor)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors, self.alive, self.starting = [], [], {}
        for keeper in self.keepers.values():
            with contextlib.suppress(RayError):
                ray.get(keeper.clear.remote(), timeout=10)
            ray.kill(keeper)
        self.keepers = {}


def _get(handle: Handle) -> Any:
    """What a handle names; :class:`StateLost` if it went with its node."""
    try:
        return ray.get(handle)
    except RayError as error:
        raise StateLost(f"a client's state is gone with its node: {_reason(error)}") from None


def _cause(error: RayTaskError) -> Exception:
    """The exception that a task raised, as it was raised."""
    cause = error.cause
    return cause if isinstance(cause, (UserError, ClientError)) else error


def _creation_cause(error: RayError) -> Exception:
    return ClientError(f"a client actor could not be set up\n{error}")


def _reason(error: Exception) -> str:
    if isinstance(error, GetTimeoutError):
        return "no answer"
    return first_line(error)
