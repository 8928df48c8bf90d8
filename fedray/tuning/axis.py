"""How far a trial has come on the axis on which trials are compared (rounds, bytes or FLOPs), and what it reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedray.core.rounding import whole_units
from fedray.data.federated import FederatedData
from fedray.experiment.experiment import Experiment
from fedray.tracking import costs

STEPS = 20
"""The number of steps of a run on the axis: each is a 20th (5 %) of what a whole run of the base configuration takes.
"""

SAME_COST = 0.01
"""The relative difference up to which the costs of two rounds count as the same."""


class RoundCost(NamedTuple):
    """What one round costs: the FLOPs of all clients and the server, and the bytes that are sent down and up."""

    flops: float
    bytes: float

    def differs(self, other: RoundCost, axis: str) -> bool:
        """Returns whether the two costs on ``axis`` differ relatively by more than :data:`SAME_COST`."""
        return not math.isclose(getattr(self, axis), getattr(other, axis), rel_tol=SAME_COST)


def steps_reached(row: Mapping[str, Any], axis: str, budget: float) -> int:
    """Returns how many of the :data:`STEPS` steps a run has reached, if ``row`` is its last row of metrics.csv."""
    return min(STEPS, whole_units(STEPS * amount(row, axis) / budget))


def amount(row: Any, name: str) -> Any:
    """Returns the value of an axis or a column in ``row``: a row of metrics.csv, or the whole table, which gives a
    series.

    ``bytes`` is the sum of both ways, and ``rounds`` the number of the round.
    """
    return row["bytes_down"] + row["bytes_up"] if name == "bytes" else row["round" if name == "rounds" else name]


def value_of(row: Mapping[str, Any], objective: str) -> float:
    """Returns the value of an objective in a row of metrics.csv; NaN if it was not evaluated in that round."""
    found = row["bytes_down"] + row["bytes_up"] if objective == "bytes" else row.get(objective)
    return math.nan if found is None else float(found)


def budget_of(experiment: Experiment, data: FederatedData, axis: str) -> float:
    """Returns how much of ``axis`` a whole run takes: rounds, bytes (both ways) or FLOPs."""
    if axis == "rounds":
        return experiment.rounds
    cost = cost_of_a_round(experiment, data)
    return (cost.bytes if axis == "bytes" else cost.flops) * experiment.rounds


def cost_of_a_round(experiment: Experiment, data: FederatedData) -> RoundCost:
    """Estimates the cost of a round, as if each client of the cohort had the mean number of samples."""
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
    """Returns the mean of at least one value. The sum is rounded only once."""
    return math.fsum(values) / len(values)
