"""The axis on which a sweep compares its trials, chosen such that they have done equal work when they are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedray.config import flat
from fedray.tuning.axis import RoundCost
from fedray.tuning.spec import SweepSpec, read_record


def axis_of_equal_work(base: RoundCost, others: Iterable[RoundCost], objective: str) -> str:
    """Returns the axis on which trials have done equal work when they are compared: rounds, flops or bytes.

    ``base`` is the cost of a round of the base configuration, and ``others`` are costs of rounds of possible trials. If
    all cost the same, the axis is rounds. If their FLOPs differ it is FLOPs, and if only their bytes differ it is
    bytes. The ``objective`` is never the axis, since trials that have used equal FLOPs can't be compared by FLOPs.
    """
    costs = list(others)
    for axis in ("flops", "bytes"):
        if objective.partition("_")[0] != axis and any(base.differs(cost, axis) for cost in costs):
            return axis
    return "rounds"


def _recorded_axis(spec: SweepSpec) -> str | None:
    """Returns the axis in the record of a sweep that has begun, which it keeps; None for a new sweep."""
    return flat(read_record(spec.folder)["tune"]).get("pruner.axis") if spec.has_begun else None


def choose_axis(
    spec: SweepSpec, base: RoundCost, costs: Mapping[str, Sequence[RoundCost]]
) -> tuple[SweepSpec, list[str]]:
    """Returns ``spec`` with a definite axis in place of ``tune.pruner.axis=auto``.

    ``base`` is the cost of a round of the base configuration, and ``costs`` has, for each searched key, costs of rounds
    with values of it. A sweep that has begun keeps its axis. The second value has lines for the user: one if the axis
    makes the pruner compare trials that have done unequal work.
    """
    pruner = spec.tune.pruner
    fair = axis_of_equal_work(base, [cost for each in costs.values() for cost in each], next(iter(spec.tune.objective)))
    axis: str = pruner.axis
    if axis == "auto":
        axis = _recorded_axis(spec) or fair
    notes = []
    # trials with equal FLOPs have done equal work, also if their bytes differ
    if pruner.kind != "none" and axis != fair != "rounds" and axis != "flops":
        keys = [key for key, each in costs.items() if any(base.differs(cost, fair) for cost in each)]
        notes.append(
            f"{spec.name}: trials are pruned at equal {axis}, and the {fair} that these take depend on "
            f"{' and '.join(keys)}; tune.pruner.axis={fair} compares them at equal work"
        )
    tune = spec.tune.model_copy(update={"pruner": pruner.model_copy(update={"axis": axis})})
    return replace(spec, tune=tune), notes
