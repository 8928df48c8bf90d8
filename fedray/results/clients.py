"""Computes how good models are for single clients: mean, worst tenth, standard deviation, and distribution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fedray.results.measure import Measure
from fedray.results.runs import RecordedRun
from fedray.results.statistics import mean_and_margin

SHARES = np.linspace(0, 1, 101)
"""The fractions of clients at which a distribution is given."""

OF_CLIENTS = {"mean": "mean over clients", "worst_tenth": "worst tenth of the clients", "std": "standard deviation"}
"""The statistics over single clients in metrics.csv, such as ``clients_accuracy_mean``, each with its name in texts."""

PERSONAL, FINETUNED = "personal_", "finetuned_"
"""What columns of the clients' own models begin with: ``clients_personal_accuracy_mean``, ``personal_accuracy``."""


def finals_of_clients(runs: Sequence[RecordedRun], measure: Measure, model: str = "") -> dict[str, list[float]]:
    """Returns how good the final models of ``runs`` are for single clients. The runs differ only in their seeds.
    ``model`` says which models: the global one, or the clients' own (:data:`PERSONAL`, :data:`FINETUNED`).

    The dict has the keys ``mean`` (the mean of the metric ``measure`` over clients), ``worst_tenth`` (its mean over the
    worst tenth of the clients) and ``std`` (its standard deviation over clients). Each value is a list with a number
    for each run, from the last round in which clients were scored. Runs that diverged or scored no clients are left
    out.
    """
    found: dict[str, list[float]] = {}
    for what in OF_CLIENTS:
        column = f"clients_{model}{measure.metric}_{what}"
        ended = [run.rows[column].dropna() for run in runs if not run.diverged and column in run.rows]
        found[what] = [float(values.iloc[-1]) for values in ended if len(values)]
    return found


def outcome_of_clients(runs: Sequence[RecordedRun], measure: Measure) -> dict[str, float]:
    """Returns how good the final models of ``runs``, which differ only in their seeds, are for single clients, as
    columns of a comparison's table.

    The dict has ``clients_mean``, ``clients_worst_tenth`` and ``clients_std``: the mean of the metric ``measure`` over
    clients, its mean over the worst tenth of the clients, and its standard deviation over clients. Each is averaged
    over the runs that did not diverge. ``clients_mean_margin`` and so on are half the widths of the 95 % intervals of
    these averages. All are NaN if no single clients were scored. ``clients_personal_mean`` and so on say the same of
    personal models, and ``clients_finetuned_mean`` and so on of fine-tuned ones.
    """
    found: dict[str, float] = {}
    for model in ("", PERSONAL, FINETUNED):
        for what, values in finals_of_clients(runs, measure, model).items():
            name = f"clients_{model}{what}"
            found[name], found[f"{name}_margin"] = mean_and_margin(values)
    return found


def last_scores(folder: Path) -> pd.DataFrame | None:
    """Returns the scores of single clients in the last round in which clients were scored, from the run's ``folder``,
    or None if no clients were scored.

    The DataFrame has a row for each client and the columns of evaluation.parquet, such as ``global_accuracy``.
    """
    # the last file holds the last round
    last = max((folder / "evaluation.parquet").glob("part-*.parquet"), default=None)
    if last is None:
        return None
    rows: pd.DataFrame = pq.read_table(last).to_pandas()
    rows = rows[rows["round"] == rows["round"].max()]
    return rows


def distribution(runs: Sequence[RecordedRun], measure: Measure) -> NDArray[np.float64] | None:
    """Returns how the metric ``measure`` is distributed over clients, as a mean over ``runs``, which differ only in
    their seeds. A picture of a comparison shows this curve.

    The result ``[101]`` has the quantiles of the metric at the fractions 0, 0.01, ..., 1 of the clients
    (:data:`SHARES`). The metric is computed for the clients' personal models at the last evaluation, or if they have
    none for the global model, on each client's own test samples. Runs that diverged are left out. Returns None if no
    run has scored the clients of ``run.eval_clients``.
    """
    found = []
    for run in runs:
        rows = None if run.diverged else last_scores(run.folder)
        if rows is None:
            continue
        column = next((name for name in (PERSONAL + measure.metric, f"global_{measure.metric}") if name in rows), "")
        if {column, "in_eval_clients"} <= {*rows}:
            values = rows.loc[rows["in_eval_clients"], column].dropna().to_numpy(np.float64)
            found += [np.quantile(values, SHARES)] if len(values) else []
    return np.mean(found, axis=0) if found else None
