"""A pool of Ray actors. Whoever dies is replaced, and what it was doing is done again elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from torch import Tensor

from fedray.data.federated import FederatedData
from fedray.engine.process import describe, environment, settled
from fedray.engine.tasks import ChunkTask, Handle, Task
from fedray.engine.worker import Worker
from fedray.errors import ClientError, UserError
from fedray.resolve import Experiment


class ClientActor:
    """Simulates whichever clients it is given."""

    def __init__(self, experiment: Experiment, data: FederatedData) -> None:
        engine = experiment.config.engine
        self._settled = settled(engine.threads, engine.portable_bits)
        self._settled.__enter__()
        self.device = experiment.device
        self.worker = Worker(experiment, data, fetch=ray.get)

    def describe(self) -> dict[str, Any]:
        return describe(self.device)

    def run(self, task: Task) -> Any:
        """The result; a chunk's new states follow it as objects of their own, so that each can be fetched alone."""
        result = self.worker.run(task)
        states = getattr(result, "states", None)
        if not states:
            return result
        result.states = []  # type: ignore[union-attr]
        return (result, *states)


class RayPool:
    """``actors`` client actors, created at once and awaited for ``engine.start_timeout`` seconds."""

    def __init__(self, experiment: Experiment, data: Any, actors: int, note: Callable[[str], None]) -> None:
        self.experiment, self.data, self.note = experiment, data, note
        engine = experiment.config.engine
        self.patience, self.max_retries = engine.start_timeout, engine.max_retries
        self.slots = actors
        self.share = {"num_cpus": engine.cpus_per_actor, "num_gpus": gpu_share(experiment)}
        self.actors: list[Any] = []
        self.starting: dict[Any, Any] = {}
        self.idle: list[Any] = []
        self.machines: list[dict[str, Any]] = []
        self.last_actor: dict[tuple[int, int], Any] = {}
        self.losses = 0
        for _ in range(actors):
            self._create()
        self._await_all()

    def _create(self) -> None:
        engine = self.experiment.config.engine
        actor = (
            ray.remote(ClientActor)
            .options(
                **self.share,
                scheduling_strategy="SPREAD",
                max_restarts=0,
                runtime_env={"env_vars": environment(engine.threads, engine.portable_bits)},
            )
            .remote(self.experiment, self.data)
        )
        self.actors.append(actor)
        self.starting[actor.describe.remote()] = actor

    def _await_all(self) -> None:
        deadline = time.monotonic() + self.patience
        while self.starting:
            self._welcome(timeout=max(0.0, deadline - time.monotonic()))
            if self.starting and time.monotonic() >= deadline:
                waiting = len(self.starting)
                self.close()
                raise UserError(f"{shortage(self.slots, self.share)}: {waiting} of them did not start in {self.patience:g} s")

    def _welcome(self, timeout: float) -> None:
        """Take actors that have started into the idle ones."""
        ready, _ = ray.wait(list(self.starting), num_returns=1, timeout=timeout)
        for reference in ready:
            self._enter(reference)

    def _enter(self, reference: Any) -> None:
        actor = self.starting.pop(reference)
        try:
            machine = ray.get(reference)
        except RayTaskError as error:
            raise _cause(error) from None
        except RayActorError as error:
            inner = getattr(error, "cause", None)
            if inner is not None or "creation task" in str(error):
                raise _creation_cause(error) from None
            self._remove(actor)
            self._lost(f"a client actor died while it started: {_first_line(error)}")
            return
        self.machines.append(machine)
        self.note(f"client actor: pid {machine['pid']} on {machine['node']}, {machine['device']}")
        self.idle.append(actor)

    def publish(self, tensors: dict[str, Tensor]) -> Handle:
        return ray.put({name: tensor.cpu().numpy() for name, tensor in tensors.items()})

    def map(self, tasks: Sequence[Task], sticky: bool = False) -> Iterator[tuple[Task, Any]]:
        queue = deque(tasks)
        busy: dict[Any, tuple[Any, Task, list[Any]]] = {}
        while queue or busy:
            self._dispatch(queue, busy, sticky)
            waiting = [*busy, *self.starting]
            ready, _ = ray.wait(waiting, num_returns=1, timeout=None if busy else self.patience)
            if not ready:
                raise UserError(f"{shortage(self.slots, self.share)}: all client actors were lost, and none could be replaced")
            for reference in ready:
                if reference in self.starting:
                    self._enter(reference)
                    continue
                actor, task, states = busy.pop(reference)
                try:
                    result = ray.get(reference)
                except RayTaskError as error:
                    self.idle.append(actor)
                    raise _cause(error) from None
                except RayError as error:
                    queue.appendleft(task)
                    self._remove(actor)
                    self._lost(f"a client actor died ({_first_line(error)}); its work is done again")
                    continue
                self.losses = 0
                self.idle.append(actor)
                if isinstance(task, ChunkTask):
                    self.last_actor[task.round, task.start] = actor
                    if states:
                        result.states = states
                yield task, result
        if tasks and isinstance(tasks[0], ChunkTask):
            self.last_actor = {key: actor for key, actor in self.last_actor.items() if key[0] == tasks[0].round}

    def _dispatch(self, queue: deque[Task], busy: dict[Any, tuple[Any, Task, list[Any]]], sticky: bool) -> None:
        """Give each idle actor a task: with ``sticky``, one whose earlier phase it did, if that actor still lives."""
        for actor in list(self.idle):
            task = self._choose(queue, actor, busy) if sticky else (queue[0] if queue else None)
            if task is None:
                continue
            queue.remove(task)
            self.idle.remove(actor)
            stateful = isinstance(task, ChunkTask) and bool(task.states) and task.phase == self._state_phase()
            if stateful:
                references = actor.run.options(num_returns=1 + len(task.ids)).remote(task)  # type: ignore[union-attr]
                busy[references[0]] = actor, task, references[1:]
            else:
                busy[actor.run.remote(task)] = actor, task, []

    def _state_phase(self) -> int:
        return self.experiment.algorithm.phases.index("train")

    def _choose(self, queue: deque[Task], actor: Any, busy: dict[Any, Any]) -> Task | None:
        alive = {id(other) for other in (*self.idle, *(entry[0] for entry in busy.values()))}
        for task in queue:
            owner = self.last_actor.get((task.round, task.start))  # type: ignore[union-attr]
            if owner is actor or owner is None or id(owner) not in alive:
                return task
        return None

    def _lost(self, line: str) -> None:
        self.losses += 1
        self.note(line)
        if self.losses > self.max_retries:
            raise UserError(f"{line}: {self.losses} losses in a row (engine.max_retries={self.max_retries})")
        self._create()

    def fetch(self, handles: Sequence[Handle]) -> list[Any]:
        return ray.get(list(handles))

    def hold(self, states: Iterable[dict[str, Any]]) -> list[Handle]:
        return [ray.put(state) for state in states]

    def _remove(self, actor: Any) -> None:
        self.actors.remove(actor)
        ray.kill(actor)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors, self.idle, self.starting = [], [], {}


def gpu_share(experiment: Experiment) -> float:
    """The GPU fraction of a client actor."""
    engine = experiment.config.engine
    return 1 / engine.actors_per_gpu if engine.actors_per_gpu else engine.gpus_per_actor


def shortage(actors: int, share: dict[str, float]) -> str:
    """What was asked for and what the cluster has, in words."""
    total, free = ray.cluster_resources(), ray.available_resources()
    asked = " and ".join(f"{amount:g} {name[4:].upper()[:-1]}" for name, amount in share.items() if amount)
    have = ", ".join(f"{total.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in ("CPU", "GPU"))
    return f"engine.actors={actors} of {asked or 'no resources'} each; the cluster has {have}"


def _cause(error: RayTaskError) -> Exception:
    """The exception that a task raised, as it was raised."""
    cause = error.cause
    return cause if isinstance(cause, (UserError, ClientError)) else error


def _creation_cause(error: RayActorError) -> Exception:
    return ClientError(f"a client actor could not be set up\n{error}")


def _first_line(error: Exception) -> str:
    if isinstance(error, GetTimeoutError):
        return "no answer"
    return str(error).strip().splitlines()[0]
