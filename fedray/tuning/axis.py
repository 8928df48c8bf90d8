"""How far a trial is, on an axis on which trials can be compared fairly, and what it has reached there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedray.core.rounding import whole
from fedray.data.federated import FederatedData
from fedray.resolve import Experiment
from fedray.tracking import costs

STEPS = 20
"""Steps of a run, of 5 % of the axis' budget each."""


def reached(row: Mapping[str, Any], axis: str, budget: float) -> int:
    """The step, at most :data:`STEPS`, of a trial whose last row of metrics.csv is ``row``."""
    cost = row["bytes_down"] + row["bytes_up"] if axis == "bytes" else row["round" if axis == "rounds" else axis]
    return min(STEPS, whole(STEPS * cost / budget))


def value_of(row: Mapping[str, Any], objective: str) -> float:
    """What a row of metrics.csv says of an objective; NaN where it was not evaluated."""
    found = row["bytes_down"] + row["bytes_up"] if objective == "bytes" else row.get(objective)
    return math.nan if found is None else float(found)


def budget_of(experiment: Experiment, data: FederatedData, axis: str) -> float:
    """What the whole of a run takes: rounds, bytes (both ways) or FLOPs."""
    if axis == "rounds":
        return experiment.rounds
    if axis == "bytes":
        each = sum(costs.bytes_per_client(experiment.algorithm.traffic, experiment.facts))
        return each * experiment.cohort_size * experiment.rounds
    return flops_of_a_round(experiment, data) * experiment.rounds


def flops_of_a_round(experiment: Experiment, data: FederatedData) -> float:
    """The FLOPs of a round whose clients are all the mean one."""
    from fedray.core.model import FlatModel

    sizes = data.sizes()
    server = costs.server_of_mean_clients(
        FlatModel(experiment.build_model(), experiment.loss), experiment.training, sizes, experiment.cohort_size,
        len(data.public), len(data.y_test),
    )  # fmt: skip
    seen = costs.mean_load(sizes, experiment.training).seen * experiment.cohort_size
    return costs.flops_of_round(experiment.algorithm, server, experiment.facts, seen)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
