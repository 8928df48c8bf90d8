"""Which trials are given up: Optuna's pruners on steps of the axis, and the median between seeds."""

from __future__ import annotations

import statistics

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from fedray.tuning.axis import STEPS
from fedray.tuning.settings import PruneConfig


def pruner_of(prune: PruneConfig, seeds: int) -> BasePruner:
    """The pruner that is asked for; of trials with several seeds, each seed has :data:`STEPS` steps."""
    if prune.by == "none":
        return NopPruner()
    grace = max(1, round(prune.grace / 100 * STEPS))
    within: BasePruner
    if prune.by == "asha":
        within = SuccessiveHalvingPruner(min_resource=grace, reduction_factor=prune.reduction)
    elif prune.by == "hyperband":
        within = HyperbandPruner(min_resource=grace, max_resource=STEPS, reduction_factor=prune.reduction)
    else:
        within = MedianPruner(n_startup_trials=prune.startup, n_warmup_steps=grace)
    return BetweenSeeds(within, prune.startup) if seeds > 1 else within


class BetweenSeeds(BasePruner):
    """``within`` during the first seed; from then on, at the end of each seed, trials go on whose mean so far is not
    worse than the median of ``startup`` others or more."""

    def __init__(self, within: BasePruner, startup: int) -> None:
        self.within, self.startup = within, startup

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
        if len(others) < self.startup:
            return False
        value, median = trial.intermediate_values[step], statistics.median(others)
        return value < median if study.direction == StudyDirection.MAXIMIZE else value > median
