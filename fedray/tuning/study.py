"""A sweep's record of its trials: an Optuna study that only one process writes.

No fact is recorded twice. Trials that were running when the process died are started again with the same values.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, CmaEsSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from fedray.tuning.space import Space, Values

optuna.logging.set_verbosity(optuna.logging.WARNING)

ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
"""The states of trials that will not be continued."""

VALUES, ERROR, RETRIES = "values", "error", "retries"
"""The names of a trial's user attributes: the sampled values as JSON, the reason why the trial failed, and the number
of the failed trial that it tries again."""


class AskedTrial(NamedTuple):
    """A trial (one choice of values in a sweep) that is to be run: its ``number`` in the study, from 0, and its
    ``values`` by dotted key."""

    number: int
    values: Values


class Study:
    """The record of a sweep in Optuna: it chooses the values of new trials, and records how trials proceed and end.

    Args:
        storage: The Optuna storage in which the record is kept.
        name: The name of the record. If ``storage`` already has a record with this name, it is continued.
        space: The searched keys, with the values that each may take.
        base: The values of the keys that are not searched.
        directions: Whether to maximize or minimize each objective.
        sampler: How values are chosen: "tpe", "random", "grid", "cmaes" or "nsga2".
        pruner: Decides which trials are stopped early. None stops none.
        seed: The seed of the sampler.
        first: Values that are tried before any others, as a dict for each trial.
        population: The size of a generation of NSGA-II; the first generation is drawn at random.

    Raises:
        ValueError: Values of ``first`` are outside the space.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        space: Space,
        base: Mapping[str, Any],
        directions: Sequence[Literal["maximize", "minimize"]],
        sampler: str = "tpe",
        pruner: BasePruner | None = None,
        seed: int = 0,
        first: Sequence[Values] = (),
        population: int = 50,
        most: int | None = None,
    ) -> None:
        self.space, self.base, self.sampler, self.seed, self.population = space, base, sampler, seed, population
        self._study = optuna.create_study(
            storage=storage,
            study_name=name,
            directions=list(directions),
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        self._running: dict[int, Trial] = {}
        self._interrupted = [trial for trial in self.trials if trial.state == TrialState.RUNNING]
        grid = space.grid(base) if sampler == "grid" else []
        most = len(grid) if most is None else most
        if most < len(grid):
            # the first ones in order would have the same values of most keys
            grid = [grid[place] for place in np.random.default_rng(seed).permutation(len(grid))]
        # a killed process may have queued only some of these values
        queued = [trial.system_attrs.get("fixed_params") for trial in self.trials if RETRIES not in trial.user_attrs]
        for values in (*first, *grid):
            if sampler == "grid" and len(queued) >= most:
                break
            if (stored := space.stored(values, base)) not in queued:
                queued.append(stored)
                self._study.enqueue_trial(stored)

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials of the sweep in the form in which Optuna records them, by number, including those that are still
        queued."""
        return self._study.get_trials(deepcopy=False)

    def best(self) -> list[FrozenTrial]:
        """Returns a list with the best trial, or, with several objectives, all trials on the Pareto front. It is empty
        while no trial has completed with finite values."""
        return best_trials(self._study)

    def count(self, *states: TrialState) -> int:
        """Returns how many trials of the sweep are in one of the given ``states``, such as ``TrialState.PRUNED``."""
        return sum(trial.state in states for trial in self.trials)

    def ask(self) -> AskedTrial:
        """Chooses the next trial to run, and returns its number and values. A trial that was running when an earlier
        process died comes first, then a failed trial that is tried again, then one with queued values (that the user
        listed, or a combination of a grid), and then a trial with new values from the sampler."""
        # each trial has a sampler with another seed, because with one seed for all, a process that continues the
        # study would draw the same values again
        if self._interrupted:
            frozen = self._interrupted.pop(0)
            self._study.sampler = self._make_sampler(frozen.number)
            trial = Trial(self._study, frozen._trial_id)
        elif (retry := self._queued_retry()) is not None:
            # Optuna would take the first of all that are queued, and the sweep may end before it comes to this one
            self._study._storage.set_trial_state_values(retry._trial_id, TrialState.RUNNING)
            trial = Trial(self._study, retry._trial_id)
        else:
            self._study.sampler = self._make_sampler(len(self.trials))
            trial = self._study.ask()
        # for an interrupted trial Optuna returns the values that it has recorded
        values = self.space.suggest(trial, self.base)
        trial.set_user_attr(VALUES, json.dumps(values))
        self._running[trial.number] = trial
        return AskedTrial(trial.number, values)

    def _queued_retry(self) -> FrozenTrial | None:
        queued = (trial for trial in self.trials if trial.state == TrialState.WAITING)
        return next((trial for trial in queued if RETRIES in trial.user_attrs), None)

    def report(self, number: int, steps: Sequence[int], value: float) -> bool:
        """Records how good the running trial ``number`` is so far. Returns whether the trial should be pruned (stopped
        early).

        ``value`` is the present value of the objective, the mean over the trial's runs so far. ``steps`` are the steps
        that the trial has reached since the last report; ``value`` is recorded for each of them. A step is a twentieth
        of a run. Steps are counted on over all runs of a trial (21 is the first step of the second run), and the pruner
        compares trials at equal steps. Steps that are recorded already keep their values.
        """
        trial = self._running[number]
        # a trial that continued from a checkpoint may report steps that are recorded already
        known = self._study.get_trials(deepcopy=False)[number].intermediate_values
        for step in steps:
            if step not in known:
                trial.report(value, step)
        return bool(trial.should_prune())

    def complete(self, number: int, values: Sequence[float]) -> None:
        """Records that trial ``number`` has completed. ``values`` has the final value of each objective.

        A value that is not finite is replaced by the worst possible one, because Optuna refuses NaN.
        """
        worst = {StudyDirection.MAXIMIZE: -math.inf, StudyDirection.MINIMIZE: math.inf}
        pairs = zip(values, self._study.directions, strict=True)
        ends = [value if math.isfinite(value) else worst[direction] for value, direction in pairs]
        self._study.tell(self._running.pop(number), ends)

    def prune(self, number: int) -> None:
        """Records that trial ``number`` was pruned (stopped early). Its last intermediate value becomes its final
        value."""
        self._study.tell(self._running.pop(number), state=TrialState.PRUNED)

    def fail(self, number: int, error: str) -> None:
        """Records that trial ``number`` failed. ``error`` is the text of the error."""
        trial = self._running.pop(number)
        trial.set_user_attr(ERROR, error)
        self._study.tell(trial, state=TrialState.FAIL)

    @property
    def failed(self) -> list[FrozenTrial]:
        """The trials that failed and that :meth:`retry_failed` has not queued again."""
        again = {trial.user_attrs.get(RETRIES) for trial in self.trials}
        failed = [trial for trial in self.trials if trial.state == TrialState.FAIL and VALUES in trial.user_attrs]
        return [trial for trial in failed if trial.number not in again]

    def retry_failed(self) -> int:
        """Queues a new trial with the same values for each failed trial that has not been queued again before. Returns
        how many trials were queued."""
        failed = self.failed
        for trial in failed:
            self._study.enqueue_trial(trial.params, user_attrs={RETRIES: trial.number})
        return len(failed)

    def wanted(self, trials: int) -> int:
        """Returns the total number of trials of a sweep: the ``trials`` that the user asked for, and one more for each
        failed trial that was queued again."""
        return trials + sum(RETRIES in trial.user_attrs for trial in self.trials)

    def left(self, trials: int) -> int:
        """Returns how many trials of a sweep still have to be started if the user asked for ``trials`` trials. The
        result includes failed trials that were queued again, and trials that were running when an earlier process of
        the sweep ended, because they are started again."""
        begun = len(self.trials) - self.count(TrialState.WAITING)
        return max(0, self.wanted(trials) - begun) + len(self._interrupted)

    def _make_sampler(self, asked: int) -> BaseSampler:
        seed = (self.seed * 1_000_003 + asked) % 2**32
        if self.sampler == "tpe":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
        if self.sampler == "cmaes":
            return CmaEsSampler(seed=seed, independent_sampler=TPESampler(seed=seed), warn_independent_sampling=False)
        if self.sampler == "nsga2":
            return NSGAIISampler(seed=seed, population_size=self.population)
        return RandomSampler(seed=seed)


def sampled_values(trial: FrozenTrial) -> Values:
    """Returns the values that the sampler chose for a trial of Optuna, by dotted key. Only a trial that has been
    started has such values."""
    return dict(json.loads(trial.user_attrs[VALUES]))


def best_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Returns a list with the best trial of a study, Optuna's record of a hyper-parameter search. With several
    objectives it has all trials on the Pareto front.

    The first of equally good trials counts as the best. The list is empty while no trial has completed with finite
    values.
    """
    if not any(trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False)):
        return []
    # study.best_trials works for one objective too, but copies all trials
    best = [study.best_trial] if len(study.directions) == 1 else study.best_trials
    return [trial for trial in best if is_finite(trial)]


def is_finite(trial: FrozenTrial) -> bool:
    """Returns whether all objectives of a completed trial have finite values. False means that the trial diverged."""
    return all(map(math.isfinite, trial.values))
