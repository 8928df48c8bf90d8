"""Draws the pictures of a comparison: curves with their intervals, and what groups reached over a number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedray.comparing.clients import SHARES, distribution
from fedray.comparing.compare import Comparison, Environment
from fedray.comparing.curves import fold
from fedray.comparing.grouping import Group, shown
from fedray.comparing.panel import Curve, Panel, draw_panels, legend, parts_of
from fedray.comparing.style import BESIDE, LABEL_OF_AXIS, MOST_LINES, Line, drawn, figure_of, lines_for, plain, width_of

LOSSES = {"test_loss": "test loss", "train_loss": "loss on the clients' batches"}
"""The columns that are drawn beside the compared metric, with the labels of their axes."""


def panels_of(comparison: Comparison, environment: Environment, columns: Sequence[str]) -> Iterator[Panel]:
    """Yields the panels of an environment with the mean curves of the columns of metrics.csv, with at most nine lines.

    If there are more groups, each panel has the baseline and eight others, the best first.
    """
    measure = comparison.measure
    parts = list(parts_of(environment.groups, environment.baseline))
    for column in columns:
        is_loss = column in LOSSES
        ylabel = LOSSES[column] if is_loss else f"test {measure.words}{measure.unit}"
        for number, groups in enumerate(parts, 1):
            part = f"part {number} of {len(parts)}" if len(parts) > 1 else ""
            styles = _styles(groups, comparison)
            points = [fold(group.runs, column, comparison.over) for group in groups]
            if any(map(len, points)):
                yield Panel(
                    ", ".join(filter(None, [environment.name, part])),
                    ylabel,
                    comparison.over,
                    [Curve(_name(g), styles[g.label], each) for g, each in zip(groups, points, strict=True)],
                    1.0 if is_loss else measure.scale,
                    100.0 if measure.percent and not is_loss else np.inf,
                )


def _styles(groups: Sequence[Group], comparison: Comparison) -> dict[str, Line]:
    """Returns the line of each group's name.

    A name has the same line in all pictures, if there are no more names than lines.
    """
    baselines = [each.baseline.label for each in comparison.environments if each.baseline is not None]
    names = [*baselines, *(group.label for each in comparison.environments for group in each.groups)]
    of_all = len(set(names)) <= MOST_LINES
    return lines_for(names if of_all else [group.label for group in groups])


def _name(group: Group) -> str:
    lost = sum(run.diverged for run in group.runs)
    return f"{group.label} ({lost} of {len(group.runs)} diverged)" if lost else group.label


def curve_figures(comparison: Comparison, environment: Environment) -> Iterator[tuple[str, Figure]]:
    """Yields a figure for each panel of an environment, with a sentence that says what it shows."""
    for panel in panels_of(comparison, environment, [comparison.measure.column, *LOSSES]):
        names = ", ".join(curve.name for curve in panel.curves)
        where = f"{panel.title}: " if panel.title else ""
        yield f"{where}{panel.ylabel} over {LABEL_OF_AXIS[panel.over]}, of {names}", draw_panels([panel])


def curves_figure(comparison: Comparison) -> Figure:
    """Returns one figure with the panels of the compared metric and of the test loss, of all environments."""
    columns = [comparison.measure.column, "test_loss"]
    panels = (panels_of(comparison, environment, columns) for environment in comparison.environments)
    return draw_panels([panel for each in panels for panel in each])


def clients_figures(comparison: Comparison, environment: Environment) -> Iterator[tuple[str, Figure]]:
    """Yields the distribution of the metric over clients, if they were scored, with a sentence about it."""
    measure = comparison.measure
    for groups in parts_of(environment.groups, environment.baseline):
        found = {group: distribution(group.runs, measure) for group in groups}
        if all(values is None for values in found.values()):
            continue
        figure, (axes,) = figure_of(1, legend_width=width_of(list(map(_name, groups))))
        styles = _styles(groups, comparison)
        for group, values in found.items():
            if values is not None:
                options = styles[group.label].options(len(values))
                axes.plot(100 * SHARES, measure.scale * values, label=drawn(_name(group)), **options)
        axes.set(xlabel="clients that are no better, %", ylabel=f"a client's test {measure.words}{measure.unit}")
        plain(axes)
        legend(axes)
        where = f"{environment.name}: " if environment.name else ""
        yield f"{where}clients sorted by their test {measure.words} at the end; means over runs", figure


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
    names = [shown({other: row[other] for other in others if row[other] == row[other]}) for _, row in rows.iterrows()]
    lines = {str(name): own.sort_values("number") for name, own in rows.groupby(np.array(names, dtype=str), sort=False)}
    return {name: own for name, own in lines.items() if own["number"].nunique() > 1}


def _draw_over(key: str, lines: Mapping[str, pd.DataFrame], comparison: Comparison) -> Figure:
    measure = comparison.measure
    figure, (axes,) = figure_of(1, legend_width=width_of(list(lines)))
    for name, line in lines_for(list(lines)).items():
        rows = lines[name]
        margins = measure.scale * rows["final_margin"].fillna(0)
        options = line.options(len(rows)) | {"markevery": 1}
        axes.errorbar(
            rows["number"], measure.scale * rows["final"], yerr=margins, capsize=3, label=drawn(name), **options
        )
    numbers = pd.concat([rows["number"] for rows in lines.values()])
    if numbers.min() > 0 and numbers.max() >= 20 * numbers.min():
        axes.set_xscale("log")
    axes.set(xlabel=key, ylabel=f"final test {measure.words}{measure.unit}")
    plain(axes)
    if len(lines) > 1:
        axes.legend(**BESIDE)
    return figure
