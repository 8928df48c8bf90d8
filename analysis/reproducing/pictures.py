"""Draws what was measured beside what was published."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedray.results.curves import mean_curve
from fedray.results.panel import Curve, Panel, bands_caption, draw_panels, ends_of, parts_of
from fedray.results.style import BESIDE, Line, clean_frame, escaped, figure_of, lines_for, width_of
from reproducing.measure import PERCENT, Measured, metric_of, name_of, on_one_scale, without_value
from reproducing.published import PublishedTable

UNITS = {
    "rounds": "rounds", "ratio": "rounds over those of the first row", "gflops": "GFLOPs", "gib": "GiB",
    "minutes": "minutes of the virtual clock",
    "gib_sent": "GiB",
}  # fmt: skip

MEASURED, PUBLISHED = "#0072b2", "#d55e00"

NUMBERED = re.compile(r"(\S+) = ([0-9.]+)")
"""The names of columns that are points of a curve, such as ``gamma = 0.5``."""

WIDE = 10
"""A logarithmic axis has numbers of which the largest is more than so many times the smallest."""


def picture(table: PublishedTable, found: Sequence[Measured]) -> Figure | None:
    """Returns a picture of a table, or None if none of its runs has ended.

    If its columns are values of one number, each row is a curve over that number, and the other way round. Otherwise
    each column has a panel.
    """
    found = [one for one in found if one.runs]
    rows = [name for name in table.rows if any(one.cell.row == name for one in found)]
    columns = [name for name in table.columns if any(one.cell.column == name for one in found)]
    if not found:
        return None
    if numbers := _numbers(columns):
        return _over_numbers(table, found, "row", numbers)
    if numbers := _numbers(rows):
        return _over_numbers(table, found, "column", numbers)
    panel = (2.8 + width_of(table.rows), 1.1 + 0.32 * len(table.rows))
    figure, axes = figure_of(len(columns), columns=min(3, len(columns)), panel=panel)
    for place, column in zip(axes, columns, strict=True):
        _draw_column(place, column, [one for one in found if one.cell.column == column], table)
    return figure


def curves(table: PublishedTable, found: Sequence[Measured]) -> Figure | None:
    """Returns the mean curves of the accuracy over rounds, with their intervals, or None if no run has ended.

    Each column of the table has a panel with a line for each row, or several panels with at most nine lines, which all
    have the first row. Columns of the same runs, which are read after different rounds, share a panel. A curve ends
    with the first of its runs.
    """
    columns: dict[tuple[str, ...], list[str]] = {}
    for name in table.columns:
        runs = tuple(f"{one.cell.name}, {one.cell.of}" for one in found if one.cell.column == name)
        columns.setdefault(runs, []).append(name)
    panels = []
    metric = metric_of(table, table.cells[0])
    ceiling = 100.0 if metric.percent else math.inf
    for names in columns.values():
        column = " and ".join(names)
        of_column = [one for one in found if one.cell.column == names[0] and one.runs]
        if not of_column:
            continue
        parts = list(parts_of(of_column, of_column[0]))
        for number, part in enumerate(parts, 1):
            lines = lines_for([one.cell.row for one in part])
            shown = [
                Curve(
                    _name(one),
                    lines[one.cell.row],
                    mean_curve(one.runs, metric_of(table, one.cell).column, smoothing=table.smoothing),
                )
                for one in part
            ]
            title = f"{column}, part {number} of {len(parts)}" if len(parts) > 1 else column
            title += f"; {bands_caption(max(len(one.runs) for one in part))}"
            if any(len(curve.points) for curve in shown):
                panels.append(Panel(title, _unit_of_curves(table), "rounds", shown, metric.scale, ceiling))
    return draw_panels(panels) if panels else None


def _name(one: Measured) -> str:
    return f"{one.cell.row} ({one.diverged} of {len(one.runs)} diverged)" if one.diverged else one.cell.row


def _numbers(names: Sequence[str]) -> dict[str, float]:
    """Returns the numbers that the rows or columns of these names stand for, such as 0.5 for ``gamma = 0.5``: none if
    they are fewer than three, or not all of one parameter."""
    matches = [match for name in names if (match := NUMBERED.fullmatch(name))]
    of_one = len(matches) == len(names) > 2 and len({match[1] for match in matches}) == 1
    return {match[0]: float(match[2]) for match in matches} if of_one else {}


def _over_numbers(
    table: PublishedTable,
    found: Sequence[Measured],
    of: Literal["row", "column"],
    numbers: Mapping[str, float],
) -> Figure:
    """Returns a picture with a curve for each row or column of the table, as ``of`` says.

    ``numbers`` has the number of each column, where rows are curves, and otherwise of each row. If there are more
    curves than a panel has lines, each panel has the first one, and all have the same axes.
    """
    points: dict[str, dict[float, Measured]] = {}
    for one in found:
        name, number = (one.cell.row, one.cell.column) if of == "row" else (one.cell.column, one.cell.row)
        points.setdefault(name, {})[numbers[number]] = one
    parts = list(parts_of(list(points), next(iter(points))))
    figure, axes = figure_of(len(parts), columns=1, legend_width=width_of(list(points)))
    missing = any(not math.isfinite(one.value) for one in found)
    key = _key(found, "band", *(["×: diverged, or target not reached"] if missing else []))
    for place, part in zip(axes, parts, strict=True):
        for name, line in lines_for(part).items():
            _draw_curve(place, dict(sorted(points[name].items())), name, line)
        if min(numbers.values()) > 0 and max(numbers.values()) > WIDE * min(numbers.values()):
            place.set_xscale("log")
        place.set_xticks(list(numbers.values()), [f"{number:g}" for number in numbers.values()])
        place.set_xticks([], minor=True)
        place.set(xlabel=f"{next(iter(numbers)).split(' = ')[0]}\n{key}", ylabel=_unit(table))
        clean_frame(place)
        place.legend(**BESIDE)
    _limit_alike(axes, found, 100.0 if table.measure in PERCENT else math.inf)
    return figure


def _limit_alike(axes: Sequence[Axes], found: Sequence[Measured], ceiling: float) -> None:
    """Gives all panels the same axis, which ends a little beyond what was measured and what was published."""
    limits = [place.get_ylim() for place in axes]
    drawn = min(low for low, _ in limits), max(high for _, high in limits)
    values = np.array([value for one in found for value in (one.value, _published(one))])
    values = values[np.isfinite(values)]
    for place in axes:
        place.set_ylim(ends_of(values, drawn, ceiling) if len(values) else drawn)


def _published(one: Measured) -> float:
    """Returns the published value, or NaN if it is no number."""
    return float(one.cell.published) if isinstance(one.cell.published, (int, float)) else math.nan


def _draw_curve(axes: Axes, measured: Mapping[float, Measured], name: str, line: Line) -> None:
    points = {x: one for x, one in measured.items() if math.isfinite(one.value)}
    axes.plot(list(points), [one.value for one in points.values()], label=escaped(name), **line.options(1))
    low, high = ([one.value + sign * one.margin for one in points.values()] for sign in (-1, 1))
    axes.fill_between(list(points), low, high, color=line.colour, alpha=0.13, linewidth=0)
    for x, one in measured.items():
        if x not in points:
            axes.plot(x, 0.03, "x", color=line.colour, transform=axes.get_xaxis_transform())
        if math.isfinite(_published(one)):
            axes.plot(x, _published(one), "D", fillstyle="none", color=line.colour, markersize=7.5, zorder=3)


def _draw_column(axes: Axes, column: str, found: Sequence[Measured], table: PublishedTable) -> None:
    """Draws a row of the picture for each row of the table: measured as a dot with its interval, published hollow."""
    places = {row: -number for number, row in enumerate(table.rows)}
    for one in found:
        y = places[one.cell.row]
        value, published = on_one_scale(table, one)
        if math.isfinite(value):
            if table.marks == "boxes":
                _draw_box(axes, y, one.spread)
            elif table.marks == "bars":
                margin = 0.0 if math.isnan(one.margin) else one.margin
                axes.barh(y, value, 0.6, xerr=margin or None, color=MEASURED, capsize=2.5)
            elif len(one.values) == 2:
                axes.plot(one.values, [y, y], "o", color=MEASURED, markersize=5.5)
            else:
                margin = 0.0 if math.isnan(one.margin) else one.margin
                axes.errorbar(value, y, xerr=margin, fmt="o", color=MEASURED, markersize=5.5, capsize=2.5)
        elif one.runs:
            said = without_value(table, one) or "diverged"
            # beside the panel, where no mark can lie under it
            axes.text(1.02, y, said, transform=axes.get_yaxis_transform(), ha="left", va="center", color=MEASURED)
        if math.isfinite(published):
            axes.plot(published, y, "D", markerfacecolor="none", markeredgecolor=PUBLISHED, markersize=6.5)
    axes.set_yticks(list(places.values()), list(places), fontsize=9)
    axes.set_ylim(-len(places) + 0.5, 0.5)
    axes.set_title(column, fontsize=10, loc="left")
    if table.measure not in PERCENT:
        axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
    key = "boxes: last rounds of all runs"
    if table.marks != "boxes":
        key = _key(found, "bar", "● measured") if table.marks == "dots" else _key(found, "line", "bars: measured")
    axes.set_xlabel(f"{_unit(table)}\n{key}", fontsize=9)
    clean_frame(axes)


def _draw_box(axes: Axes, y: float, values: Sequence[float]) -> None:
    line = {"color": MEASURED}
    axes.boxplot(
        values, vert=False, positions=[y], widths=0.6, manage_ticks=False, boxprops=line, whiskerprops=line,
        capprops=line, medianprops=line, flierprops={"markeredgecolor": MEASURED, "markersize": 3},
    )  # fmt: skip


def _unit(table: PublishedTable) -> str:
    return UNITS.get(table.measure, _unit_of_curves(table))


def _unit_of_curves(table: PublishedTable) -> str:
    return f"{name_of(table)}{metric_of(table, table.cells[0]).unit}"


def _key(found: Sequence[Measured], interval: str, *marks: str) -> str:
    """Returns what the ``marks`` of a panel are, and what its intervals (bars or bands) and hollow marks are, if there
    are any."""
    intervals = [f"{interval}: 95 % interval"] if any(one.margin > 0 for one in found) else []
    hollow = ["◇ published"] if any(math.isfinite(_published(one)) for one in found) else []
    return ", ".join([*marks, *intervals, *hollow])
