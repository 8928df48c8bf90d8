"""Compares a round with what it would be otherwise, if ``run.diagnostics`` asks for it."""

from __future__ import annotations

from collections.abc import Callable

from fedray.engine.full_participation import FullParticipation
from fedray.engine.state.run import RunState
from fedray.engine.task_queue import TaskQueue
from fedray.engine.virtual_model import VirtualModel
from fedray.experiment.experiment import Experiment


def comparison_of(state: RunState, experiment: Experiment, queue: TaskQueue) -> Callable[[], dict[str, float]]:
    """Makes what the round is to be compared with. The round must not have begun. The function that is returned is
    called after the round, and returns columns of metrics.csv."""
    wanted = experiment.config.run.diagnostics
    if wanted == "all_clients":
        return FullParticipation(state, experiment, queue).errors
    if wanted == "virtual":
        return VirtualModel(state, experiment).distance
    return dict
