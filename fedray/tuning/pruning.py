"""Decides which trials are stopped early, with Optuna's pruners within a run and a median rule between runs."""

from __future__ import annotations

import statistics

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from fedray.tuning.axis import STEPS
from fedray.tuning.settings import PrunerConfig


def make_pruner(config: PrunerConfig, seeds: int) -> BasePruner:
    """Returns the pruner of a sweep, the object by which Optuna decides whether a trial is stopped early because its
    results are bad.

    Args:
        config: The keys ``tune.pruner.*``, which say what kind of pruner it is.
        seeds: The number of runs of each trial, one for each seed. If there are several, the pruner is
            :class:`BetweenSeeds`, unless its kind is "none".
    """
    if config.kind == "none":
        return NopPruner()
    grace = max(1, round(config.grace_period / 100 * STEPS))
    within: BasePruner
    if config.kind == "asha":
        within = SuccessiveHalvingPruner(min_resource=grace, reduction_factor=config.reduction_factor)
    elif config.kind == "hyperband":
        within = HyperbandPruner(min_resource=grace, max_resource=STEPS, reduction_factor=config.reduction_factor)
    else:
        within = MedianPruner(n_startup_trials=config.n_startup_trials, n_warmup_steps=grace)
    return BetweenSeeds(within, config.n_startup_trials) if seeds > 1 else within


class BetweenSeeds(BasePruner):
    """A pruner of Optuna (it stops bad trials early) for trials that consist of several runs, one for each seed.

    During the first run of a trial, the pruner ``within`` decides. After that the trial can be stopped only when one of
    its runs has ended. If k runs have ended, it is stopped if the mean of the objective over these runs is worse than
    the median of the same means of other trials. Only trials with at least k finished runs enter the median, and if
    there are fewer than ``n_startup_trials`` of them, the trial goes on.
    """

    def __init__(self, within: BasePruner, n_startup_trials: int) -> None:
        self.within, self.n_startup_trials = within, n_startup_trials

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        step = trial.last_step
        if step is None or step < STEPS:
            return self.within.prune(study, trial)
        if step % STEPS:
            return False
        others = [
            other.intermediate_values[step]
            for other in study.get_trials(deepcopy=False)
            if other.number != trial.number and step in other.intermediate_values
        ]
        if len(others) < self.n_startup_trials:
            return False
        value, median = trial.intermediate_values[step], statistics.median(others)
        return value < median if study.direction == StudyDirection.MAXIMIZE else value > median
