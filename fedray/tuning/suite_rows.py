"""Computes the rows of a suite's table from run folders: accuracies over seeds, costs, differences to a baseline.

A :class:`Row` stands for an algorithm with fixed hyper-parameters that was run once for each of several seeds. The runs
need not come from a sweep.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedray.tracking.folder import read_metrics
from fedray.tuning.intervals import holm, mean_and_margin, median_to_reach, paired_p_value


@dataclass(frozen=True)
class Measure:
    """The number by which the rows of a table are compared: a column of metrics.csv on the test set.

    ``mode`` says whether more (max) or less (min) of it is better. ``column`` is ``test_<metric>`` unless it is given.
    """

    metric: str = "accuracy"
    mode: str = "max"
    of: str = "test"

    @property
    def column(self) -> str:
        return f"{self.of}_{self.metric}"

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return -1 if self.mode == "min" else 1

    @property
    def percent(self) -> bool:
        """Whether it is a fraction of 1 that is shown in percent."""
        return self.metric in ("accuracy", "f1")

    @property
    def scale(self) -> float:
        return 100 if self.percent else 1

    @property
    def words(self) -> str:
        """Its name in a text."""
        return {"f1": "F1"}.get(self.metric, self.metric.replace("_", " "))


@dataclass(frozen=True)
class Row:
    """One row of the table: an algorithm with fixed hyper-parameters, run once for each of several seeds.

    ``folders`` has the run folder of each seed. Runs of two rows are a pair if their folders have the same name, as
    ``seed-3``. ``measure`` is the number by which the row is compared; the table's columns call it ``accuracy``.
    ``facts`` are further columns of the table; a fact with the name of a computed column replaces it.
    """

    label: str
    folders: Sequence[Path]
    measure: Measure = Measure()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One run of a row, with an entry for each round.

    The arrays are ``rounds``, ``iterations``, ``accuracies`` (NaN if the round was not evaluated) and ``bytes`` (both
    ways, since the beginning), each float64 [rounds].
    """

    seed: str
    diverged: bool
    rounds: np.ndarray
    iterations: np.ndarray
    accuracies: np.ndarray
    bytes: np.ndarray
    sign: int = 1

    @property
    def final(self) -> float:
        """The accuracy of the last evaluation; NaN if there was none."""
        evaluated = self.accuracies[~np.isnan(self.accuracies)]
        return float(evaluated[-1]) if len(evaluated) else math.nan

    def to_reach(self, target: float) -> tuple[float, float]:
        """Returns the first round whose accuracy was ``target`` or better, and the bytes up to it.

        Both are infinite if there is no such round. They are also infinite for a run that diverged later, because its
        model is lost.
        """
        # by rounding, a target that is the mean of equal accuracies may be a little larger than these
        there = self.sign * self.accuracies >= self.sign * target - 1e-9
        places = np.flatnonzero(there & (not self.diverged))
        return (float(self.rounds[places[0]]), float(self.bytes[places[0]])) if len(places) else (math.inf, math.inf)


def read_runs(row: Row) -> list[Run]:
    """Reads the runs of a row from its run folders, and returns them in the order of ``row.folders``."""
    return [_read_run(folder, row.measure) for folder in row.folders]


def _read_run(folder: Path, measure: Measure) -> Run:
    rows = read_metrics(folder)
    return Run(
        seed=folder.name,
        diverged=json.loads((folder / "summary.json").read_text())["status"] == "diverged",
        rounds=rows["round"].to_numpy(float),
        iterations=rows["iterations"].to_numpy(float),
        accuracies=rows[measure.column].to_numpy(float),
        bytes=(rows["bytes_down"] + rows["bytes_up"]).to_numpy(float),
        sign=measure.sign,
    )


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
    - ``target``; ``reached``: how many runs reached it; ``rounds_to``, ``bytes_to``: what they took to reach it, as
      medians over all runs. A run that diverged or did not reach it counts as infinite.
    - ``differences``: to the baseline, for each seed whose run ended in both rows; ``difference``,
      ``difference_margin``: their mean and its margin; ``p``: of the paired t-test; ``p_holm``: the same, corrected by
      Holm's rule over all rows that have one.

    Rows are sorted by mean accuracy, rounded to the hundredth of a percent that is shown. Of two rows with the same,
    the one with fewer diverged runs comes first. Rows without any run that ended come last.
    """
    runs = {row.label: read_runs(row) for row in rows}
    finals = {label: {run.seed: run.final for run in each if not run.diverged} for label, each in runs.items()}
    sign = rows[0].measure.sign if rows else 1
    if target is None:
        target = _target(finals, baseline, sign)
    table = pd.DataFrame(
        [
            {"algorithm": row.label}
            | _outcome(runs[row.label], target)
            | _difference(row.label, finals, baseline)
            | dict(row.facts)
            for row in rows
        ]
    )
    if "p" in table:
        tested = table["p"].notna()
        table.loc[tested, "p_holm"] = holm(table.loc[tested, "p"].tolist())
    return _sorted(table, rows[0].measure if rows else Measure())


def _target(finals: Mapping[str, Mapping[str, float]], baseline: str | None, sign: int) -> float:
    means = {label: mean_and_margin(list(each.values()))[0] for label, each in finals.items() if each}
    return (
        means[baseline] if baseline in means else sign * min((sign * mean for mean in means.values()), default=math.nan)
    )


def _outcome(runs: Sequence[Run], target: float) -> dict[str, Any]:
    if not runs:
        return {}
    ended = [run for run in runs if not run.diverged]
    accuracies = [run.final for run in ended]
    mean, margin = mean_and_margin(accuracies)
    reached = np.array([run.to_reach(target) for run in runs])
    return {
        "seeds": len(runs),
        "seeds_diverged": len(runs) - len(ended),
        "accuracies": tuple(accuracies),
        "accuracy": mean,
        "margin": margin,
        "bytes": mean_and_margin([run.bytes[-1] for run in ended])[0],
        "rounds": mean_and_margin([run.rounds[-1] for run in ended])[0],
        "target": target,
        "reached": int(np.isfinite(reached[:, 0]).sum()),
        "rounds_to": median_to_reach(reached[:, 0].tolist()),
        "bytes_to": median_to_reach(reached[:, 1].tolist()),
    }


def _difference(label: str, finals: Mapping[str, Mapping[str, float]], baseline: str | None) -> dict[str, Any]:
    mine, other = finals[label], finals.get(baseline or "", {})
    seeds = [seed for seed in mine if seed in other]
    if label == baseline or not seeds:
        return {}
    a, b = [mine[seed] for seed in seeds], [other[seed] for seed in seeds]
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean, margin = mean_and_margin(differences)
    return {
        "differences": tuple(differences),
        "difference": mean,
        "difference_margin": margin,
        "p": paired_p_value(a, b),
    }


def _sorted(table: pd.DataFrame, measure: Measure) -> pd.DataFrame:
    if "accuracy" not in table:
        return table
    shown = table["accuracy"].round(4) if measure.percent else table["accuracy"]
    order = pd.DataFrame({"accuracy": -measure.sign * shown, "diverged": table["seeds_diverged"]})
    return table.loc[order.sort_values(["accuracy", "diverged"], kind="stable").index].reset_index(drop=True)
