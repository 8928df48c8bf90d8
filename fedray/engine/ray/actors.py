"""The client actors of a run: starts them, replaces those that die, and follows the cluster as it grows and shrinks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from fedray.engine.ray.client_actor import create_actor
from fedray.engine.ray.cluster import (
    SAY_SECONDS,
    actor_count,
    gpu_share,
    in_trial_group,
    living_nodes,
    shortage,
    why_waiting,
)
from fedray.engine.ray.stored import StoredData
from fedray.errors import EXPLAINED, ClientError, UserError, first_line
from fedray.experiment.experiment import Experiment

LOOK_SECONDS = 5.0
"""The shortest time between two looks at the size of the cluster."""


REST_SECONDS, LONGEST_REST_SECONDS = 5.0, 80.0
"""How long an actor gets no task that could not fetch the data of one: at first, and at most. After a cable was out,
some connections are dead for minutes, of which only one end knows."""


@dataclass(eq=False)
class Member:
    """A client actor of a run, as the server sees it. ``actor`` is Ray's handle of it, ``node`` Ray's id of its node,
    ``host`` the name of that machine, and ``pid`` the number of the process.

    ``samples`` counts the samples of its tasks, and ``seconds`` how long they took; each new task halves the weight of
    the older ones. ``heard`` is the time (``time.monotonic()``) of its last sign of life. ``silent`` is true while it
    gets no tasks because it does not answer. ``answers_lost`` counts the results in a row that were lost on their way
    to the server. ``rests`` counts the tasks in a row whose data it could not fetch from other nodes, and
    ``rests_until`` is the time until which it gets no further tasks for this reason.
    """

    actor: Any
    node: str = ""
    host: str = ""
    pid: int = 0
    samples: float = 0.0
    seconds: float = 0.0
    heard: float = 0.0
    silent: bool = False
    answers_lost: int = 0
    rests: int = 0
    rests_until: float = 0.0

    def rest(self) -> None:
        """Gives the actor no tasks for a while, because it could not fetch data from another node: :data:`REST_SECONDS`
        at first, and twice as long each further time in a row, up to :data:`LONGEST_REST_SECONDS`."""
        self.rests_until = time.monotonic() + min(REST_SECONDS * 2**self.rests, LONGEST_REST_SECONDS)
        self.rests += 1

    @property
    def speed(self) -> float | None:
        """The samples per second of the actor's tasks, mostly the latest ones. None before the first task is done."""
        return self.samples / self.seconds if self.seconds else None

    def learn(self, samples: float, seconds: float) -> None:
        """Updates :attr:`speed` after a task that had this number of ``samples`` in its mini-batches, and took so many
        ``seconds``."""
        self.samples, self.seconds = self.samples / 2 + samples, self.seconds / 2 + seconds


class Actors:
    """The client actors of a run (the Ray processes that train clients), on any nodes of the cluster. Replaces those
    that die, and starts more if the cluster grows.

    Args:
        experiment: What the run computes, with its configuration.
        data: The data set in Ray's object store.
        server: Ray's id of the server's node.
        actors: Ray's handles of the actors that the user's process has created.
        entered: ``entered(member, description)`` is called when an actor has started. ``description`` describes its
            process: a dict with keys such as ``node``, ``pid`` and ``device``.
        say: ``say(line)`` shows a line to the user.
        note: ``note(line)`` writes a line into the run's log.

    The attribute ``alive`` lists the actors that can do tasks. ``starting`` is a dict with those that have not started
    yet. The key of each is Ray's reference to the result of its start, which :meth:`enter` takes.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: StoredData,
        server: str,
        actors: Sequence[Any],
        entered: Callable[[Member, dict[str, Any]], None],
        say: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self.experiment, self.data, self.server = experiment, data, server
        self.entered, self.say, self.note = entered, say, note
        engine = experiment.config.engine
        self.patience, self.max_retries = engine.start_timeout, engine.max_retries
        self.elastic = engine.actors == "auto" and in_trial_group() is None
        self.wanted = len(actors)
        self.starting: dict[Any, Member] = {}
        self.alive: list[Member] = []
        # the number of actors that fit on the cluster when the last of them could not be started
        self._unfit: int | None = None
        self._failed_starts = 0
        self._looked = self._alone = self._said = time.monotonic()
        for actor in actors:
            self._expect(actor)

    def _expect(self, actor: Any) -> None:
        self.starting[actor.start.remote()] = Member(actor)

    def await_all(self) -> None:
        """Waits until all actors have started, and tells the user how many have. Raises :class:`UserError` if that
        takes longer than ``engine.start_timeout``."""
        began = time.monotonic()
        while self.starting:
            left = began + self.patience - time.monotonic()
            ready, _ = ray.wait(list(self.starting), num_returns=1, timeout=max(0.0, min(left, SAY_SECONDS)))
            for reference in ready:
                self.enter(reference)
            if not ready and left <= 0:
                waiting = len(self.starting)
                self.close()
                late = f"{waiting} of them did not start in engine.start_timeout={self.patience:g} s"
                raise UserError(f"{self._shortage()}: {late}; a smaller engine.actors leaves room for other runs")
            if not ready:
                why = why_waiting(self.experiment, self.wanted)
                self.say(f"{self.waiting()} ({time.monotonic() - began:.0f} s){why} ...")

    def waiting(self) -> str:
        """Returns a text that says how many actors have started, and where: ``4 of 6 client actors have started: 2 on
        host1, 2 on host2``."""
        hosts = ", ".join(f"{count} on {host}" for host, count in Counter(each.host for each in self.alive).items())
        total = len(self.alive) + len(self.starting)
        return f"{len(self.alive)} of {total} client actors have started{f': {hosts}' if hosts else ''}"

    def enter(self, reference: Any) -> None:
        """Moves an actor that has started from ``starting`` to ``alive``, so that it gets tasks. ``reference`` is its
        key in ``starting``, Ray's reference to the result of its start.

        An actor that died while it started is replaced. If that happened more than ``engine.max_retries`` times in a
        row, the run goes on with the other actors, or :class:`ClientError` is raised if there are none. An error of an
        actor's own setup is raised here too, because a new actor would fail for the same reason.
        """
        member = self.starting.pop(reference)
        try:
            member.node, machine = ray.get(reference)
        except RayTaskError as error:
            raise cause_of(error, member) from None
        except (RayActorError, OutOfMemoryError) as error:
            if getattr(error, "cause", None) is not None or "creation task" in str(error):
                raise ClientError(f"a client actor could not be set up\n{error}") from None
            ray.kill(member.actor)
            self._failed_starts += 1
            line = f"a client actor died while it started ({first_line(error)})"
            others = len(self.alive) + len(self.starting)
            if self._failed_starts > self.max_retries and others:
                self.say(f"{line}, {self._failed_starts} times in a row; going on with {others}")
                self._unfit, self._failed_starts = self._fitting(), 0
            else:
                self.replace(line, self._failed_starts)
            return
        self._failed_starts = 0
        member.host, member.pid, member.heard = machine["node"], machine["pid"], time.monotonic()
        self.note(f"client actor: pid {member.pid} on {member.host}, {machine['device']}")
        self.entered(member, machine)
        self.alive.append(member)

    def lost(self, member: Member, error: Exception, work: str, times: int) -> None:
        """Replaces the actor ``member``, which has died, and tells the user. ``error`` is Ray's error, and ``work`` is
        what the actor was doing, such as "4 clients". ``times`` is how often in a row an actor has died while it did
        the same task. If this is more than ``engine.max_retries``, :class:`ClientError` is raised."""
        self.remove(member)
        what = f"a client actor died on {member.host} (pid {member.pid})"
        if isinstance(error, OutOfMemoryError) or "low on memory" in str(error):
            what = f"{what}, as {member.host} ran out of memory"
        elif member.node not in {node["NodeID"] for node in living_nodes()}:
            what = f"{what}, as {member.host} has left the cluster"
        self.replace(f"{what}; doing {work} again", times)

    def replace(self, line: str, times: int = 1) -> None:
        """Starts an actor in place of one that is gone; with ``engine.actors=auto`` only if the cluster has room for
        it. ``line`` says why the actor is gone, and is shown to the user. ``times`` is how often in a row this has
        happened. If that is more than ``engine.max_retries``, :class:`ClientError` is raised instead."""
        self.say(line)
        if times > self.max_retries:
            raise ClientError(f"{line}: {times} times in a row (engine.max_retries={self.max_retries})")
        if not self.elastic or len(self.alive) + len(self.starting) < self._fitting():
            self._expect(create_actor(self.experiment, self.data, self.server))

    def _fitting(self) -> int:
        self._looked = time.monotonic()
        return actor_count(self.experiment)

    def follow_cluster(self) -> None:
        """Starts further actors if the cluster has grown and ``engine.actors`` is ``auto``, and gives up actors that
        have not started if it has shrunk. This is done at most every :data:`LOOK_SECONDS`."""
        if not self.elastic or time.monotonic() - self._looked < LOOK_SECONDS:
            return
        fitting = self._fitting()
        self._unfit = self._unfit if fitting == self._unfit else None
        more = 0 if self._unfit else fitting - len(self.alive) - len(self.starting)
        if more > 0:
            self.say(f"the cluster has grown: starting {more} more client actor{'s' if more > 1 else ''}")
        for _ in range(more):
            self._expect(create_actor(self.experiment, self.data, self.server))
        for reference in list(self.starting)[: max(0, -more)]:
            ray.kill(self.starting.pop(reference).actor)

    def check_left(self) -> None:
        """Tells the user if no actor is left. Raises :class:`UserError` if none has been left for
        ``engine.start_timeout`` seconds."""
        now = time.monotonic()
        if self.alive:
            self._alone = self._said = now
        elif now - self._alone >= self.patience:
            raise UserError(f"{self._shortage()}: all client actors were lost, and none could be replaced")
        elif now - self._said >= SAY_SECONDS:
            self._said = now
            self.say(f"no client actor is left; waiting for others to start ({now - self._alone:.0f} s) ...")

    def _shortage(self) -> str:
        share = {"num_cpus": self.experiment.config.engine.cpus_per_actor, "num_gpus": gpu_share(self.experiment)}
        return shortage(self.wanted, share)

    def remove(self, member: Member) -> None:
        """Ends the actor ``member``, whether it has died or still runs, so that it gets no tasks any more."""
        if member in self.alive:
            self.alive.remove(member)
        ray.kill(member.actor)

    def close(self) -> None:
        """Ends all actors of the run, also those that have not started yet."""
        for member in [*self.alive, *self.starting.values()]:
            ray.kill(member.actor)
        self.alive, self.starting = [], {}


def cause_of(error: RayTaskError, member: Member) -> Exception:
    """Returns the exception that is to be raised for a task that failed in the actor ``member``: fedray's own exception
    if Ray's ``error`` wraps one, or else ``error``. Its attribute ``host`` is set to the name of the actor's host."""
    cause = error.cause if isinstance(error.cause, EXPLAINED) else error
    if member.host:
        cause.host = member.host  # type: ignore[union-attr]
    return cause
