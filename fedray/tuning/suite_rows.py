"""Computes the rows of a suite's table from run folders: accuracies over seeds, costs, differences to a baseline.

A :class:`Row` stands for an algorithm with fixed hyper-parameters that was run once for each of several seeds. The runs
need not come from a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
"""The further columns that are those of :func:`~fedray.results.outcomes.reaching`."""


@dataclass(frozen=True)
class Row:
    """One row of the table: an algorithm with fixed hyper-parameters, run once for each of several seeds.

    ``folders`` has the run folder of each seed. ``measure`` is the number by which the row is compared; the table's
    columns call it ``accuracy``. ``facts`` are further columns of the table; a fact with the name of a computed column
    replaces it.
    """

    label: str
    folders: Sequence[Path]
    measure: Measure = field(default_factory=Measure)
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_runs(row: Row) -> list[RecordedRun]:
    """Reads the runs of a row from its run folders, and returns them in the order of ``row.folders``.

    Raises :class:`UserError` for a folder that is damaged.
    """
    return [run_of(folder) for folder in row.folders]


def run_of(folder: Path) -> RecordedRun:
    """Reads the run in ``folder``. Raises :class:`UserError` if it is damaged."""
    found = read_run(folder)
    if not isinstance(found, RecordedRun):
        raise UserError(f"{folder} can't be compared: {found.reason}")
    return found


def compare_rows(rows: Sequence[Row], baseline: str | None, target: float | None) -> pd.DataFrame:
    """Returns a table with a line for each row, the best first.

    ``baseline`` is the label of the row with which the others are compared. If ``target`` is None, the target is the
    mean accuracy of the baseline, or the worst mean of all rows if the baseline has none.

    Runs that diverged have no final accuracy and no cost of a whole run: they are counted, but are in no mean. Columns,
    beside the facts of each row:

    - ``seeds``: how many runs there are; ``seeds_diverged``: how many of them diverged.
    - ``accuracies``: the final accuracies of the runs that ended; ``accuracy``, ``margin``: their mean and the margin
      of its 95 % interval.
    - ``bytes``, ``rounds``: what a whole run took, as means over the runs that ended.
    - ``target``; ``reached``: how many runs reached it; ``rounds_to``, ``bytes_to``: what they took to reach it;
      ``rounds_bound``, ``bytes_bound``: what it took more than, if these are infinite
      (:func:`~fedray.results.outcomes.to_reach`).
    - ``differences``: to the baseline, for each seed whose run ended in both rows; ``difference``,
      ``difference_margin``: their mean and its margin; ``p``: of the paired t-test; ``p_holm``: the same, corrected by
      Holm's rule over all rows that have one.

    Rows are sorted by mean accuracy, rounded to the hundredth of a percent that is shown. Of two rows with the same,
    the one with fewer diverged runs comes first. Rows without any run that ended come last.
    """
    runs = {row.label: read_runs(row) for row in rows}
    found = [outcome(runs[row.label], row.measure) if row.folders else {} for row in rows]
    finals = [{run.seeds: run.final(row.measure) for run in runs[row.label] if not run.diverged} for row in rows]
    of_baseline = next((place for place, row in enumerate(rows) if row.label == baseline), None)
    if target is None:
        target = _target(rows, found, of_baseline)
    lines = []
    for place, row in enumerate(rows):
        line = {"algorithm": row.label} | {NAMES[name]: found[place][name] for name in NAMES if name in found[place]}
        if row.folders:
            reached = reaching(runs[row.label], row.measure, target)
            line |= {name: reached[name] for name in REACHED}
        if of_baseline is not None and place != of_baseline:
            line |= difference(finals[place], finals[of_baseline])
        lines.append(line)
    correct(lines)
    order = sorted(range(len(rows)), key=lambda place: order_of(found[place], rows[place].measure))
    return pd.DataFrame([lines[place] | dict(rows[place].facts) for place in order])


def _target(rows: Sequence[Row], found: Sequence[Mapping[str, Any]], of_baseline: int | None) -> float:
    means = {place: each["final"] for place, each in enumerate(found) if not math.isnan(each.get("final", math.nan))}
    if of_baseline in means:
        return float(means[of_baseline])
    sign = rows[0].measure.sign if rows else 1
    return sign * min((sign * mean for mean in means.values()), default=math.nan)
