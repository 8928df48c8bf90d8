"""On which axis a sweep compares its trials, such that they have done equal work there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedray.config import flat
from fedray.tuning.axis import RoundCost
from fedray.tuning.spec import SweepSpec, read_record


def axis_of_equal_work(base: RoundCost, others: Iterable[RoundCost], objective: str) -> str:
    """Rounds, flops or bytes. A round of the base configuration costs ``base``, and rounds of the trials ``others``.

    It is rounds if all cost the same. Else it is FLOPs, or bytes if only these differ; but never what is optimised
    itself: trials that have used equal FLOPs can't be told apart by their FLOPs.
    """
    costs = list(others)
    for axis in ("flops", "bytes"):
        if objective.partition("_")[0] != axis and any(base.differs(cost, axis) for cost in costs):
            return axis
    return "rounds"


def _axis_so_far(spec: SweepSpec) -> str | None:
    return flat(read_record(spec.folder)["tune"]).get("prune.axis") if spec.has_begun else None


def with_axis(
    spec: SweepSpec, base: RoundCost, costs: Mapping[str, Sequence[RoundCost]]
) -> tuple[SweepSpec, list[str]]:
    """``spec`` with the axis that ``tune.prune.axis=auto`` stands for; and a line if trials are pruned at unequal work.

    A round of the base costs ``base``, and one with values of each searched key ``costs``. A sweep that has begun keeps
    its axis.
    """
    prune = spec.tune.prune
    fair = axis_of_equal_work(base, [cost for each in costs.values() for cost in each], next(iter(spec.tune.objective)))
    axis: str = prune.axis
    if axis == "auto":
        axis = _axis_so_far(spec) or fair
    notes = []
    # equal FLOPs are equal work, also where bytes differ
    if prune.by != "none" and axis != fair != "rounds" and axis != "flops":
        keys = [key for key, each in costs.items() if any(base.differs(cost, fair) for cost in each)]
        notes.append(
            f"{spec.name}: trials are pruned at equal {axis}, and the {fair} that these take depend on "
            f"{' and '.join(keys)}; tune.prune.axis={fair} compares them at equal work"
        )
    tune = spec.tune.model_copy(update={"prune": prune.model_copy(update={"axis": axis})})
    return replace(spec, tune=tune), notes
