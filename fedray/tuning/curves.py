"""Draws the learning curves of a sweep's trials over the axis on which they are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedray.tracking.tables import read_metrics
from fedray.tuning.axis import amount

LABELS = {
    "rounds": "rounds", "bytes": "bytes, down and up", "flops": "FLOPs", "virtual_seconds": "virtual seconds",
    "joules": "joules",
}  # fmt: skip
"""The label of the horizontal axis in the picture, for each axis."""

DRAWN = ("complete", "pruned")
"""The states of trials that have a rank. Only their curves are drawn."""


def runs_of(trial: Path) -> Iterator[pd.DataFrame]:
    """Yields the metrics of each run of a trial, as a table with a row for each round (the run's metrics.csv).
    ``trial`` is the folder of the trial. Its subfolders ``seed-*`` are the run folders, which are read in the order of
    their names. Runs that have not finished a round are left out."""
    for path in sorted(trial.glob("seed-*/metrics.csv")):
        # the file is empty if the process was killed while creating it
        if path.stat().st_size and len(rows := read_metrics(path.parent)):
            yield rows


def learning_curves(trials: pd.DataFrame, folders: Sequence[Path], axis: str, objective: str, name: str) -> Any:
    """Draws the learning curves of the trials of a sweep, and returns the Matplotlib figure. It has a line for each run
    of each trial, which shows the ``objective``, such as ``validation_accuracy``, over ``axis``, such as the rounds or
    bytes since the run began.

    ``trials`` is the table of the sweep's trials, the best first, with columns ``trial`` and ``state``; ``folders`` has
    the folder of each trial in the same order; and ``name`` is the sweep's name for the title. The colour of a line
    shows the rank of its trial, from dark (best) to light. The best trial is black, and lines of pruned trials are
    dashed. Trials that diverged, failed or are still running are not drawn; the title says how many these are.

    Returns None if no trial can be drawn, or if the objective is the axis itself.
    """
    import matplotlib.pyplot as plt

    states = trials["state"].tolist()
    drawn = [place for place, state in enumerate(states) if state in DRAWN]
    if not drawn or axis in (objective, objective.partition("_")[0]):
        return None
    # Optuna changes the style of all figures that are drawn after its pictures
    with plt.style.context("default"):
        figure, axes = plt.subplots(figsize=(8, 5))
        seeds = 0
        # the best trial is drawn last, on top of the others
        for rank, place in reversed(list(enumerate(drawn))):
            runs = list(runs_of(folders[place]))
            seeds = max(seeds, len(runs))
            style: dict[str, Any] = {"linestyle": "--" if states[place] == "pruned" else "-", "linewidth": 1}
            style["color"] = plt.get_cmap("viridis")(0.9 * rank / len(drawn))
            if rank == 0:
                style |= {"color": "black", "linewidth": 2, "label": f"best: trial {trials['trial'].iloc[place]}"}
            for rows in runs:
                known = rows[amount(rows, objective).notna()]
                # a line with a single point is invisible without a marker
                marker = "o" if len(known) == 1 else ""
                axes.plot(amount(known, axis), amount(known, objective), marker=marker, **style)
        axes.set_title(f"{name}: a line per {'seed of each ' if seeds > 1 else ''}trial{_left_out(states)}")
        axes.set(xlabel=LABELS[axis], ylabel=objective)
        axes.grid(alpha=0.3)
        axes.legend(title="dashed: pruned" if "pruned" in states else None)
        _set_scales(axes, axis)
    return figure


def _set_scales(axes: Any, axis: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    if axis == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.xaxis.set_major_formatter(EngFormatter("B" if axis == "bytes" else ""))
    low, high = axes.dataLim.intervaly
    if 0 < low < high / 100:
        axes.set_yscale("log")


def _left_out(states: Sequence[str]) -> str:
    counts = pd.Series([state for state in states if state not in DRAWN], dtype=str).value_counts()
    without = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f"\nnot drawn: {without}" if without else ""
