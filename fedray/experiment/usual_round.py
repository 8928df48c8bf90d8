"""Estimates how long a run with a virtual clock will take, from some rounds in which nothing is trained."""

from __future__ import annotations

import math
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from fedray.data.federated import FederatedData
from fedray.experiment.cohorts import rehearsed
from fedray.experiment.experiment import Experiment
from fedray.experiment.system import clock_of, schedule_of
from fedray.system.availability import windows
from fedray.system.clock import Clock
from fedray.tracking.costs import server_of_mean_clients

REHEARSED = 20
"""How many rounds are looked at to say what a usual one takes."""


def usual_round(experiment: Experiment, data: FederatedData) -> dict[str, float]:
    """Returns the ``virtual_seconds`` and ``joules`` of a round of ``experiment``, as means over the first
    :data:`REHEARSED` rounds from the moment on at which a client can be reached. Time at which no client at all can be,
    such as a night, does not count (:func:`usual_length` adds it). Both are NaN without a virtual clock."""
    clock = clock_of(experiment, data)
    if clock is None:
        return {"virtual_seconds": math.nan, "joules": math.nan}
    present = np.flatnonzero(data.sizes())
    if clock.system.mode == "buffered":
        end, joules = _updates(clock, present)
    else:
        begin, _ = next(windows(clock.availability, present))
        end, joules = _rounds(clock, experiment, data, begin)
    before = takewhile(lambda window: window[0] < end, windows(clock.availability, present))
    count = max(1, len(joules))
    seconds = math.fsum(min(until, end) - begin for begin, until in before)
    return {"virtual_seconds": seconds / count, "joules": math.fsum(joules) / count}


def usual_length(experiment: Experiment, data: FederatedData) -> float:
    """Returns about how many virtual seconds a run of ``experiment`` takes: its rounds, as long as usual ones, and the
    time before and between them at which no client can be reached. It is less if the run will end because no client can
    be any more, and NaN without a virtual clock."""
    clock, end = clock_of(experiment, data), math.nan
    if clock is not None:
        left = usual_round(experiment, data)["virtual_seconds"] * experiment.rounds
        for begin, end in windows(clock.availability, np.flatnonzero(data.sizes())):
            if left <= end - begin:
                return begin + left
            left -= end - begin
    return end


def _rounds(clock: Clock, experiment: Experiment, data: FederatedData, now: float) -> tuple[float, list[float]]:
    """Lets time pass for some rounds, the first of which begins at the virtual second ``now``. Returns when they end,
    and the joules of each."""
    sizes, algorithm, forward = data.sizes(), experiment.algorithm, experiment.facts.flops
    server = server_of_mean_clients(
        experiment.training, sizes, experiment.cohort_size, len(data.public), len(data.y_test)
    )  # fmt: skip
    whole = clock.seconds_of_server(algorithm.server_flops(server, forward))
    beside = clock.seconds_of_server(algorithm.server_flops_beside(server, forward))

    def waits(phase: str, ids: NDArray[np.int64]) -> float:
        return beside if phase == algorithm.server_training_before else 0.0

    joules = []
    latest: dict[int, int] = {}
    for number in range(1, REHEARSED + 1):
        asked = clock.ask(number, rehearsed(number, sizes, experiment, latest), now, waits)
        latest |= dict.fromkeys(asked.used.tolist(), number)
        now += asked.duration + (whole - beside if len(asked.used) else 0.0)
        joules.append(asked.joules)
    return now, joules


def _updates(clock: Clock, present: NDArray[np.int64]) -> tuple[float, list[float]]:
    """Returns when the first updates of asynchronous rounds are made, and the joules of each."""
    schedule, end = schedule_of(clock, present), 0.0
    joules: list[float] = []
    while len(joules) < REHEARSED and schedule.has(len(joules) + 1):
        update = schedule.update(len(joules) + 1)
        end = update.time
        joules.append(
            math.fsum((each.ended - each.began) * clock.devices.watts[each.client] for each in update.answers)
        )
    return end, joules
