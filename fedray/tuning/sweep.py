"""A sweep while it runs: it chooses the next trials, follows the running ones, and records their results."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedray.config import dump_yaml, expand, load
from fedray.errors import last_line
from fedray.tuning.axis import STEPS, amount
from fedray.tuning.space import Values
from fedray.tuning.spec import SweepSpec, first_seed, merge_settings
from fedray.tuning.study import ENDED, Study, sampled_values
from fedray.tuning.trial import Assignment, Line, Message, Round, RunEnd
from fedray.util.files import write_whole


@dataclass
class RunningTrial:
    """The progress of a trial (one choice of values in a sweep) that is running now, for the progress display and for
    the pruner, which stops bad trials early.

    ``values`` has the sampled values by dotted key. ``finals`` has a list for each of the trial's runs that has ended,
    with the last value of each objective. ``value`` is the mean of the first objective over the runs so far, of which
    the last may still be running. ``step`` says how far the trial is: it counts twentieths of a run, over all of its
    runs. ``diverged`` says that one of the runs diverged.
    """

    values: Values
    finals: list[list[float]] = field(default_factory=list)
    value: float = math.nan
    step: int = 0
    diverged: bool = False


class SweepView(Protocol):
    """The protocol of objects that are told what happens in a sweep, usually to show it to the user, as
    :class:`fedray.tuning.view.View` does."""

    def say(self, line: str) -> None:
        """Called with a ``line`` of text for the user."""

    def progress(self) -> None:
        """Called when one of the running trials has reached a further step, that is, when a further 5 % of one of its
        runs is done."""

    def ended(self, sweep: Sweep, number: int, trial: RunningTrial, how: str) -> None:
        """Called when trial ``number`` of ``sweep`` has ended. ``trial`` has its values and results, and ``how`` is
        complete, pruned, diverged or failed."""


class NoView:
    """A :class:`SweepView` that shows nothing. A sweep has it until another view is set."""

    def say(self, line: str) -> None: ...

    def progress(self) -> None: ...

    def ended(self, sweep: Sweep, number: int, trial: RunningTrial, how: str) -> None: ...


class Sweep:
    """A sweep that is running. It is a source of trials (:class:`~fedray.tuning.trial_source.TrialSource`): it hands
    out the next trials, and records the results of the running ones in ``study``.

    ``spec`` describes the sweep. ``base`` is the configuration of all trials without the searched keys, by dotted key.
    ``total`` is the number of trials, and ``budget`` is how much of the pruner's axis (rounds, bytes or FLOPs) a whole
    run takes. ``notes`` are lines that are shown to the user before the sweep starts. The attributes ``engine``, the
    settings ``engine.*`` that depend on the cluster, and ``view``, which shows the progress, are set before it runs.
    """

    def __init__(
        self, spec: SweepSpec, study: Study, base: Mapping[str, Any], total: int, budget: float, notes: Sequence[str]
    ) -> None:
        self.spec, self.folder, self.study, self.base = spec, spec.folder, study, base
        self.total, self.budget, self.notes = total, budget, notes
        self.objectives = list(spec.tune.objective)
        self.engine: Mapping[str, Any] = {}
        self.running: dict[int, RunningTrial] = {}
        self.view: SweepView = NoView()
        self._said: set[str] = set()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def exhausted(self) -> bool:
        return not self.study.left(self.total)

    @property
    def finished(self) -> bool:
        """Whether all trials of the sweep have ended."""
        return self.exhausted and not self.running

    def introduction(self, max_concurrent_trials: int) -> str:
        """Returns the line that is shown when the sweep starts, such as ``mine: 20 trials of fedprox, 5 done before, 4
        at once, tpe -> sweeps/mine``. ``max_concurrent_trials`` is the number of trials at once."""
        done = self.study.count(*ENDED)
        return (
            f"{self.name}: {self.study.wanted(self.total)} trials of {load(self.base).algorithm.name}"
            + (f", {done} done before" if done else "")
            + f", {max_concurrent_trials} at once, {self.spec.sampler} -> {self.folder}"
        )

    def next_trial(self) -> Assignment | None:
        if self.exhausted:
            return None
        asked = self.study.ask()
        self.running[asked.number] = RunningTrial(asked.values)
        return self._assignment(asked.number, asked.values)

    def fraction_done(self, trial: RunningTrial) -> float:
        """Returns how much of the running ``trial`` is done, from 0 to 1, over all of its runs, for the progress
        display."""
        return trial.step / (STEPS * self.spec.tune.seeds)

    def _assignment(self, number: int, values: Values) -> Assignment:
        tune = self.spec.tune
        base = merge_settings(self.base, values) | dict(self.engine)
        first = first_seed(base)
        runs = [
            base
            | self.spec.output_keys(self.spec.trial_folder(number))
            | {"run.name": f"seed-{seed}", "run.seed": seed, "run.resume": "auto", "run.eval_test": False}
            for seed in range(first, first + tune.seeds)
        ]
        return Assignment(str(number), runs, self.objectives[0], tune.pruner.axis, self.budget)

    def report(self, key: str, message: Message) -> bool:
        number = int(key)
        trial = self.running[number]
        if isinstance(message, Round):
            return self._record_round(number, trial, message)
        if isinstance(message, RunEnd):
            return self._record_run_end(number, trial, message)
        if isinstance(message, Line):
            # of many trials one is enough
            if message.text not in self._said:
                self._said.add(message.text)
                self.view.say(message.of(f"{self.name}: trial {number}"))
            return False
        if message.interrupted:
            # in the study it stays a running trial, which the next process of this sweep continues
            del self.running[number]
            if message.error is not None:
                self.view.say(f"{self.name}: trial {number} is put off: {message.error}")
        elif message.error is not None:
            self.trial_failed(key, message.error)
        elif trial.diverged:
            self.study.complete(number, [math.nan] * len(self.objectives))
            self._end(number, "diverged")
        else:
            self.study.complete(number, [statistics.fmean(column) for column in zip(*trial.finals, strict=True)])
            self._end(number, "complete")
            self.write_best()
        return False

    def _record_round(self, number: int, trial: RunningTrial, message: Round) -> bool:
        value = amount(message.row, self.objectives[0])
        trial.value = statistics.fmean([*(final[0] for final in trial.finals), value])
        # the last step of a run but the last is that of its end, after which runs are compared
        most = STEPS if message.run + 1 == self.spec.tune.seeds else STEPS - 1
        steps = [message.run * STEPS + step for step in dict.fromkeys(min(step, most) for step in message.steps)]
        # stopping a trial after its last round would save nothing
        return self._record_steps(number, trial, steps, may_stop=not message.is_last)

    def _record_run_end(self, number: int, trial: RunningTrial, message: RunEnd) -> bool:
        trial.diverged |= message.status == "diverged"
        trial.finals.append([amount(message.row, name) for name in self.objectives])
        trial.value = statistics.fmean([final[0] for final in trial.finals])
        if trial.diverged or message.run + 1 == self.spec.tune.seeds:
            return False
        return self._record_steps(number, trial, [(message.run + 1) * STEPS], may_stop=True)

    def _record_steps(self, number: int, trial: RunningTrial, steps: Sequence[int], may_stop: bool) -> bool:
        """Records the objective's value of the running trial ``number`` at ``steps``, which count its progress. Returns
        whether the pruner stops the trial, which it never does if ``may_stop`` is false."""
        trial.step = steps[-1]
        stop = len(self.objectives) == 1 and self.study.report(number, steps, trial.value) and may_stop
        if stop:
            self.study.prune(number)
            self._end(number, "pruned")
        else:
            self.view.progress()
        return stop

    def trial_lost(self, key: str, error: str) -> None:
        self.running[int(key)] = RunningTrial(self.running[int(key)].values)
        self.view.say(f"{self.name}: trial {key}: {error}; it continues from its last checkpoint")

    def trial_failed(self, key: str, error: str) -> None:
        """Records in the study that trial number ``key`` failed, and writes ``error`` to error.txt in the folder of the
        trial."""
        number = int(key)
        folder = self.spec.trial_folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "error.txt", error.rstrip() + "\n")
        self.study.fail(number, error)
        self._end(number, "failed")
        self.view.say(f"{self.name}: trial {number} failed: {last_line(error)} ({folder / 'error.txt'})")

    def _end(self, number: int, how: str) -> None:
        self.view.ended(self, number, self.running.pop(number), how)

    def write_best(self) -> None:
        """Writes the configuration of the best trial to best.yaml in the sweep's folder. ``fedray run`` can run it.

        With several objectives there is a file such as best-0007.yaml for each trial on the Pareto front. Files of
        earlier best trials are removed.
        """
        best = self.study.best()
        single = len(self.objectives) == 1
        names = {"best.yaml" if single else f"best-{trial.number:04d}.yaml": trial for trial in best}
        for name, trial in names.items():
            settings = merge_settings(self.base, sampled_values(trial))
            settings["run.name"] = f"{self.folder.name}-{trial.number}"
            if "run.log_clients" not in self.spec.base:
                del settings["run.log_clients"]
            write_whole(self.folder / name, dump_yaml(expand(settings)))
        for old in self.folder.glob("best*.yaml"):
            # others are copies of the user's
            if re.fullmatch(r"best(-\d{4,})?\.yaml", old.name) and old.name not in names:
                old.unlink()
