"""Chooses the axis on which a sweep compares its trials (rounds, bytes or FLOPs), and measures the progress of runs.

Trials should have done equal work when they are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fedray.config import flat
from fedray.core.rounding import whole_units
from fedray.data.federated import FederatedData
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment
from fedray.experiment.usual_round import usual_length, usual_round
from fedray.tracking import costs
from fedray.tuning.spec import SweepSpec, read_record

STEPS = 20
"""The number of steps of a run on the axis. Each is 5 % of what a whole run of the base configuration takes.
"""

SAME_COST = 0.01
"""The relative difference up to which the costs of two rounds count as the same."""


class RoundCost(NamedTuple):
    """The estimated cost of one round: ``flops``, the FLOPs of all clients that take part and of the server together,
    and ``bytes``, the number of bytes that are sent to and from these clients."""

    flops: float
    bytes: float

    def differs(self, other: RoundCost, axis: str) -> bool:
        """Returns whether this cost and ``other`` differ by more than 1 % (:data:`SAME_COST`) in their ``flops`` or
        ``bytes``, whichever ``axis`` names."""
        return not math.isclose(getattr(self, axis), getattr(other, axis), rel_tol=SAME_COST)


def amount(row: Any, name: str) -> Any:
    """Returns the value of ``name`` in ``row``, a row of metrics.csv, or NaN if it was not recorded. ``row`` may also
    be the whole table of metrics.csv. Then the result is a series with a value for each row.

    ``name`` is a column of metrics.csv, such as the objective of a sweep, or one of two other names: ``bytes`` is the
    sum of the columns ``bytes_down`` and ``bytes_up``, and ``rounds`` is the column ``round``.
    """
    if name == "bytes":
        return row["bytes_down"] + row["bytes_up"]
    found = row.get("round" if name == "rounds" else name)
    return math.nan if found is None else found


def steps_reached(row: Mapping[str, Any], axis: str, budget: float) -> int:
    """Returns how far a run of a trial is, in steps of 5 %: a whole number from 0 to :data:`STEPS` (20). At each step
    the trial may be stopped early because its results are bad.

    ``row`` is the last row of metrics.csv of the run. ``axis`` is the quantity by which progress is measured (rounds,
    bytes or flops), and ``budget`` is how much of it a whole run takes.
    """
    return min(STEPS, whole_units(STEPS * amount(row, axis) / budget))


def budget_of(experiment: Experiment, data: FederatedData, axis: str) -> float:
    """Returns how much of ``axis`` a whole run of ``experiment`` takes: its number of rounds (``rounds``), the bytes
    sent to and from clients (``bytes``), its FLOPs (``flops``), or its ``virtual_seconds`` or ``joules``. All but the
    rounds are estimates (:func:`cost_of_a_round`, :mod:`fedray.experiment.system`). ``data`` is the partitioned data
    set."""
    if axis == "rounds":
        return experiment.rounds
    if axis in ("virtual_seconds", "joules"):
        of_time = axis == "virtual_seconds"
        budget = usual_length(experiment, data) if of_time else usual_round(experiment, data)[axis] * experiment.rounds
        if not budget > 0:
            raise UserError(f"tune.pruner.axis={axis}: what system.* says does not give {axis}")
        return budget
    cost = cost_of_a_round(experiment, data)
    return (cost.bytes if axis == "bytes" else cost.flops) * experiment.rounds


def cost_of_a_round(experiment: Experiment, data: FederatedData) -> RoundCost:
    """Estimates the FLOPs and bytes of one round of ``experiment``, as if each client that takes part had the mean
    number of samples. ``data`` is the partitioned data set. A sweep uses the estimate to find out which of its searched
    keys make rounds more expensive."""
    sizes = data.sizes()
    server = costs.server_of_mean_clients(
        experiment.training, sizes, experiment.cohort_size,
        len(data.public), len(data.y_test),
    )  # fmt: skip
    seen = costs.mean_load(sizes, experiment.training).seen * experiment.cohort_size
    each = sum(costs.bytes_per_client(experiment.algorithm.traffic, experiment.facts, experiment.upload))
    down, up, flops = costs.of_choosing(experiment.selection.asks, experiment.facts, sizes)
    flops += costs.flops_of_round(experiment.algorithm, server, experiment.facts, seen)
    return RoundCost(flops, each * experiment.cohort_size + down + up)


def axis_of_equal_work(base: RoundCost, others: Iterable[RoundCost], objective: str) -> str:
    """Chooses the quantity by which a sweep measures the progress of its trials (its "axis"), so that trials with equal
    progress have done equal work. Returns ``"rounds"``, ``"flops"`` or ``"bytes"``.

    ``base`` is the cost of a round of the base configuration, and ``others`` are costs of rounds of possible trials. If
    all these rounds cost the same, the axis is rounds. If their FLOPs differ, it is FLOPs, and if only their bytes
    differ, it is bytes. An ``objective`` that is itself counted in FLOPs or bytes is never the axis, because trials
    with equal FLOPs can't be compared by their FLOPs.
    """
    found = list(others)
    for axis in ("flops", "bytes"):
        if objective.partition("_")[0] != axis and any(base.differs(cost, axis) for cost in found):
            return axis
    return "rounds"


def choose_axis(
    spec: SweepSpec, base: RoundCost, costs: Mapping[str, Sequence[RoundCost]]
) -> tuple[SweepSpec, list[str]]:
    """Chooses the quantity by which a sweep measures the progress of its trials when it compares them: rounds, bytes or
    flops, its "axis". Returns ``spec`` with this value in place of ``tune.pruner.axis=auto``, and a list of lines for
    the user. An axis that the user has set stays as it is, and a sweep that has begun keeps its axis.

    ``base`` is the cost of a round of the base configuration. ``costs`` maps each searched key to the costs of a round
    with some of the key's values. The list has one line, a piece of advice, if trials that have done unequal work are
    compared when the sweep decides which of them to stop early. Otherwise it is empty.
    """
    pruner = spec.tune.pruner
    fair = axis_of_equal_work(base, [cost for each in costs.values() for cost in each], next(iter(spec.tune.objective)))
    axis: str = pruner.axis
    if axis == "auto":
        recorded = flat(read_record(spec.folder)["tune"]) if spec.has_begun else {}
        axis = recorded.get("pruner.axis") or fair
    notes = []
    # trials with equal FLOPs have done equal work, even if their bytes differ
    if pruner.kind != "none" and axis != fair != "rounds" and axis != "flops":
        keys = [key for key, each in costs.items() if any(base.differs(cost, fair) for cost in each)]
        notes.append(
            f"{spec.name}: trials are pruned at equal {axis}, and the {fair} that these take depend on "
            f"{' and '.join(keys)}; tune.pruner.axis={fair} compares them at equal work"
        )
    tune = spec.tune.model_copy(update={"pruner": pruner.model_copy(update={"axis": axis})})
    return replace(spec, tune=tune), notes
