"""Draws the pictures of a comparison: curves with their intervals, and what groups reached over a number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from fedray.comparing.clients import SHARES, distribution
from fedray.comparing.compare import Comparison, Environment
from fedray.comparing.curves import fold
from fedray.comparing.grouping import Group, shown
from fedray.comparing.style import LABEL_OF_AXIS, MOST_LINES, Line, dress, figure_of, lines_for, plain

BAND = "line: mean over the runs that did not diverge; band: its 95 % interval (of two runs, from one to the other)"

BESIDE: dict[str, Any] = {
    "loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False, "fontsize": 9, "borderaxespad": 0,
}  # fmt: skip
"""Matplotlib's options for a legend beside its panel, where it hides nothing."""


@dataclass(frozen=True)
class Panel:
    """A panel with the curves of some groups of an environment: the metric of the column ``column`` over rounds or
    another axis."""

    title: str
    ylabel: str
    column: str
    scale: float
    groups: Sequence[Group]


def panels_of(comparison: Comparison, environment: Environment) -> Iterator[Panel]:
    """Yields the panels of an environment: the compared metric and the losses, each with at most nine lines.

    If there are more groups, each panel has the baseline and eight others, the best first.
    """
    measure = comparison.measure
    columns = {
        measure.column: (f"test {measure.words}{measure.unit}", measure.scale),
        "test_loss": ("test loss", 1.0),
        "train_loss": ("loss on the clients' batches", 1.0),
    }
    parts = _parts(environment)
    for column, (ylabel, scale) in columns.items():
        for number, groups in enumerate(parts, 1):
            if not any(len(fold(group.runs, column)) for group in groups):
                continue
            part = f"part {number} of {len(parts)}" if len(parts) > 1 else ""
            yield Panel(", ".join(filter(None, [environment.name, part])), ylabel, column, scale, groups)


def _parts(environment: Environment) -> list[Sequence[Group]]:
    groups, baseline = environment.groups, environment.baseline
    if len(groups) <= MOST_LINES:
        return [groups]
    others = [group for group in groups if group is not baseline]
    size = MOST_LINES - (baseline is not None)
    first = [baseline] if baseline is not None else []
    return [[*first, *others[place : place + size]] for place in range(0, len(others), size)]


def _styles(groups: Sequence[Group], comparison: Comparison) -> dict[str, Line]:
    """Returns the line of each group's name.

    A name has the same line in all pictures, if there are no more names than lines.
    """
    baselines = [each.baseline.label for each in comparison.environments if each.baseline is not None]
    names = [*baselines, *(group.label for each in comparison.environments for group in each.groups)]
    of_all = len(set(names)) <= MOST_LINES
    return lines_for(names if of_all else [group.label for group in groups])


def draw_panel(axes: Axes, panel: Panel, comparison: Comparison) -> None:
    """Draws the curves of a panel."""
    styles = _styles(panel.groups, comparison)
    for group in panel.groups:
        curve = fold(group.runs, panel.column, comparison.over)
        line = styles[group.label]
        y = panel.scale * curve["mean"]
        axes.plot(curve["x"], y, label=_name(group), **line.options(len(curve)))
        low, high = panel.scale * curve["low"], panel.scale * curve["high"]
        axes.fill_between(curve["x"], low, high, color=line.colour, alpha=0.13, linewidth=0)
    dress(axes, comparison.over, panel.ylabel, panel.title)
    _limit(axes, panel, comparison)


def _name(group: Group) -> str:
    lost = sum(run.diverged for run in group.runs)
    return f"{group.label} ({lost} of {len(group.runs)} diverged)" if lost else group.label


def _limit(axes: Axes, panel: Panel, comparison: Comparison) -> None:
    """Keeps wide intervals from pressing the curves together: the axis ends a little beyond the means."""
    values = _values(axes)
    if not len(values):
        return
    axes.set_xlim(left=0)
    least, most = values.min(), values.max()
    if least > 0 and most > 100 * least:
        axes.set_yscale("log")
        axes.set_ylim(least / 1.5, 1.5 * most)
        return
    low, high = axes.get_ylim()
    room = 0.15 * (most - least) or 0.1 * abs(most) or 1.0
    if most > least:
        is_percent = panel.column == comparison.measure.column and comparison.measure.percent
        axes.set_ylim(max(low, least - room), min(high, most + room, max(most, 100.0) if is_percent else np.inf))
    else:
        axes.set_ylim(least - room, most + room)


def _values(axes: Axes) -> NDArray[np.float64]:
    """Returns all finite values of the lines of a panel."""
    values = np.concatenate([np.zeros(0), *(np.asarray(line.get_ydata(), np.float64) for line in axes.lines)])
    return values[np.isfinite(values)]


def legend(axes: Axes) -> None:
    """Puts the names of the lines beside a panel, in the order in which the lines end."""

    def end(line: Line2D) -> float:
        values = np.asarray(line.get_ydata(), np.float64)
        return -float(values[-1]) if len(values) and np.isfinite(values[-1]) else np.inf

    axes.legend(handles=sorted(axes.lines, key=end), **BESIDE)


def curve_figures(comparison: Comparison, environment: Environment) -> Iterator[tuple[str, Figure]]:
    """Yields a figure for each panel of an environment, with a sentence that says what it shows."""
    for panel in panels_of(comparison, environment):
        figure, (axes,) = figure_of(1, legend_width=_width_of_legend(panel.groups))
        draw_panel(axes, panel, comparison)
        legend(axes)
        names = ", ".join(group.label for group in panel.groups)
        where = f"{panel.title}: " if panel.title else ""
        yield f"{where}{panel.ylabel} over {LABEL_OF_AXIS[comparison.over]}, of {names}", figure


def clients_figure(comparison: Comparison, environment: Environment) -> Iterator[tuple[str, Figure]]:
    """Yields the distribution of the metric over clients, if they were scored, with a sentence about it."""
    measure = comparison.measure
    for groups in _parts(environment):
        found = {group: distribution(group.runs, measure) for group in groups}
        if all(values is None for values in found.values()):
            continue
        figure, (axes,) = figure_of(1, legend_width=_width_of_legend(groups))
        styles = _styles(groups, comparison)
        for group, values in found.items():
            if values is not None:
                options = styles[group.label].options(len(values))
                axes.plot(100 * SHARES, measure.scale * values, label=_name(group), **options)
        axes.set(xlabel="clients that are no better, %", ylabel=f"a client's test {measure.words}{measure.unit}")
        plain(axes)
        legend(axes)
        where = f"{environment.name}: " if environment.name else ""
        yield f"{where}clients sorted by their test {measure.words} at the end; means over runs", figure


def curves_figure(comparison: Comparison) -> Figure:
    """Returns one figure with all panels of the compared metric and of the test loss."""
    panels = [
        panel
        for environment in comparison.environments
        for panel in panels_of(comparison, environment)
        if panel.column in (comparison.measure.column, "test_loss")
    ]
    width = max((_width_of_legend(panel.groups) for panel in panels), default=0)
    figure, axes = figure_of(len(panels), legend_width=2 * width)
    for place, panel in zip(axes, panels, strict=True):
        draw_panel(place, panel, comparison)
        legend(place)
    return figure


def _width_of_legend(groups: Sequence[Group]) -> float:
    """Returns the width in inches that the longest name takes."""
    return 0.6 + 0.075 * max(len(_name(group)) for group in groups)


def number_figures(comparison: Comparison) -> Iterator[tuple[str, Figure]]:
    """Yields a figure for each key of which groups have several numbers, such as ``data.clients``: the final metric
    over these numbers, with a line for each choice of all other keys. A sentence beside it says what it shows."""
    keys = list(dict.fromkeys(key for each in comparison.environments for row in each.groups for key in row.told))
    for key in keys:
        lines = _lines_over(key, [other for other in keys if other != key], comparison.table)
        for place in range(0, len(lines), MOST_LINES):
            names = list(lines)[place : place + MOST_LINES]
            figure = _draw_over(key, {name: lines[name] for name in names}, comparison)
            yield f"final test {comparison.measure.words} over {key}; bars are 95 % intervals", figure


def _lines_over(key: str, others: Sequence[str], table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns the rows with at least two numbers of ``key`` for each choice of the keys ``others``, by its name."""
    numbers = pd.to_numeric(table[key], errors="coerce")
    rows = table.assign(number=numbers).dropna(subset=["number", "final"])
    names = [shown({other: row[other] for other in others if not pd.isna(row[other])}) for _, row in rows.iterrows()]
    lines = {str(name): own.sort_values("number") for name, own in rows.groupby(np.array(names, dtype=str), sort=False)}
    return {name: own for name, own in lines.items() if own["number"].nunique() > 1}


def _draw_over(key: str, lines: Mapping[str, pd.DataFrame], comparison: Comparison) -> Figure:
    measure = comparison.measure
    figure, (axes,) = figure_of(1, legend_width=0.6 + 0.075 * max(map(len, lines)))
    for name, line in lines_for(list(lines)).items():
        rows = lines[name]
        margins = measure.scale * rows["final_margin"].fillna(0)
        options = line.options(len(rows)) | {"markevery": 1}
        axes.errorbar(rows["number"], measure.scale * rows["final"], yerr=margins, capsize=3, label=name, **options)
    numbers = pd.concat([rows["number"] for rows in lines.values()])
    if numbers.min() > 0 and numbers.max() >= 20 * numbers.min():
        axes.set_xscale("log")
    axes.set(xlabel=key, ylabel=f"final test {measure.words}{measure.unit}")
    plain(axes)
    if len(lines) > 1:
        axes.legend(**BESIDE)
    return figure
