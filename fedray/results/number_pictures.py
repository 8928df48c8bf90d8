"""Draws the results of groups over a number in which they differ, such as the number of clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedray.results.comparison import ComparisonTables
from fedray.results.grouping import name_of_values
from fedray.results.style import MOST_LINES, clean_frame, escaped, figure_of, legend, lines_for


@dataclass(frozen=True, eq=False)
class Quantity:
    """A result of groups of runs that is drawn over a number in which the groups differ, such as the number of clients.

    ``table`` is a table of a comparison with a row for each group and three additional columns. ``value`` is the result
    that is drawn. ``margin`` is half the width of its 95 % interval, or NaN if no interval is drawn. Both are in the
    unit of the vertical axis. ``lost`` says whether a cross is drawn for the group. ``label`` is the text at the
    vertical axis, and ``lost_means`` explains the crosses, as in ``runs diverged``.
    """

    label: str
    table: pd.DataFrame
    lost_means: str


def number_figures(comparison: ComparisonTables) -> Iterator[tuple[str, Figure]]:
    """Draws how the results of a comparison depend on its numeric settings, such as ``data.clients``: each setting that
    is a number and differs between groups of runs. Yields pairs: a sentence that says what the figure shows, and the
    figure.

    Each figure has one of these settings on its horizontal axis. On its vertical axis is the final metric, the number
    of rounds until the metric reached a target value, or the seconds of a round. A figure has a line for each
    combination of values of the other settings in which groups differ.
    """
    keys = list(dict.fromkeys(key for group in comparison.groups for key in (*group.environment, *group.values)))
    for key in keys:
        others = [other for other in keys if other != key]
        for quantity in _quantities(comparison):
            lines = _lines_over(key, others, quantity.table)
            for place in range(0, len(lines), MOST_LINES):
                part = {name: lines[name] for name in list(lines)[place : place + MOST_LINES]}
                rows = pd.concat(part.values())
                bars = "; bars are 95 % intervals" if (rows["margin"] > 0).any() else ""
                crosses = f"; crosses: {quantity.lost_means}" if rows["lost"].any() else ""
                only = f", of {next(iter(part))}" if len(part) == 1 and next(iter(part)) else ""
                yield f"{quantity.label} over {key}{only}{bars}{crosses}", _draw(key, part, quantity.label)


def _quantities(comparison: ComparisonTables) -> Iterator[Quantity]:
    """Yields the results that are drawn over a number: the final metric, the rounds to each target that all
    environments have, and the seconds of a round."""
    measure, table = comparison.measure, comparison.table
    table["lost"] = table["diverged"] > 0
    final = table.assign(value=measure.scale * table["final"], margin=measure.scale * table["final_margin"])
    yield Quantity(f"final test {measure.words}{measure.unit}", final, "runs diverged")
    shared = [{row["target"] for row in each.targets} for each in comparison.environments]
    for target in sorted(set.intersection(*shared)):
        rows = comparison.targets[comparison.targets["target"] == target].reset_index(drop=True)
        rounds = rows["rounds_to"].replace(np.inf, np.nan)
        label = f"rounds to reach {measure.shown(target)} (median)"
        yield Quantity(label, rows.assign(value=rounds, margin=np.nan, lost=rounds.isna()), "too few runs reached it")
    seconds = table.assign(value=table["seconds"] / table["rounds"], margin=np.nan)
    yield Quantity("seconds of a round (mean)", seconds, "runs diverged")


def _lines_over(key: str, others: Sequence[str], table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns the rows of ``table`` from which each line of a picture over ``key`` is drawn, as DataFrames by the
    line's name.

    There is a line for each choice of the keys ``others`` for which there are at least two numbers of ``key``.
    """
    values = table[key].map(lambda value: None if isinstance(value, bool) else value)
    rows = table.assign(number=pd.to_numeric(values, errors="coerce")).dropna(subset="number")
    # NaN marks a key that a group does not have
    names = [name_of_values({k: row[k] for k in others if row[k] == row[k]}) for _, row in rows.iterrows()]
    lines = {str(name): line.sort_values("number") for name, line in rows.groupby(np.array(names, str), sort=False)}
    return {n: line for n, line in lines.items() if line["number"].nunique() > 1 and line["value"].notna().any()}


def _draw(key: str, lines: Mapping[str, pd.DataFrame], ylabel: str) -> Figure:
    figure, (axes,) = figure_of(1, legends=[list(lines)])
    for name, line in lines_for(list(lines)).items():
        rows, options = lines[name], line.options(len(lines[name])) | {"markevery": 1}
        axes.errorbar(rows["number"], rows["value"], yerr=rows["margin"], capsize=3, label=escaped(name), **options)
        lost = rows["number"][rows["lost"]]
        # the crosses of each line are at a different height, so that none hides another
        height = np.full(len(lost), 0.03 * (1 + line.place))
        axes.plot(lost, height, "x", color=line.colour, transform=axes.get_xaxis_transform())
    numbers = pd.concat([rows["number"] for rows in lines.values()])
    if numbers.min() > 0 and numbers.max() >= 20 * numbers.min():
        axes.set_xscale("log")
    axes.set(xlabel=key, ylabel=ylabel)
    clean_frame(axes)
    if len(lines) > 1:
        legend(axes)
    return figure
