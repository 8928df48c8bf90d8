"""Draws the learning curves of a sweep's trials over the axis on which they are compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from fedray.tracking.folder import read_metrics
from fedray.tuning.axis import amount

LABELS = {"rounds": "rounds", "bytes": "bytes, down and up", "flops": "FLOPs"}
"""The label of the horizontal axis in the picture, for each axis."""

DRAWN = ("complete", "pruned")
"""The states of trials that are ranked; only these are drawn."""

BEST: dict[str, Any] = {"color": "black", "linewidth": 2}
"""Matplotlib's options for the line of the best trial."""


def runs_of(trial: Path) -> Iterator[pd.DataFrame]:
    """Yields the table metrics.csv of each run in the folder ``trial`` that has made at least one round."""
    for path in sorted(trial.glob("seed-*/metrics.csv")):
        # the file is empty if a process was killed while it created it
        if path.stat().st_size and len(rows := read_metrics(path.parent)):
            yield rows


def learning_curves(trials: pd.DataFrame, folders: list[Path], axis: str, objective: str, name: str) -> Any:
    """Returns a Matplotlib figure with a line for each run: ``objective`` over ``axis``.

    Returns None if no trial can be drawn, or if the objective is the axis itself. ``trials`` is the table of a sweep's
    trials, the best first, ``folders`` has the folder of each, and ``name`` is the sweep's name for the title. The
    colour of a line shows the rank of its trial, from dark (best) to light; the best trial is black, and pruned ones
    are dashed. The title counts the trials that are not drawn, because they diverged, failed or are running.
    """
    import matplotlib.pyplot as plt

    states = list(trials["state"])
    drawn = [place for place, state in enumerate(states) if state in DRAWN]
    if not drawn or objective.partition("_")[0] == axis:
        return None
    # Optuna changes the style of all figures that are drawn after its own
    with plt.style.context("default"):
        return _draw(trials, folders, drawn, axis, objective, name)


def _draw(trials: pd.DataFrame, folders: list[Path], drawn: list[int], axis: str, objective: str, name: str) -> Any:
    """Draws the figure that :func:`learning_curves` returns, and has the same parameters.

    ``drawn`` has the positions in ``trials``, the best first, of those trials that have a curve.
    """
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    states = list(trials["state"])
    figure, axes = plt.subplots(figsize=(8, 5))
    colours = plt.get_cmap("viridis")
    scale = plt.Normalize(1, max(2, len(drawn) / 0.9))
    seeds = 0
    for rank, place in enumerate(drawn, 1):
        runs = [(amount(rows, axis), amount(rows, objective)) for rows in runs_of(folders[place])]
        seeds = max(seeds, len(runs))
        style = BEST if rank == 1 else {"color": colours(scale(rank)), "linewidth": 1, "alpha": 0.8}
        dash = "--" if states[place] == "pruned" else "-"
        for x, y in runs:
            known = y.notna()
            # a line with a single point is invisible without a marker
            marker = "o" if known.sum() == 1 else ""
            axes.plot(x[known], y[known], dash, marker=marker, markersize=4, zorder=len(drawn) - rank + 3, **style)
    lines = [Line2D([], [], **BEST, label=f"best: trial {trials['trial'].iloc[drawn[0]]}")]
    if "pruned" in states:
        lines.append(Line2D([], [], color="grey", linestyle="--", label="pruned"))
    axes.legend(handles=lines)
    if len(drawn) > 1:
        ranks = plt.cm.ScalarMappable(scale, colours)
        bar = figure.colorbar(ranks, ax=axes, label=f"rank of the trial among {len(drawn)}, 1 is the best")
        bar.ax.set_ylim(len(drawn), 1)
        bar.ax.yaxis.set_major_locator(plt.MaxNLocator(integer=True))
    _describe(axes, axis, objective)
    axes.set_title("\n".join([f"{name}: a line per {'seed of each ' if seeds > 1 else ''}trial", *_left_out(states)]))
    return figure


def _describe(axes: Any, axis: str, objective: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set(xlabel=LABELS[axis], ylabel=objective)
    axes.grid(alpha=0.3)
    if axis == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.xaxis.set_major_formatter(EngFormatter("B" if axis == "bytes" else ""))
    values = pd.concat([pd.Series(line.get_ydata()) for line in axes.lines])
    if len(values) and values.min() > 0 and values.max() > 100 * values.min():
        axes.set_yscale("log")


def _left_out(states: list[str]) -> list[str]:
    counts = pd.Series([state for state in states if state not in DRAWN], dtype=str).value_counts()
    without = ", ".join(f"{count} {state}" for state, count in counts.items())
    return [f"not drawn: {without}"] if without else []
