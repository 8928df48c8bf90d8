"""Gives the tasks of a run to Ray actors. If an actor dies or does not answer, another one does its tasks."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError, RayTaskError

from fedray.core.structure import map_leaves
from fedray.core.vectors import Vector
from fedray.engine.pool import Region
from fedray.engine.ray.actors import Actors, Member, cause_of
from fedray.engine.ray.host_sums import HostSums, inline_bytes
from fedray.engine.ray.other_nodes import OtherNodes, files_of
from fedray.engine.ray.stored import StoredData
from fedray.engine.ray.watch import TaskInFlight, Watch, work_of
from fedray.engine.state.packing import Enclosed, Packed
from fedray.engine.state.states import State, StateFile, StateFolder
from fedray.engine.tasks import AnyTask, Handle, PhaseTask, Task, working_seconds
from fedray.errors import ClientError, Unreachable
from fedray.experiment.experiment import Experiment

ENCLOSED_BYTES = 1 << 16
"""Broadcasts up to this many bytes travel within each task. A larger one is put into Ray's object store once, and each
actor fetches it from there, which takes about a millisecond."""

MARGIN = 1.2
"""The factor by which an actor may be slower than measured before without other actors having to wait for it."""

TICK = 1.0
"""The seconds between two looks at what the pool waits for."""


class RayPool:
    """The pool of the Ray engine: the workers that train and evaluate a run's clients. Each is a Ray process (a client
    actor) on any node. One that dies is replaced, and the tasks of one that does not answer are given to others.

    ``data`` is the data set in Ray's object store. ``actors`` are Ray's handles of the client actors that the user's
    process has created; the constructor waits for them, at most ``engine.start_timeout`` seconds. ``states`` is the
    folder on the server's node for the states that clients keep between rounds. ``say(line)`` shows a line to the user,
    and ``note(line)`` writes one into the run's log. ``machines`` has a dict about each process that has been an actor,
    and ``joined(dict)``, which the server may replace, is called for each new one.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: StoredData,
        actors: Sequence[Any],
        states: StateFolder,
        say: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self.experiment, self.say = experiment, say
        self.attempt = 0
        self.machines: list[dict[str, Any]] = []
        self.joined: Callable[[dict[str, Any]], None] = lambda machine: None
        engine = experiment.config.engine
        self.nodes = OtherNodes(experiment, states, say, note)
        self._sums = HostSums(self.nodes)
        self.actors = Actors(experiment, data, states.node, actors, self._entered, say, note)
        self._sent: dict[Any, TaskInFlight] = {}
        self._watch = Watch(
            lambda: self.actors.alive, self._sent, self._sums.owing, say, self._again, self._lost_silent,
            engine.answer_timeout, engine.start_timeout,
        )  # fmt: skip
        # the actors that did the tasks of the last phase, by the task's first position
        self._owners: dict[int, Member] = {}
        self._queue: deque[Task] = deque()
        self._left: set[int] = set()
        self._repeated: set[int] = set()
        self._losses: Counter[int] = Counter()
        self._numbers = itertools.count()
        # the nodes that the numbers of regions stand for
        self._regions: list[str] = [""]
        self._published, self._looked = 0, 0.0
        # when each node's actors gave their last sign of life, also those that are gone
        self._heard: dict[str, float] = {}
        # how often in a row the data of a task could not be fetched
        self._unreached: Counter[int] = Counter()
        # references to copies in Ray's store of files of this node, for the tasks of one phase
        self._copies: dict[Any, Any] = {}
        self.actors.await_all()

    def _entered(self, member: Member, machine: dict[str, Any]) -> None:
        self.nodes.add(member.node, member.host)
        self.machines.append(machine)
        self.joined(machine)

    @property
    def slots(self) -> int:
        """The number of client actors that can be given tasks now, or 1 if there are none."""
        return max(1, len(self._active()))

    @property
    def regions(self) -> Sequence[Region]:
        """A :class:`Region` for each node with client actors: how many there are, and the sum of their speeds in
        samples per second (1 for each actor until all speeds are known)."""
        active, speeds = self._active(), self._speeds()
        self._regions = sorted({member.node for member in active}) or [""]
        return [
            Region(max(1, len(here)), sum(speeds.get(member, 1.0) for member in here) or 1.0)
            for here in ([member for member in active if member.node == node] for node in self._regions)
        ]

    def _active(self) -> list[Member]:
        """Returns the actors that get tasks."""
        answering, now = [member for member in self.actors.alive if not member.silent], time.monotonic()
        return [member for member in answering if member.rests_until <= now] or answering

    def _answering_nodes(self) -> set[str]:
        return {member.node for member in self.actors.alive if not member.silent}

    @property
    def task_fraction(self) -> float:
        """The size that the next task of a round should have, as a fraction of an even share (the remaining work
        divided by the number of actors).

        It is slowest speed / mean speed / :data:`MARGIN`, so that the slowest actor finishes its task before the others
        run out of work. With 100 and 300 samples a second it is 100 / 200 / 1.2 = 0.42, and 0.5 as long as a speed is
        unknown.
        """
        speeds = self._speeds().values()
        return min(speeds) / statistics.fmean(speeds) / MARGIN if speeds else 0.5

    def _speeds(self) -> dict[Member, float]:
        """Returns the speed of each actor in samples per second, or an empty mapping if some speeds are not known."""
        speeds = {member: member.speed for member in self._active()}
        known = {member: speed for member, speed in speeds.items() if speed is not None}
        return known if len(known) == len(speeds) else {}

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
        self._queue, self._left = deque(tasks), set(map(id, tasks))
        self._repeated, self._losses, self._unreached = set(), Counter(), Counter()
        self._sums.clear()
        self.actors.follow_cluster()
        while self._left or self._sums.pending:
            self._dispatch(sticky)
            for reference in self._ready():
                if reference in self.actors.starting:
                    self.actors.enter(reference)
                elif reference in self._watch.questions:
                    self._watch.hear(reference)
                elif reference in self._sums.coming:
                    yield from self._summed(reference)
                else:
                    yield from self._taken(reference)
            self._ask_for_sums()
            self._look_around()

    def _ready(self) -> Sequence[Any]:
        awaited = [*self._sent, *self._sums.coming, *self.actors.starting, *self._watch.questions]
        ready, _ = ray.wait(awaited, num_returns=1, timeout=TICK) if awaited else ([], [])
        return ready

    def _taken(self, reference: Any) -> Iterator[tuple[Any, Any]]:
        """Yields the task and the result of ``reference``, unless the task is done already or has to be done again."""
        sent = self._sent.pop(reference)
        task, member, wanted = sent.task, sent.member, id(sent.task) in self._left
        try:
            result, apart = ray.get(reference) if sent.sums is not None else (ray.get(reference), 0)
            if 0 < apart <= inline_bytes():
                for name, nodes in ray.get(sent.sums).items():
                    result.sums[name].nodes = nodes
        except RayTaskError as error:
            if isinstance(error.cause, Unreachable):
                self._again(sent)
                if wanted:
                    self._not_fetched(sent)
            elif wanted:
                raise cause_of(error, member) from None
            return
        except (ActorUnavailableError, ObjectLostError):
            # it gets tasks again once it has answered a question
            member.silent = True
            self._again(sent)
            if wanted:
                self.say(f"the connection to {member.host} failed; doing {work_of([task])} again")
            return
        except RayError as error:
            self._again(sent)
            self._lost(member, error, task)
            return
        self._watch.arrived(member)
        if not wanted:
            # the states of the result that came first are those that count
            if isinstance(task, PhaseTask) and sent.done_on not in (None, member.node):
                self.drop(result.states)
            return
        self._left.remove(id(task))
        if id(task) in self._repeated:
            self._queue = deque(other for other in self._queue if other is not task)
        for other in self._sent.values():
            if other.task is task:
                other.done_on = member.node
        if isinstance(task, PhaseTask):
            self._owners[task.start] = member
            if not task.phase:
                member.learn(task.work, working_seconds(result.seconds))
            if apart > inline_bytes():
                self._sums.hold(member.node, task, result, sent.sums, apart)
                return
        yield task, result

    def _not_fetched(self, sent: TaskInFlight) -> None:
        """Notes that an actor could not fetch the data of its task from another node. Raises :class:`StateLost` if this
        happens again, and that node has been silent for too long."""
        task, member, files = sent.task, sent.member, files_of(sent.task)
        there = f"no answer from {' and '.join(self.nodes.hosts_of(files)) or 'a host'} to {member.host}"
        self._watch.say_once(there, f"{there}; doing {work_of([task])} again until there is one")
        elsewhere = {file.node for file in files} - {self.nodes.here.node, member.node}
        if elsewhere <= self._answering_nodes():
            # its own connections, or those to nodes that answer the server, fail
            member.rest()
            self._unreached[id(task)] += 1
            for node in elsewhere if self._unreached[id(task)] > 1 else ():
                self.nodes.check(node, sent.at)

    def _ask_for_sums(self) -> None:
        """Asks each node whose actors have nothing more to do in this phase for the sum of its clients' uploads."""
        if not self._sums.groups or self._queue:
            return
        busy = {sent.member.node for sent in self._sent.values() if id(sent.task) in self._left}
        asked = self._sums.ask(busy)
        for member in (each for each in self.actors.alive if each.node in asked):
            member.heard = time.monotonic()

    def _summed(self, reference: Any) -> Iterator[tuple[Any, Any]]:
        """Yields the tasks and results of a node whose sum has come, or has the tasks done again if it was lost."""
        try:
            yield from self._sums.take(reference)
        except (RayActorError, ObjectLostError, RayTaskError) as error:
            if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
                raise
            self._without_sum(reference)

    def _without_sum(self, reference: Any) -> None:
        """Has tasks done again because the sum of their uploads, to which ``reference`` refers, was lost or does not
        come. Raises :class:`ClientError` if a task has been lost more than ``engine.max_retries`` times."""
        group = self._sums.coming.pop(reference)
        tasks = [task for task, _ in group.results]
        self.nodes.forget(group.node)
        line = f"a sum over {work_of(tasks)} was lost on its host; doing them again"
        self.say(line)
        self._losses.update(map(id, tasks))
        if max(self._losses[id(task)] for task in tasks) > self.actors.max_retries:
            raise ClientError(f"{line}: again and again (engine.max_retries={self.actors.max_retries})")
        self._left |= set(map(id, tasks))
        self._queue.extend(tasks)

    def _again(self, sent: TaskInFlight) -> None:
        """Puts the task of ``sent`` before those that wait for an actor, unless it is there or done already."""
        if id(sent.task) in self._left and not any(sent.task is task for task in self._queue):
            self._repeated.add(id(sent.task))
            self._queue.appendleft(sent.task)

    def _lost(self, member: Member, error: Exception, task: Task) -> None:
        if member in self.actors.alive:
            self._losses[id(task)] += 1
            self.actors.lost(member, error, work_of([task]), self._losses[id(task)])

    def _lost_silent(self, member: Member) -> None:
        """Replaces an actor that has given no answer for long, or whose answers are lost again and again."""
        for reference in [each for each, sent in self._sent.items() if sent.member is member]:
            self._again(self._sent.pop(reference))
        self.actors.remove(member)
        self.actors.replace(f"a client actor on {member.host} (pid {member.pid}) does not answer any more")

    def _look_around(self) -> None:
        """Checks, about once a second, for actors that do not answer and sums that do not come. Raises
        :class:`UserError` if no actor has been left for ``engine.start_timeout`` seconds."""
        now = time.monotonic()
        if now - self._looked < TICK:
            return
        self._looked = now
        owing = {sent.member for sent in self._sent.values()}
        self._watch.look(idle=not self._queue and len(owing) < len(self._active()))
        answering = self._answering_nodes()
        limit = self.experiment.config.engine.answer_timeout
        late = {*self._sums.late(limit), *(r for r, group in self._sums.coming.items() if group.node not in answering)}
        for reference in late:
            self._without_sum(reference)
        self._check_states()
        self.actors.check_left()

    def _check_states(self) -> None:
        """Raises :class:`StateLost` if a task waits for clients' states on a node that has been silent for so long that
        it is given up."""
        for member in self.actors.alive:
            self._heard[member.node] = max(member.heard, self._heard.get(member.node, 0.0))
        silent = self._heard.keys() - self._answering_nodes() - {self.nodes.here.node}
        waiting = [*self._queue, *(sent.task for sent in self._sent.values() if id(sent.task) in self._left)]
        for node in silent & {file.node for task in waiting for file in files_of(task)} if silent else ():
            self.nodes.check(node, self._heard[node], asks=True)

    def start_over(self) -> None:
        """Prepares the pool for going back to the run's last checkpoint: forgets the tasks that are being done, whose
        results nobody needs any more, and removes the clients' states on other nodes than the server's."""
        self.attempt += 1
        for sent in self._sent.values():
            sent.done_on = None
        self._left, self._owners = set(), {}
        self._sums.clear()
        self.nodes.clear(self._answering_nodes())

    def settle(self) -> None:
        """Does nothing: an actor returns a result only after it has written the files."""

    def _dispatch(self, sticky: bool) -> None:
        """Sends a task to each actor that has none. Because sending a task takes milliseconds, an actor gets a second
        task before it has finished the first, as long as more tasks are left than there are actors. A slow actor gets
        no second task, because the others can do it sooner."""
        if not self._queue:
            return
        active, load, speeds = self._active(), Counter(sent.member for sent in self._sent.values()), self._speeds()
        usual = statistics.fmean(speeds.values()) if speeds else 0.0
        fast = {member for member, speed in speeds.items() if speed * MARGIN >= usual}
        for depth in (1, 2):
            for member in active:
                if load[member] >= depth:
                    continue
                if depth == 2 and (len(self._queue) <= len(active) or member not in fast):
                    continue
                task = self._choose(member, active) if sticky else self._nearest(member)
                if task is None:
                    continue
                self._queue.remove(task)
                if not load[member]:
                    member.heard = time.monotonic()
                load[member] += 1
                self._send(member, task)

    def _send(self, member: Member, task: Task) -> None:
        number = next(self._numbers)
        near = self.nodes.within_reach(task, member.node, self._copies)
        if isinstance(task, PhaseTask) and member.node != self.nodes.here.node:
            reference, sums = member.actor.run_apart.options(num_returns=2).remote(number, near)
        else:
            reference, sums = member.actor.run.remote(number, near), None
        self._sent[reference] = TaskInFlight(member, task, number, sums)

    def _choose(self, member: Member, active: Sequence[Member]) -> Task | None:
        """Returns the first task in the queue whose previous phase was done by ``member``, or by an actor that gets no
        tasks any more. Returns None if there is no such task."""
        for task in self._queue:
            owner = self._owners.get(task.start)
            if owner is member or owner not in active:
                return task
        return None

    def _nearest(self, member: Member) -> Task | None:
        """Returns the task in the queue that ``member`` should get in the first phase: the first one of its region, or
        of all regions if there is none. Returns None if the queue is empty."""
        if len(self._regions) > 1:
            for task in self._queue:
                if isinstance(task, PhaseTask) and self._regions[task.region : task.region + 1] == [member.node]:
                    return task
        return self._queue[0] if self._queue else None

    def keep(self, name: str, vectors: State) -> StateFile:
        # a file, because an object in Ray's store would take memory for as long as any client may need it
        return self.nodes.here.write(name, vectors)

    def fetch(self, handle: StateFile) -> State:
        return self.nodes.here.read(handle)

    def store(self, handle: StateFile, target: Path) -> None:
        self.nodes.store(handle, target)

    def drop(self, handles: Iterable[StateFile]) -> None:
        self.nodes.drop(handles)

    def close(self) -> None:
        silent = {member.node for member in self.actors.alive} - self._answering_nodes()
        self.actors.close()
        self.nodes.close(silent)
