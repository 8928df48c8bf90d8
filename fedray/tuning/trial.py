"""A trial where it is computed: its runs, one after another, each in a folder of its own. Knows nothing of Ray."""

from __future__ import annotations

import math
import queue
import shutil
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedray.config import load
from fedray.engine.run import Report
from fedray.errors import ClientError, UserError
from fedray.tuning.axis import reached, value_of

if TYPE_CHECKING:
    from fedray.experiment import Own


class Assignment(NamedTuple):
    """What is to be run: ``runs`` are configurations with dotted keys, one per seed. ``key`` names it among all.

    Rounds in which ``objective`` was evaluated are told when they reach a further step of ``axis``, whose whole is
    ``budget``.
    """

    key: str
    runs: Sequence[Mapping[str, Any]]
    objective: str
    axis: str
    budget: float


class Round(NamedTuple):
    """A round of run number ``run`` of the trial: its row of metrics.csv, and the steps of the axis that it reached.
    ``last``: whether it is the trial's last."""

    run: int
    steps: Sequence[int]
    row: Mapping[str, Any]
    last: bool


class RunEnd(NamedTuple):
    """A run's end: its status, and its last row of metrics.csv."""

    run: int
    status: str
    row: Mapping[str, Any]


class TrialEnd(NamedTuple):
    """The end of a trial: what went wrong, if something did; ``interrupted``: whether it is to go on another time."""

    error: str | None = None
    interrupted: bool = False


Message = Round | RunEnd | TrialEnd

Tell = Callable[[Message], bool]
"""Hands a message over; gives whether the trial is to stop."""


def carry_out(
    assignment: Assignment, own: Own, tell: Tell, interrupted: Callable[[], bool] = lambda: False
) -> TrialEnd:
    """Run all runs; those that are finished in their folders are read, and unfinished ones go on.

    ``own`` is what all runs are made from; ``interrupted`` is asked after every round. Runs that will not go on keep no
    checkpoints.
    """
    from fedray.simulation import run_experiment

    for number, settings in enumerate(assignment.runs):
        before, rounds = 0, load(settings).rounds

        def on_round(report: Report, run: int = number, rounds: int = rounds) -> bool:
            nonlocal before
            row = dict(report.metrics)
            now = reached(row, assignment.axis, assignment.budget)
            if now == before or math.isnan(value_of(row, assignment.objective)):
                return interrupted()
            last, before = before, now
            ends = report.round == rounds and run + 1 == len(assignment.runs)
            return tell(Round(run, range(last + 1, now + 1), row, ends)) or interrupted()

        result = run_experiment(load(settings), lambda: own, [on_round])
        status, rows = result.summary["status"], result.metrics
        if status == "interrupted" and interrupted():
            return TrialEnd(interrupted=True)
        shutil.rmtree(result.folder / "checkpoints", ignore_errors=True)
        last_row: Any = rows.iloc[-1].to_dict() if len(rows) else {}
        if status == "interrupted" or tell(RunEnd(number, status, last_row)) or status == "diverged":
            break
    return TrialEnd()


class Running:
    """A trial in a thread of its own, which begins when its first message is asked for, and waits after each one until
    the next is.

    It does not begin before, as Tune may make a process for a trial and then give the trial to another.
    """

    def __init__(self, assignment: Assignment, own: Own, interrupted: Callable[[], bool]) -> None:
        self._work = lambda: carry_out(assignment, own, self._tell, interrupted)
        self._messages: queue.Queue[Message] = queue.Queue()
        self._answers: queue.Queue[bool] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=assignment.key, daemon=True)

    def next(self) -> Message:
        """The next message; the trial goes on from the one before."""
        if self._begun:
            self._answers.put(False)
        else:
            self._thread.start()
        return self._messages.get()

    def stop(self) -> None:
        """Let the run end after the round in progress, and wait for that."""
        if self._begun:
            self._answers.put(True)
            self._thread.join()

    @property
    def _begun(self) -> bool:
        return self._thread.ident is not None

    def _tell(self, message: Message) -> bool:
        self._messages.put(message)
        answer = self._answers.get()
        if answer:
            # whatever else is told gets the same answer
            self._answers.put(True)
        return answer

    def _run(self) -> None:
        try:
            end = self._work()
        except (UserError, ClientError) as known:
            end = TrialEnd(str(known))
        except BaseException:
            end = TrialEnd(traceback.format_exc())
        self._messages.put(end)
