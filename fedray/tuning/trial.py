"""Runs one trial in the process that computes it: its runs, one after another, each in a folder. Uses no Ray."""

from __future__ import annotations

import math
import queue
import shutil
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedray.config import load
from fedray.engine.callbacks import Report
from fedray.errors import EXPLAINED, OutputLost
from fedray.tracking.progress import Display
from fedray.tuning.axis import amount, steps_reached
from fedray.warning import WARNING

if TYPE_CHECKING:
    from fedray.experiment.custom import CustomObjects
    from fedray.tracking.result import RunResult


class Assignment(NamedTuple):
    """A trial (one choice of values in a sweep) in the form in which it is sent to the process that runs it.

    ``key`` is the trial's name among those of the sweep or suite that it comes from. ``runs`` has a configuration
    (dotted keys) for each seed. ``objective`` is the metric to be optimised. ``budget`` is how much of ``axis``
    (rounds, bytes or flops) a whole run takes, and a twentieth of it is a step. Whenever a run has reached a further
    step, the trial reports the first round from there on in which the objective was evaluated. With ``alone`` the run
    is no trial, but one that the user asked for: it keeps its checkpoints, and its warnings are messages.
    """

    key: str
    runs: Sequence[Mapping[str, Any]]
    objective: str
    axis: str
    budget: float
    alone: bool = False


class Line(NamedTuple):
    """A message that a run sends to its source: a warning for the user. Runs that are not ``alone`` send only those of
    loggers."""

    text: str

    def of(self, run: str) -> str:
        """Returns the warning with the name of its run, as a warning again."""
        return f"{WARNING}{run}: {self.text.removeprefix(WARNING)}"


class Round(NamedTuple):
    """A message that a running trial sends to its source, the object that decides which trials run. It reports a round
    of one of the trial's runs, in which the objective was evaluated.

    ``run`` is the position of the run among the trial's runs, from 0. ``steps`` are the numbers of the steps
    (twentieths of the run, from 1) that the run has reached since its previous message, or, in the run's first message
    after a restart of the trial, of all steps that it has reached. ``row`` is the round's row of metrics.csv, with a
    value for each column. ``is_last`` marks the last round of the trial's last run.
    """

    run: int
    steps: Sequence[int]
    row: Mapping[str, Any]
    is_last: bool


class RunEnd(NamedTuple):
    """A message that a running trial sends to its source, the object that decides which trials run: one of the trial's
    runs has ended.

    ``run`` is the run's position among the trial's runs, from 0, ``status`` is how it ended: "completed", "diverged",
    or "interrupted" if a callback has ended it. ``row`` is its last row of metrics.csv, with the last value of what was
    not measured in that round.
    """

    run: int
    status: str
    row: Mapping[str, Any]


class TrialEnd(NamedTuple):
    """The last message of a trial: the trial has ended.

    If ``interrupted`` is true, the trial is not finished, and continues from its checkpoint when the program is started
    again. This happens if the user stopped the program (``error`` is then None), or if the results of a run could not
    be sent to the URI in ``tune.output`` (``error`` then says so). If ``interrupted`` is false, ``error`` says why the
    trial failed, and is None if it did not fail.
    """

    error: str | None = None
    interrupted: bool = False


Message = Round | RunEnd | TrialEnd | Line
"""The messages of a trial to its source."""

Reporter = Callable[[Message], bool]
"""A function that receives a message of a trial, and returns whether the trial must stop."""


def run_trial(
    assignment: Assignment, custom: CustomObjects, report: Reporter, interrupted: Callable[[], bool] = lambda: False
) -> TrialEnd:
    """Makes the runs of a trial one after another, in this process, and returns a :class:`TrialEnd`, which says how the
    trial ended. ``assignment`` has the configurations of the runs.

    ``custom`` has the data set and the user's objects, with which all runs are made. ``report`` is called with a
    :class:`Round` whenever a run has reached a further step, and with a :class:`RunEnd` at the end of each run. If it
    returns True, the trial is stopped for good. ``interrupted`` takes no arguments and is called after rounds. If it
    returns True, the trial stops there and keeps its checkpoint, so that it can be continued.

    A run that was finished before is not made again, but its end is reported. A run that was interrupted continues from
    its checkpoint. The checkpoints of runs that will not be continued are deleted; that of a run which a callback has
    ended is kept until the trial has ended.
    """
    from fedray.api import run_experiment

    def warn(line: str) -> None:
        # the sweep says itself what all of its trials have in common
        if line.startswith(WARNING if assignment.alone else f"{WARNING}run.loggers"):
            report(Line(line))

    display, kept, is_stopped = Display(quiet=True, warn=warn), list[Path](), False
    for number, settings in enumerate(assignment.runs):
        config, step = load(settings), 0

        def on_round(finished: Report, run: int = number, rounds: int = config.rounds) -> bool:
            nonlocal step, is_stopped
            row = dict(finished.metrics)
            now = steps_reached(row, assignment.axis, assignment.budget)
            if now == step or math.isnan(amount(row, assignment.objective)):
                return interrupted()
            before, step = step, now
            is_last = finished.round == rounds and run + 1 == len(assignment.runs)
            is_stopped = report(Round(run, range(before + 1, now + 1), row, is_last))
            return is_stopped or interrupted()

        is_put_off = False

        def tidy(result: RunResult) -> None:
            nonlocal is_put_off
            is_early = result.summary["status"] == "interrupted"
            is_put_off = is_early and interrupted()
            if not is_put_off and not assignment.alone:
                kept.append(result.folder / "checkpoints")
                if is_stopped or not is_early:
                    shutil.rmtree(kept.pop(), ignore_errors=True)

        try:
            result = run_experiment(config, lambda: custom, [on_round, *custom.callbacks], display, tidy)
        except OutputLost as error:
            return TrialEnd(str(error), interrupted=True)
        if is_put_off:
            return TrialEnd(interrupted=True)
        status, rows = result.summary["status"], result.metrics
        if status == "interrupted":
            rows = rows.ffill()
        last_row: Any = rows.iloc[-1].to_dict() if len(rows) else {}
        if is_stopped or report(RunEnd(number, status, last_row)) or status == "diverged":
            break
    for folder in kept if not interrupted() else ():
        shutil.rmtree(folder, ignore_errors=True)
    return TrialEnd()


class TrialThread:
    """A thread that runs a trial (``assignment``), and pauses at each message of the trial until the next message is
    asked for.

    Ray Tune asks for a trial's results one at a time, whereas a trial calls a function whenever it has a result; the
    thread connects the two. It starts only with the first call of :meth:`next_message`, because Tune may create a
    process for a trial and then let another process run that trial. ``custom`` and ``interrupted`` are as in
    :func:`run_trial`.
    """

    def __init__(self, assignment: Assignment, custom: CustomObjects, interrupted: Callable[[], bool]) -> None:
        self._work = partial(run_trial, assignment, custom, self._report, interrupted)
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # for each message, whether the trial must stop
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._must_stop = False
        self._thread = threading.Thread(target=self._run, name=assignment.key, daemon=True)

    def next_message(self) -> Message:
        """Lets the trial compute until its next message (a finished round, the end of a run, or the end of the trial),
        and returns the message.

        The last message is a :class:`TrialEnd`. Do not call this method again after that. Between two calls the trial
        waits, so that it never computes further than Tune has seen. If the trial raises an exception, the TrialEnd has
        the error.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._answers.put(False)
        return self._messages.get()

    def stop(self) -> None:
        """Stops the trial at the message that :meth:`next_message` returned last, and waits until the trial has ended.

        Does nothing if the trial has not begun.
        """
        if self._thread.ident is not None:
            self._must_stop = True
            self._answers.put(True)
            self._thread.join()

    def _report(self, message: Message) -> bool:
        if self._must_stop:
            return True
        self._messages.put(message)
        return self._answers.get()

    def _run(self) -> None:
        try:
            end = self._work()
        except EXPLAINED as known:
            end = TrialEnd(str(known))
        except BaseException:
            end = TrialEnd(traceback.format_exc())
        self._messages.put(end)
