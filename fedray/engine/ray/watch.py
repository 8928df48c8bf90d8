"""Notices client actors that do not answer, and answers that were lost on their way."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from fedray.engine.ray.actors import Member
from fedray.engine.ray.cluster import SAY_SECONDS
from fedray.engine.tasks import EvalTask, PhaseTask, Task

ASK_SECONDS = 3.0
"""An actor that owes a result and has not been heard of for so many seconds is asked for a sign of life."""

CALM_SECONDS = 60.0
"""The seconds between two lines about actors that simply compute for long."""

FIRST_SECONDS = 5.0
"""After so many seconds a line says what the first round waits for. It is short, because starting the server may have
taken nearly as long as the user should be without a line."""

LATE_SECONDS = 2.0
"""A task that takes so many seconds longer than twice the expected time is done by an actor that has nothing to do,
too. What holds it up may be a connection that is only now being made again after the network has failed."""


@dataclass(eq=False)
class TaskInFlight:
    """A task that was sent to a client actor, and whose result has not come yet.

    ``member`` is the actor, and ``number`` grows with each task that is sent. ``sums`` is Ray's reference to the sums
    of the clients' uploads if these may stay on the actor's node, and otherwise None. ``at`` is the time
    (``time.monotonic()``) of sending. ``missing`` is the time of an answer by which the actor turned out not to have
    the task (any more), or None if it may still have it. ``elsewhere`` says that the task was given to another actor,
    too. ``done_on`` is the node of the actor whose result of the same task came first, or None.
    """

    member: Member
    task: Task
    number: int
    sums: Any = None
    at: float = field(default_factory=time.monotonic)
    missing: float | None = None
    elsewhere: bool = False
    done_on: str | None = None

    def expected(self) -> float:
        """Returns how many seconds the task should take at the actor's speed so far. The result is infinity if this is
        not known: before the actor's first task is done, and for tasks other than a round's first phase."""
        speed = self.member.speed
        if speed is None or not isinstance(self.task, PhaseTask) or self.task.phase:
            return math.inf
        return self.task.work / speed


def work_of(tasks: Sequence[Task]) -> str:
    """Returns a text for messages that says what ``tasks`` do: ``4 clients``, ``an evaluation``, or both with "and"."""
    clients = sum(len(task.ids) for task in tasks if not isinstance(task, EvalTask))
    found = [f"{clients} client{'s' if clients > 1 else ''}"] if clients else []
    return " and ".join([*found, *(["an evaluation"] if any(isinstance(task, EvalTask) for task in tasks) else [])])


def overdue(owed: Sequence[TaskInFlight], now: float, by: float = 0.0) -> list[TaskInFlight]:
    """Returns the late tasks of one actor. ``owed`` are its tasks whose results have not come, in the order in which it
    does them. A task is late if the time since the first of them was sent is more than twice the time that this task
    and those before it should take, plus ``by`` seconds. ``now`` is the current time (``time.monotonic()``)."""
    expected, found = 0.0, []
    for sent in owed:
        expected += sent.expected()
        if now - owed[0].at - 2 * expected > by:
            found.append(sent)
    return found


class Watch:
    """Watches the client actors that owe results: notices those that do not answer, and answers that were lost on their
    way, and has the tasks done again. The pool calls :meth:`look` about once a second.

    Args:
        alive: ``alive()`` returns the actors that have started and were not given up.
        sent: The tasks whose results have not come, by Ray's reference to the result.
        owing: ``owing()`` returns Ray's ids of the nodes that were asked for the sum of their clients' uploads, but
            have not sent it yet.
        say: ``say(line)`` shows a line to the user.
        again: ``again(sent)`` has a task done by another actor.
        lost: ``lost(member)`` replaces an actor.
        limit: ``engine.answer_timeout``, the seconds of silence after which ``again`` is called for an actor's tasks.
        patience: The seconds of silence after which ``lost`` is called.
    """

    def __init__(
        self,
        alive: Callable[[], Sequence[Member]],
        sent: dict[Any, TaskInFlight],
        owing: Callable[[], set[str]],
        say: Callable[[str], None],
        again: Callable[[TaskInFlight], None],
        lost: Callable[[Member], None],
        limit: float,
        patience: float,
    ) -> None:
        self.alive, self.sent, self.owing = alive, sent, owing
        self.say, self.again, self.lost = say, again, lost
        self.limit, self.patience = limit, patience
        self.questions: dict[Any, Member] = {}
        self._asked: dict[Member, float] = {}
        self._said: dict[str, float] = {}
        self._arrived, self._has_results = time.monotonic(), False

    def arrived(self, member: Member) -> None:
        """Notes that a result of the actor ``member`` has come, which is a sign of life, too."""
        self._arrived, member.answers_lost, member.rests = time.monotonic(), 0, 0
        self._has_results = True
        self._heard(member)

    def _heard(self, member: Member) -> None:
        member.heard = time.monotonic()
        if member.silent:
            member.silent = False
            self.say(f"{member.host} answers again")

    def hear(self, question: Any) -> None:
        """Processes an actor's answer to the question which task it is doing. The answer is also a sign of life.
        ``question`` is Ray's reference to the answer, a key of the attribute ``questions``. If the actor has died, it
        is replaced."""
        member = self.questions.pop(question)
        try:
            running = ray.get(question)
        except ActorDiedError:
            if member in self.alive():
                self.lost(member)
            return
        except RayError:
            # it could not be asked
            return
        self._heard(member)
        for sent in self._owed(member):
            if running is not None and running <= sent.number:
                sent.missing = None
            elif sent.missing is None:
                sent.missing = member.heard

    def _owed(self, member: Member) -> list[TaskInFlight]:
        return [sent for sent in self.sent.values() if sent.member is member]

    def look(self, idle: bool) -> None:
        """Checks the client actors that owe something, such as the result of a task, and asks those that have been
        silent for some seconds for a sign of life. The user is told about actors that do not answer.

        If an actor does not answer for ``limit`` seconds, its tasks are given to other actors, and after ``patience``
        seconds it is replaced. Tasks whose results were lost on their way are done again. ``idle`` says that at least
        one actor has nothing to do. In that case, tasks that take far longer than expected are given to another actor,
        too.
        """
        now = time.monotonic()
        quiet: dict[str, list[Member]] = defaultdict(list)
        owing = self.owing()
        for member in list(self.alive()):
            owed = self._owed(member)
            if not owed and not member.silent and member.node not in owing:
                continue
            silence = now - member.heard
            if silence >= ASK_SECONDS and now - self._asked.get(member, -math.inf) >= ASK_SECONDS:
                self._ask(member, now)
            if silence >= self.patience:
                self.lost(member)
            elif silence >= self.limit and not member.silent and self._others(member):
                member.silent = True
                tasks = [sent.task for sent in owed if not sent.elsewhere]
                done = f"doing {work_of(tasks)} elsewhere" if tasks else "going on without it"
                self.say(f"no answer from {member.host} for {silence:.0f} s; {done}")
                self._elsewhere(owed)
            elif silence >= SAY_SECONDS:
                quiet[member.host].append(member)
            else:
                self._look_at_tasks(member, owed, now, idle)
        self._tell(quiet, now)

    def say_once(self, about: str, line: str) -> None:
        """Shows ``line`` to the user, unless one about the same thing was shown less than :data:`SAY_SECONDS` ago.
        ``about`` is a text that identifies the thing."""
        now = time.monotonic()
        if now - self._said.get(about, -math.inf) >= SAY_SECONDS:
            self._said[about] = now
            self.say(line)

    def _others(self, member: Member) -> bool:
        return any(other is not member and not other.silent for other in self.alive())

    def _elsewhere(self, owed: Sequence[TaskInFlight]) -> None:
        for sent in owed:
            if not sent.elsewhere:
                sent.elsewhere = True
                self.again(sent)

    def _look_at_tasks(self, member: Member, owed: Sequence[TaskInFlight], now: float, idle: bool) -> None:
        """Has tasks of an actor that answers done again: those whose results were lost on their way, and, if another
        actor is ``idle``, those that take far longer than expected."""
        gone = [
            reference
            for reference, sent in self.sent.items()
            if sent.member is member and sent.missing and now - sent.missing >= self.limit
        ]
        lost = [sent for sent in map(self.sent.pop, gone) if not sent.elsewhere]
        if lost:
            self.say(f"an answer of {member.host} was lost; doing {work_of([each.task for each in lost])} again")
            self._elsewhere(lost)
            member.answers_lost += 1
            if member.answers_lost > 1:
                self.lost(member)
                return
        late = overdue(owed, now, LATE_SECONDS) if idle and not lost else []
        for sent in late:
            if sent.elsewhere:
                continue
            seconds = now - sent.at
            self.say_once(
                f"late {member.host}",
                f"{member.host} has worked on {work_of([sent.task])} for {seconds:.0f} s, more than twice as long "
                "as expected; doing them elsewhere, too",
            )
            self._elsewhere([sent])

    def _ask(self, member: Member, now: float) -> None:
        self._asked[member] = now
        pending = [each for each, asked in self.questions.items() if asked is member]
        # a question may be lost, too, so it is asked again; of those before the last three no answer is expected
        for old in pending[:-3]:
            del self.questions[old]
        self.questions[member.actor.progress.remote()] = member

    def _tell(self, quiet: dict[str, list[Member]], now: float) -> None:
        for host, members in quiet.items():
            if now - self._said.get(host, -math.inf) >= SAY_SECONDS:
                self._said[host] = now
                silence = now - min(member.heard for member in members)
                tasks = [sent.task for member in members for sent in self._owed(member) if not sent.elsewhere]
                going = f"waiting for {work_of(tasks)}" if tasks else "going on without it"
                self.say(f"no answer from {host} for {silence:.0f} s; {going}")
        waited = now - self._arrived
        is_late = any(overdue(self._owed(member), now) for member in {sent.member for sent in self.sent.values()})
        pause = SAY_SECONDS if is_late or not self._has_results else CALM_SECONDS
        is_long = waited >= (pause if self._has_results else FIRST_SECONDS)
        if not quiet and self.sent and is_long and now - self._said.get("", -math.inf) >= pause:
            self._said[""] = now
            hosts = sorted({sent.member.host for sent in self.sent.values()})
            tasks = [sent.task for sent in self.sent.values()]
            self.say(f"still waiting for {work_of(tasks)} on {', '.join(hosts)} ({waited:.0f} s) ...")
