"""Computes the rows of a suite's table from run folders: accuracies over seeds, costs, differences to a baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedray.errors import UserError
from fedray.results.measure import Measure
from fedray.results.outcomes import correct, difference, order_of, outcome, reaching
from fedray.results.runs import RecordedRun, read_run

NAMES = {
    "runs": "seeds", "diverged": "seeds_diverged", "finals": "accuracies", "final": "accuracy",
    "final_margin": "margin", "bytes": "bytes", "rounds": "rounds",
}  # fmt: skip
"""The columns of the table, by their names in :func:`~fedray.results.outcomes.outcome`."""

REACHED = ("target", "reached", "rounds_to", "rounds_bound", "bytes_to", "bytes_bound")
"""The columns of the table that :func:`~fedray.results.outcomes.reaching` computes."""


@dataclass(frozen=True, eq=False)
class Row:
    """The runs from which one row of a suite's table is computed: an algorithm with fixed hyper-parameters, run once
    for each of several seeds.

    ``label`` names the row. ``folders`` has the run folder of each seed; the runs need not come from a sweep.
    ``measure`` is the metric by which rows are compared; in the table its column is always called ``accuracy``.
    ``facts`` are further columns of the table, by name; a fact with the name of a computed column replaces it.
    """

    label: str
    folders: Sequence[Path]
    measure: Measure = field(default_factory=Measure)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list[RecordedRun]:
        """The runs in ``folders``, read from disk: their settings and their results in each round. Raises
        :class:`UserError` for a folder that is damaged."""
        return [_read(folder) for folder in self.folders]


def _read(folder: Path) -> RecordedRun:
    found = read_run(folder)
    if not isinstance(found, RecordedRun):
        raise UserError(f"{folder} can't be compared: {found.reason}")
    return found


def compare_rows(rows: Sequence[Row], baseline: str | None, target: float | None) -> pd.DataFrame:
    """Computes the table of a suite: a DataFrame with a row for each of ``rows``, the best first.

    ``baseline`` is the label of the row with which the others are compared; None means that there is no such row. The
    table shows what it costs to reach ``target``, a value of the metric. None means the mean accuracy of the baseline,
    or, if there is no baseline or it has none, the worst mean of all rows.

    Runs that diverged are counted, but do not enter any mean, because they have no final accuracy and no cost of a
    whole run. Columns, in addition to the facts of each row:

    - ``algorithm``: the label of the row.
    - ``seeds``: how many runs there are; ``seeds_diverged``: how many of them diverged.
    - ``accuracies``: the final accuracies of the runs that did not diverge, as a tuple; ``accuracy``, ``margin``: their
      mean and half the width of its 95 % interval.
    - ``bytes``, ``rounds``: the cost of a whole run, as means over the runs that did not diverge.
    - ``target``: the target; ``reached``: how many runs reached it.
    - ``rounds_to``, ``bytes_to``: the cost of reaching the target, as a median over all runs, in which a run that did
      not reach it counts as infinite; ``rounds_bound``, ``bytes_bound``: if this median is infinite, a lower bound of
      it (:func:`~fedray.results.outcomes.to_reach`).
    - ``differences``, ``difference``, ``difference_margin``, ``p``: the comparison with the baseline, over the seeds
      with which neither row's run diverged (:func:`~fedray.results.outcomes.difference`); ``p_holm``: ``p`` with Holm's
      correction over all rows.

    Rows are sorted by :func:`~fedray.results.outcomes.order_of`.
    """
    found = [outcome(row.runs, row.measure) if row.folders else {} for row in rows]
    finals = {row.label: {run.seeds: run.final(row.measure) for run in row.runs if not run.diverged} for row in rows}
    if target is None:
        target = _target(rows, found, baseline)
    lines = []
    for row, reached in zip(rows, found, strict=True):
        line = {"algorithm": row.label} | {NAMES[name]: reached[name] for name in NAMES if name in reached}
        if row.folders:
            to_target = reaching(row.runs, row.measure, target)
            line |= {name: to_target[name] for name in REACHED}
        if baseline in finals and row.label != baseline:
            line |= difference(finals[row.label], finals[baseline])
        lines.append(line)
    correct(lines)
    order = sorted(range(len(rows)), key=lambda place: order_of(found[place], rows[place].measure))
    return pd.DataFrame([lines[place] | dict(rows[place].facts) for place in order])


def _target(rows: Sequence[Row], found: Sequence[Mapping[str, Any]], baseline: str | None) -> float:
    finals = {row.label: float(each.get("final", math.nan)) for row, each in zip(rows, found, strict=True)}
    means = {label: mean for label, mean in finals.items() if not math.isnan(mean)}
    if baseline in means:
        return means[baseline]
    return min(means.values(), key=lambda mean: rows[0].measure.sign * mean, default=math.nan)
