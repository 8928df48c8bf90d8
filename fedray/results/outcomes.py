"""Computes the results of groups of runs: means over seeds, costs of targets, and differences to a baseline."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import pandas as pd

from fedray.results.measure import Measure
from fedray.results.runs import RecordedRun
from fedray.results.statistics import holm, mean_and_margin, median_to_reach, paired_p_value

T = TypeVar("T", bound=Hashable)

AMOUNTS = {
    "rounds": "round", "bytes": "bytes", "flops": "flops", "virtual_seconds": "virtual_seconds", "joules": "joules",
    "seconds": "wall_seconds",
}  # fmt: skip
"""The units in which the costs of runs are counted, each with its column in metrics.csv. A cost that a run has not
recorded is NaN."""


def outcome(runs: Sequence[RecordedRun], measure: Measure, last: int | None = None) -> dict[str, Any]:
    """Returns the results and the costs of one group (``runs`` that differ only in their seeds) as a dict, which
    becomes a row of a comparison's table. Its keys:

    - ``runs``: the number of runs; ``diverged``: how many of them diverged. Diverged runs are left out of everything
      below.
    - ``finals``: the metric ``measure`` at the last evaluation of each run, as a tuple; ``final``, ``final_margin``:
      their mean and half the width of its 95 % interval (:func:`~fedray.results.statistics.mean_and_margin`).
    - ``bests``, ``best``, ``best_margin``: the same for the best evaluation of each run.
    - ``lasts``, ``last``, ``last_margin``: the same for the mean over the evaluations in the last rounds of each run.
      The argument ``last`` is the number of these rounds; None means the last ten evaluations.
    - ``rounds``, ``bytes``, ``flops``, ``virtual_seconds``, ``joules``, ``seconds``: the costs of a whole run, as means
      over the runs.
    """
    ended = [run for run in runs if not run.diverged]
    found: dict[str, Any] = {"runs": len(runs), "diverged": len(runs) - len(ended)}
    values = {
        "final": tuple(run.final(measure) for run in ended),
        "best": tuple(run.best(measure) for run in ended),
        "last": tuple(run.last(measure, last) for run in ended),
    }
    for name, each in values.items():
        found[f"{name}s"] = each
        found[name], found[f"{name}_margin"] = mean_and_margin(each)
    for name, column in AMOUNTS.items():
        found[name] = mean_and_margin([float(run.rows[column].iloc[-1]) for run in ended])[0]
    return found


def reaching(runs: Sequence[RecordedRun], measure: Measure, target: float) -> dict[str, Any]:
    """Returns what it took a group (``runs`` that differ only in their seeds) to reach ``target``, a value of the
    metric, as a dict. Its keys:

    - ``target``; ``runs``: the number of runs; ``reached``: how many reached the target; ``diverged``: how many
      diverged.
    - ``rounds_to`` and so on, for each of :data:`AMOUNTS`: the cost of reaching the target, as a median over the runs.
      It is infinite if at least half of the runs did not reach the target.
    - ``rounds_bound`` and so on: numbers that are shown instead of infinite medians, as in ``> 40`` (:func:`to_reach`).
    """
    firsts = [run.first_to_reach(target, measure) for run in runs]
    found: dict[str, Any] = {
        "target": target,
        "runs": len(runs),
        "reached": sum(first is not None for first in firsts),
        "diverged": sum(run.diverged for run in runs),
    }
    for name, column in AMOUNTS.items():
        found[f"{name}_to"], found[f"{name}_bound"] = to_reach(runs, firsts, column)
    return found


def to_reach(runs: Sequence[RecordedRun], firsts: Sequence[pd.Series[Any] | None], column: str) -> tuple[float, float]:
    """Returns the cost of reaching a target, as a median over the ``runs`` of a group, and a bound that is shown if
    this median is infinite, as in ``> 40``.

    ``column`` is the column of metrics.csv in which the cost is counted, such as ``bytes``. ``firsts`` has for each run
    the row of metrics.csv in which it first reached the target, or None if it diverged or did not reach the target
    (:meth:`~fedray.results.runs.RecordedRun.first_to_reach`). The cost of a run with None counts as infinite. The bound
    is the median of the runs' :func:`least_costs`, or NaN if this is infinite, too.
    """
    if all(run.rows[column].isna().all() for run in runs):
        return math.nan, math.nan
    amounts = [math.inf if first is None else float(first[column]) for first in firsts]
    bound = median_to_reach(least_costs(runs, firsts, column))
    return median_to_reach(amounts), bound if math.isfinite(bound) else math.nan


def least_costs(runs: Sequence[RecordedRun], firsts: Sequence[pd.Series[Any] | None], column: str) -> list[float]:
    """Returns for each run what reaching the target costs at least: its cost when it reached the target; its cost at
    its last round if it has not reached it; and infinity if it diverged. The arguments are those of :func:`to_reach`.
    """
    ends = [math.inf if run.diverged else float(run.rows[column].iloc[-1]) for run in runs]
    return [end if first is None else float(first[column]) for end, first in zip(ends, firsts, strict=True)]


def difference(finals: Mapping[T, float], baseline: Mapping[T, float]) -> dict[str, Any]:
    """Compares a group of runs with the baseline (the group with which the others are compared) in pairs. A pair is a
    run of each of the two groups with the same seeds and the same samples of the clients.

    ``finals`` has the final values of the metric for the group, ``baseline`` those for the baseline. Each maps a key
    for a run that did not diverge to the run's value. Two runs are a pair if their keys are equal. The key contains the
    seeds, for example.

    Returns a dict, which is empty if there is no pair. Otherwise ``differences`` is a tuple with the group's value
    minus the baseline's for each pair; ``difference`` and ``difference_margin`` are the mean of the differences and
    half the width of its 95 % interval; and ``p`` is the p-value of the paired t-test.
    """
    pairs = [pair for pair in finals if pair in baseline]
    if not pairs:
        return {}
    a, b = [finals[pair] for pair in pairs], [baseline[pair] for pair in pairs]
    differences = tuple(x - y for x, y in zip(a, b, strict=True))
    mean, margin = mean_and_margin(differences)
    return {
        "differences": differences,
        "difference": mean,
        "difference_margin": margin,
        "p": paired_p_value(a, b),
    }


def correct(rows: Sequence[dict[str, Any]]) -> None:
    """Adds ``p_holm`` to each row of a comparison's table that has a p-value ``p``: the p-value after Holm's correction
    for the number of such rows. Rows are dicts, which are changed in place."""
    tested = [row for row in rows if not math.isnan(row.get("p", math.nan))]
    for row, corrected in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = corrected


def order_of(row: Mapping[str, Any], measure: Measure) -> tuple[bool, float, int]:
    """Returns the sort key for a ``row`` of a comparison's table, a dict as :func:`outcome` returns it. ``sorted`` then
    puts the row with the best mean of the final values (``final``) first.

    Of two rows with the same mean, the one with fewer diverged runs comes first. Means of percentages count as the same
    if they are equal after rounding to two digits of a percent, as in the table. Rows without a mean, for example
    because all runs diverged, come last. ``measure`` is the metric, which says whether larger or smaller values are
    better.
    """
    value = row.get("final", math.nan)
    if math.isnan(value):
        return True, 0.0, row.get("diverged", 0)
    return False, -measure.sign * (round(value, 4) if measure.percent else value), row.get("diverged", 0)
