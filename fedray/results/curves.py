"""Averages the curves of runs that differ only in their seeds: a mean curve with an interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedray.results.measure import AXES
from fedray.results.runs import RecordedRun
from fedray.results.statistics import LEAST_RUNS, margin_of


def mean_curve(runs: Sequence[RecordedRun], column: str, over: str = "rounds", smoothing: float = 0.0) -> pd.DataFrame:
    """Returns the mean learning curve of ``runs`` that differ only in their seeds. The DataFrame has a row for each
    round in which all of them were evaluated. Runs that diverged or lack the column are left out.

    Its columns are:

    - ``round``.
    - ``x``: the amount of ``over`` up to this round, as a mean over the runs. ``over`` is a key of
      :data:`~fedray.results.measure.AXES`, such as ``bytes``.
    - ``mean``: the mean of the ``column`` of metrics.csv, such as ``test_accuracy``.
    - ``low`` and ``high``: the ends of the 95 % interval of the mean (Student's t), or the lowest and the highest value
      if there are fewer than three runs.
    - ``runs``: the number of runs.

    With ``smoothing`` s, at least 0 and below 1, the values of each run are replaced by their exponential moving
    average: s times the previous average plus (1 - s) times the value.
    """
    ended = [run.rows.set_index("round") for run in runs if not run.diverged and column in run.rows]
    names = ["round", "x", "mean", "low", "high", "runs"]
    if not ended:
        return pd.DataFrame(columns=names, dtype=float)
    values = pd.concat([rows[column] for rows in ended], axis=1).dropna()
    values = values.ewm(alpha=1 - smoothing, adjust=False).mean() if smoothing else values
    rounds = values.index
    # the index of the rows is the round
    amounts = [rows[AXES[over]] if over != "rounds" else pd.Series(rows.index, rows.index) for rows in ended]
    x = pd.concat(amounts, axis=1).loc[rounds].mean(axis=1, skipna=False)
    numbers = values.to_numpy(float)
    mean = numbers.mean(axis=1)
    if len(ended) < LEAST_RUNS:
        low, high = numbers.min(axis=1), numbers.max(axis=1)
    else:
        margin = margin_of(1.0, len(ended)) * numbers.std(axis=1, ddof=1)
        low, high = mean - margin, mean + margin
    found = {"round": rounds, "x": x.to_numpy(), "mean": mean, "low": low, "high": high, "runs": len(ended)}
    return pd.DataFrame(found, columns=names).replace([np.inf, -np.inf], np.nan)
