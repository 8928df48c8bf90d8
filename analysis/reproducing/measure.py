"""Measures what a published table has from the runs of its cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedray.results.measure import Measure
from fedray.results.outcomes import least_costs, to_reach
from fedray.results.runs import LeftOut, RecordedRun, read_run
from fedray.results.statistics import mean_and_margin
from fedray.tracking.folder import is_finished
from reproducing.accounting import GIB, gflops_of_a_round, gib_of_a_run
from reproducing.published import Cell, PublishedTable

PERCENT = ("final", "last", "best", "at_round")
"""The measures that are accuracies in percent. Of the others less is better."""

EVALUATED = (*PERCENT, "loss")
"""The measures that are values of evaluations. The others are what runs took until a target."""

AMOUNTS = {"gib_sent": "bytes", "minutes": "virtual_seconds"}
"""The columns of metrics.csv that are counted until the target, where it is not the round."""

NAMES = {
    "test": "test {}",
    "train": "training {}",
    "representation": "test {}",
    "local": "mean test {} of the clients' models before they are averaged",
}
"""What a row has, by the ``of`` of its cells: with the metric's name."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What the runs of a cell gave.

    ``value`` is in the unit of the table: percent, a loss, rounds, a ratio of rounds, minutes, GFLOPs or GiB. It is
    infinite if too few runs reached the target, and NaN if there is none. ``margin`` is half the width of the 95 %
    interval of a mean, NaN where there is none; ``values`` are those of which it is the mean, and ``spread`` the
    accuracies of the last rounds of all runs, if it is the mean of those. ``runs`` are those that have ended,
    ``diverged`` is how many of them diverged, and ``reached`` how many reached the target; ``taken`` is what these
    took, by the name of the run's folder, which is that of its seed. ``bound`` is the least that one took of those
    which neither diverged nor reached it, in the unit of the table; NaN if there is none. ``left_out`` are runs that
    have ended and can't be read.
    """

    cell: Cell
    value: float
    margin: float
    runs: Sequence[RecordedRun]
    diverged: int
    reached: int | None = None
    bound: float = math.nan
    values: Sequence[float] = ()
    spread: Sequence[float] = ()
    taken: Mapping[str, float] = field(default_factory=dict)
    left_out: Sequence[LeftOut] = ()


def name_of(table: PublishedTable, cell: Cell | None = None) -> str:
    """Returns which accuracy or loss the row of a cell has: by default the first row."""
    cell = cell or table.cells[0]
    return NAMES[cell.of].format(metric_of(table, cell).words)


def metric_of(table: PublishedTable, cell: Cell) -> Measure:
    """Returns the metric by which the runs of a cell are evaluated."""
    return Measure("loss", "min", cell.of) if table.measure == "loss" else Measure(of=cell.of)


def measured(table: PublishedTable, folder: Path, seeds: int) -> list[Measured]:
    """Returns what was measured of each cell, from the runs in ``folder``."""
    read = {cell: [read_run(run) for run in _ended(cell, folder, seeds)] for cell in table.cells}
    runs = {cell: [run for run in found if isinstance(run, RecordedRun)] for cell, found in read.items()}
    if table.measure in EVALUATED:
        found = [_evaluated(table, cell, runs[cell]) for cell in table.cells]
    else:
        amount = AMOUNTS.get(table.measure, "round")
        taken = [_taken(table, cell, runs[cell], _target(table, cell, runs), amount) for cell in table.cells]
        first = {one.cell.column: one for one in taken if one.cell.row == table.rows[0]}
        found = [_in_unit(table, one, first[one.cell.column]) for one in taken]
    return [replace(one, left_out=[run for run in read[one.cell] if isinstance(run, LeftOut)]) for one in found]


def _in_unit(table: PublishedTable, one: Measured, first: Measured) -> Measured:
    """Returns what a cell took in the unit of its table; ``first`` is the first row of its column."""
    if not one.runs:
        return one
    if table.measure == "gib":
        # the paper's cost of a whole run over the speed-up in rounds, which is 1 if the target is not reached
        speed_up = first.value / one.value if math.isfinite(one.value) and math.isfinite(first.value) else 1.0
        return replace(one, value=gib_of_a_run(one.cell) / speed_up)
    unit = 1.0
    if table.measure == "gflops":
        unit = gflops_of_a_round(one.cell)
    elif table.measure == "gib_sent":
        unit = 1 / GIB
    elif table.measure == "minutes":
        unit = 1 / 60
    elif table.measure == "ratio" and one.cell.row != table.rows[0]:
        unit = 1 / first.value if math.isfinite(first.value) else math.nan
        return replace(one, value=one.value * unit, margin=_margin_of_ratio(one, first), bound=one.bound * unit)
    return replace(one, value=one.value * unit, margin=one.margin * unit, bound=one.bound * unit)


def _margin_of_ratio(one: Measured, first: Measured) -> float:
    """Returns the margin of the ratio r = a / b of two means over the same seeds: to first order that of the mean of
    (a - r b) / b, in which the runs of a seed are a pair. NaN if there is no mean, or the seeds are not the same."""
    if math.isnan(one.margin) or one.taken.keys() != first.taken.keys():
        return math.nan
    ratio = one.value / first.value
    return mean_and_margin([a - ratio * first.taken[seed] for seed, a in one.taken.items()])[1] / first.value


def _target(table: PublishedTable, cell: Cell, runs: Mapping[Cell, Sequence[RecordedRun]]) -> float:
    """Returns the accuracy that is to be reached: the last of ``run.targets``, or the mean of the first row's last
    rounds, over its runs."""
    if table.until == "first row":
        (first,) = [each for each in runs if each.column == cell.column and each.row == table.rows[0]]
        ends = [run.last(Measure(), run.settings.get("run.last_rounds")) for run in runs[first] if not run.diverged]
        return float(np.mean(ends)) if ends else math.nan
    return float(cell.config({}).run.targets[-1])


def _ended(cell: Cell, folder: Path, seeds: int) -> list[Path]:
    runs = [folder / f"{cell.name}/seed-{seed}" for seed in cell.seeds(seeds)]
    return [run for run in runs if is_finished(run)]


def _taken(table: PublishedTable, cell: Cell, runs: Sequence[RecordedRun], target: float, amount: str) -> Measured:
    """Returns the median or mean of what it took until the target; ``amount`` is a column of metrics.csv. The mean is
    infinite if a run did not reach it."""
    firsts = [run.first_to_reach(target, Measure(of=cell.of)) for run in runs]
    value, bound = to_reach(runs, firsts, amount)
    reached = [(run.folder.name, first) for run, first in zip(runs, firsts, strict=True) if first is not None]
    margin, taken = math.nan, {name: float(first[amount]) for name, first in reached}
    if table.over_runs == "mean" and runs:
        value, margin = mean_and_margin([*taken.values()]) if len(taken) == len(runs) else (math.inf, math.nan)
        least = math.fsum(least_costs(runs, firsts, amount)) / len(runs)
        bound = least if math.isfinite(least) else math.nan
    diverged = sum(run.diverged for run in runs)
    return Measured(cell, value, margin, runs, diverged, len(taken), bound, taken=taken)


def _evaluated(table: PublishedTable, cell: Cell, runs: Sequence[RecordedRun]) -> Measured:
    diverged = sum(run.diverged for run in runs)
    measure = metric_of(table, cell)
    values = [measure.scale * _value(run, table, cell) for run in runs if not run.diverged]
    known = [value for value in values if not math.isnan(value)]
    ended = [run for run in runs if not run.diverged and table.measure == "last"]
    last = [run.last_values(measure, run.settings.get("run.last_rounds")) for run in ended]
    spread = [measure.scale * float(value) for each in last for value in each]
    return Measured(cell, *mean_and_margin(known), runs, diverged, values=known, spread=spread)


def _value(run: RecordedRun, table: PublishedTable, cell: Cell) -> float:
    measure = metric_of(table, cell)
    if table.measure == "at_round":
        rows = run.evaluations(measure).set_index("round")["value"]
        return float(rows.get(cell.round, math.nan))
    if table.measure == "last":
        return run.last(measure, run.settings.get("run.last_rounds"))
    return run.best(measure) if table.measure == "best" else run.final(measure)


def without_value(table: PublishedTable, one: Measured) -> str:
    """Returns what stands where runs have ended, but gave no finite value; empty if all that lack one diverged."""
    if math.isfinite(one.bound):
        return f"> {one.bound:.3g}"
    if one.diverged == len(one.runs) or math.isinf(one.value):
        return ""
    return "no evaluation" if table.measure in EVALUATED else "no ratio"


def on_one_scale(table: PublishedTable, one: Measured) -> tuple[float, float]:
    """Returns what was measured and published of a cell, so that the rows of a column have an order and one axis.

    The first row of a table of ratios, which has rounds, counts as 1. Infinity, or minus infinity of an accuracy,
    stands for what diverged or did not reach its target; NaN for what was not measured or not published.
    """
    published = math.nan if one.cell.published is None else one.cell.published
    worst = -math.inf if table.measure in PERCENT else math.inf
    value = worst if one.runs and one.diverged == len(one.runs) else one.value
    if isinstance(published, str):
        published = worst
    if table.measure == "ratio" and one.cell.row == table.rows[0]:
        return value / one.value, published / published
    return value, published


def frame(table: PublishedTable, found: Sequence[Measured]) -> pd.DataFrame:
    """Returns a row for each cell: measured, published, and the difference, measured minus published.

    For what is no accuracy the difference is relative: measured over published, minus 1.
    """
    rows = []
    for one in found:
        published = one.cell.published
        number = published if isinstance(published, (int, float)) else math.nan
        relative = table.measure not in PERCENT
        deviation = one.value / number - 1 if relative else one.value - number
        rows.append(
            {
                "row": one.cell.row, "column": one.cell.column, "measured": one.value, "margin": one.margin,
                "published": published, "deviation": deviation if math.isfinite(one.value) else math.nan,
                "runs": len(one.runs), "diverged": one.diverged, "reached": one.reached,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)
