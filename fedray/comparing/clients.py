"""Tells how the evaluated model does for single clients: mean, worst tenth and spread, and their distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fedray.comparing.measure import Measure
from fedray.comparing.runs import Run

SHARES = np.linspace(0, 1, 101)
"""The shares of the clients at which a distribution is given."""

OF_CLIENTS = ("mean", "worst_tenth", "std")


def client_columns(measure: Measure) -> dict[str, str]:
    """Returns the columns of metrics.csv about single clients, by the words that a table has for them."""
    words = {"mean": "mean over clients", "worst_tenth": "worst tenth of the clients", "std": "standard deviation"}
    return {words[what]: f"clients_{measure.metric}_{what}" for what in OF_CLIENTS}


def finals_of_clients(runs: Sequence[Run], measure: Measure) -> dict[str, list[float]]:
    """Returns the last value of each column of :func:`client_columns` in each run that did not diverge, by words."""
    found: dict[str, list[float]] = {}
    for words, column in client_columns(measure).items():
        ended = [run.rows[column].dropna() for run in runs if not run.diverged and column in run.rows]
        found[words] = [float(values.iloc[-1]) for values in ended if len(values)]
    return found


def distribution(runs: Sequence[Run], measure: Measure) -> NDArray[np.float64] | None:
    """Returns the metric's value at each of :data:`SHARES` of the clients, sorted by it: a mean over the runs.

    It is that of the evaluated model at the last evaluation, on each client's test share. Returns None if no run has
    scored the clients of ``run.eval_clients``.
    """
    found = [_quantiles(run, measure) for run in runs if not run.diverged]
    kept = [each for each in found if each is not None]
    return np.mean(kept, axis=0) if kept else None


def _quantiles(run: Run, measure: Measure) -> NDArray[np.float64] | None:
    folder, column = run.folder / "evaluation.parquet", f"global_{measure.metric}"
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    # only the last file has the last round
    rows: pd.DataFrame = pq.read_table(max(folder.glob("part-*.parquet"))).to_pandas()
    if column not in rows or "in_eval_clients" not in rows:
        return None
    values = rows.loc[(rows["round"] == rows["round"].max()) & rows["in_eval_clients"], column].dropna()
    return np.quantile(values.to_numpy(np.float64), SHARES) if len(values) else None
