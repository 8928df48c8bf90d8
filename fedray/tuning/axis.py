"""How far a trial is, on an axis on which trials can be compared fairly, and what it has reached there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedray.core.rounding import whole
from fedray.data.federated import FederatedData
from fedray.experiment import Experiment
from fedray.tracking import costs

STEPS = 20
"""Steps of a run, of 5 % of the axis' budget each."""

SAME_COST = 0.01
"""The part by which the costs of two rounds may differ and still count as the same."""


class RoundCost(NamedTuple):
    """What one round costs: FLOPs of all clients and the server, and bytes both ways."""

    flops: float
    bytes: float

    def differs(self, other: RoundCost, axis: str) -> bool:
        """Whether a round of ``other`` costs more or less of ``axis`` than the tolerance, :data:`SAME_COST`."""
        return not math.isclose(getattr(self, axis), getattr(other, axis), rel_tol=SAME_COST)


def reached(row: Mapping[str, Any], axis: str, budget: float) -> int:
    """The step, at most :data:`STEPS`, of a trial whose last row of metrics.csv is ``row``."""
    return min(STEPS, whole(STEPS * amount(row, axis) / budget))


def amount(row: Any, name: str) -> Any:
    """What a row of metrics.csv, or all of its rows, have of an axis or another column; ``bytes`` is both ways."""
    return row["bytes_down"] + row["bytes_up"] if name == "bytes" else row["round" if name == "rounds" else name]


def value_of(row: Mapping[str, Any], objective: str) -> float:
    """What a row of metrics.csv says of an objective; NaN where it was not evaluated."""
    found = row["bytes_down"] + row["bytes_up"] if objective == "bytes" else row.get(objective)
    return math.nan if found is None else float(found)


def budget_of(experiment: Experiment, data: FederatedData, axis: str) -> float:
    """What the whole of a run takes: rounds, bytes (both ways) or FLOPs."""
    if axis == "rounds":
        return experiment.rounds
    cost = cost_of_a_round(experiment, data)
    return (cost.bytes if axis == "bytes" else cost.flops) * experiment.rounds


def cost_of_a_round(experiment: Experiment, data: FederatedData) -> RoundCost:
    """The cost of a round whose clients are all the mean one."""

    sizes = data.sizes()
    server = costs.server_of_mean_clients(
        experiment.training, sizes, experiment.cohort_size,
        len(data.public), len(data.y_test),
    )  # fmt: skip
    seen = costs.mean_load(sizes, experiment.training).seen * experiment.cohort_size
    each = sum(costs.bytes_per_client(experiment.algorithm.traffic, experiment.facts))
    return RoundCost(
        costs.flops_of_round(experiment.algorithm, server, experiment.facts, seen), each * experiment.cohort_size
    )


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
