"""The final runs of a suite: the best trial of each sweep runs again on seeds that no trial used, and is evaluated on
the test set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedray.errors import last_line
from fedray.tracking.folder import is_finished
from fedray.tracking.progress import number_text
from fedray.tuning.spec import SweepSpec, first_seed, merge_settings
from fedray.tuning.study import sampled_values
from fedray.tuning.trial import Assignment, Line, Message, RunEnd, TrialEnd

if TYPE_CHECKING:
    from fedray.tuning.sweep import Sweep, SweepView


@dataclass(frozen=True)
class Final:
    """A configuration that a suite runs again on fresh seeds, which no trial has used: that of the best trial of the
    sweep ``spec``, possibly with some keys changed.

    ``changed`` maps each changed key (dotted) to its new value. If keys are changed, the suite's table names the change
    by the text ``what``, and the name of the runs' folder ends with ``suffix``. Otherwise these are empty.
    """

    spec: SweepSpec
    changed: Mapping[str, Any] = field(default_factory=dict)
    what: str = ""
    suffix: str = ""

    @property
    def label(self) -> str:
        """The name of this configuration's row in the suite's table. It is the name of the sweep within the suite, such
        as ``fedavg``, followed by a comma and the text ``what`` unless that is empty."""
        return f"{label_of(self.spec)}, {self.what}" if self.what else label_of(self.spec)

    def folder(self, trial: int) -> Path:
        """Returns the folder of the runs on fresh seeds if trial number ``trial`` is the best, such as
        ``sweeps/sample/fedavg/winners/trial-0007``. It has a subfolder for each seed.

        The number is part of the folder's name, because another trial may win if the suite is continued with more
        trials.
        """
        name = f"trial-{trial:04d}"
        return self.spec.folder / "winners" / (f"{name}-{self.suffix}" if self.suffix else name)


def label_of(spec: SweepSpec) -> str:
    """Returns the name of a sweep within its suite, which is the name of the algorithm's space file: ``fedavg`` if the
    sweep is called ``sample/fedavg``."""
    return spec.name.rpartition("/")[2]


def fresh_seeds(spec: SweepSpec, seeds: int) -> range:
    """Returns seeds that no trial of a sweep has used: the ``seeds`` numbers that follow the seeds of its trials. If
    the trials ran with seeds 0 and 1, ``fresh_seeds(spec, 3)`` is 2, 3, 4."""
    first = first_seed(spec.base) + spec.tune.seeds
    return range(first, first + seeds)


class FinalRuns:
    """Supplies the final runs of a suite for one configuration, that of the best trial of the search ``sweep``. It is
    run once on each of several fresh seeds, which no trial has used. An instance is a source of trials
    (:class:`~fedray.tuning.trial_source.TrialSource`), an object that decides which trials run. Each run on a fresh
    seed counts as a trial.

    ``final`` describes the configuration, of which some keys may be changed. ``seeds`` is the number of fresh seeds.
    :meth:`next_trial` returns None until the sweep has ended, because only then is its best trial known. Runs whose
    folders show that they are finished are not made again. The attribute ``failures`` counts the runs that failed.
    ``view`` shows the user how each run ended.
    """

    def __init__(self, sweep: Sweep, final: Final, seeds: int, view: SweepView) -> None:
        self.sweep, self.final, self.view = sweep, final, view
        self.left = list(fresh_seeds(sweep.spec, seeds))
        self.failures = 0

    @property
    def exhausted(self) -> bool:
        self._skip_finished()
        return self.sweep.finished and not self.left

    def next_trial(self) -> Assignment | None:
        self._skip_finished()
        if not self.sweep.finished or not self.left:
            return None
        seed = self.left.pop(0)
        folder = self._run_folder(seed)
        run = merge_settings(self.sweep.base, sampled_values(self.sweep.study.best()[0]))
        run = merge_settings(run, self.final.changed) | dict(self.sweep.engine)
        run |= self.sweep.spec.output_keys(folder.parent)
        run |= {"run.name": folder.name, "run.seed": seed, "run.resume": "auto"}
        # the budget is infinite, so that no round reaches a step and these runs are never pruned
        return Assignment(str(seed), [run], "train_loss", "rounds", math.inf)

    def report(self, key: str, message: Message) -> bool:
        if isinstance(message, RunEnd) and message.status == "interrupted":
            self.trial_failed(key, "a callback ended it before its last round")
        elif isinstance(message, RunEnd):
            metric = self.sweep.study.base.get("task.metric") or "accuracy"
            value = message.row.get(f"test_{metric}", math.nan)
            self._say(f"winner on seed {key}: {message.status}, {metric.replace('_', ' ')} {number_text(value)}")
        elif isinstance(message, Line):
            self.view.say(message.of(f"{self._label}: winner on seed {key}"))
        elif isinstance(message, TrialEnd) and message.error is not None:
            self.trial_failed(key, message.error)
        return False

    def trial_lost(self, key: str, error: str) -> None:
        self._say(f"winner on seed {key}: {error}; it continues from its last checkpoint")

    def trial_failed(self, key: str, error: str) -> None:
        self.failures += 1
        self._say(f"winner on seed {key} failed: {last_line(error)}")

    def _run_folder(self, seed: int) -> Path:
        return self.final.folder(self.sweep.study.best()[0].number) / f"seed-{seed}"

    def _skip_finished(self) -> None:
        """Removes the seeds of finished runs from ``left``. If the sweep has ended without a trial that can win, it
        removes all."""
        if self.sweep.finished and not self.sweep.study.best():
            self.left = []
        if self.sweep.finished:
            self.left = [seed for seed in self.left if not is_finished(self._run_folder(seed))]

    def _say(self, line: str) -> None:
        self.view.say(f"{self._label}: {line}")

    @property
    def _label(self) -> str:
        return self.sweep.name.removesuffix(label_of(self.sweep.spec)) + self.final.label
