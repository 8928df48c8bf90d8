"""Draws what groups reached over a number in which they differ, such as the number of clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedray.results.comparison import Compared
from fedray.results.grouping import shown
from fedray.results.style import BESIDE, MOST_LINES, Line, drawn, figure_of, lines_for, plain, width_of


@dataclass(frozen=True, eq=False)
class Quantity:
    """What is drawn over the numbers: columns of a ``table`` with a row for each group.

    ``value`` has what is drawn, and ``margin`` half the width of its interval, both as numbers to be shown. ``lost``
    are the rows of which some runs diverged, or that have no value; ``words`` says what these are.
    """

    label: str
    table: pd.DataFrame
    value: pd.Series
    margin: pd.Series
    lost: pd.Series
    words: str


def number_figures(comparison: Compared) -> Iterator[tuple[str, Figure]]:
    """Yields figures for each key of which groups have several numbers, such as ``data.clients``, with a line for each
    choice of all other keys. A sentence beside each figure says what it shows."""
    keys = list(dict.fromkeys(key for each in comparison.environments for row in each.groups for key in row.told))
    for key in keys:
        others = [other for other in keys if other != key]
        for quantity in _quantities(comparison):
            lines = _lines_over(key, others, quantity)
            for place in range(0, len(lines), MOST_LINES):
                own = {name: lines[name] for name in list(lines)[place : place + MOST_LINES]}
                rows = [row for each in own.values() for row in each.index]
                bars = "; bars are 95 % intervals" if (quantity.margin[rows] > 0).any() else ""
                crosses = f"; crosses: {quantity.words}" if quantity.lost[rows].any() else ""
                only = ", ".join(own) if len(own) == 1 else ""
                of = f", of {only}" if only else ""
                yield f"{quantity.label} over {key}{of}{bars}{crosses}", _draw(key, own, quantity)


def _quantities(comparison: Compared) -> Iterator[Quantity]:
    """Yields the final metric, the rounds to each target that all environments have, and the seconds of a round."""
    measure, table = comparison.measure, comparison.table
    lost = table["diverged"] > 0
    final = measure.scale * table["final"]
    yield Quantity(
        f"final test {measure.words}{measure.unit}", table, final, measure.scale * table["final_margin"], lost,
        "runs diverged",
    )  # fmt: skip
    shared = [{row["target"] for row in each.targets} for each in comparison.environments]
    for target in sorted(set.intersection(*shared)):
        rows = comparison.targets[comparison.targets["target"] == target].reset_index(drop=True)
        rounds = rows["rounds_to"].replace(np.inf, np.nan)
        label = f"rounds to reach {measure.shown(target)} (median)"
        yield Quantity(label, rows, rounds, rounds * np.nan, rounds.isna(), "too few runs reached it")
    of_a_round = table["seconds"] / table["rounds"]
    yield Quantity("seconds of a round (mean)", table, of_a_round, of_a_round * np.nan, lost, "runs diverged")


def _lines_over(key: str, others: Sequence[str], quantity: Quantity) -> dict[str, pd.DataFrame]:
    """Returns for each choice of the keys ``others``, by its name, the rows with at least two numbers of ``key``."""
    values = quantity.table[key].map(lambda value: None if isinstance(value, bool) else value)
    rows = quantity.table.assign(number=pd.to_numeric(values, errors="coerce")).dropna(subset="number")
    names = [shown({other: row[other] for other in others if row[other] == row[other]}) for _, row in rows.iterrows()]
    lines = {str(name): own.sort_values("number") for name, own in rows.groupby(np.array(names, dtype=str), sort=False)}
    drawn = {name: quantity.value[own.index].notna() for name, own in lines.items()}
    return {name: own for name, own in lines.items() if own["number"].nunique() > 1 and drawn[name].any()}


def _draw(key: str, lines: Mapping[str, pd.DataFrame], quantity: Quantity) -> Figure:
    figure, (axes,) = figure_of(1, legend_width=width_of(list(lines)))
    for name, line in lines_for(list(lines)).items():
        _draw_line(axes, drawn(name), lines[name], line, quantity)
    numbers = pd.concat([rows["number"] for rows in lines.values()])
    if numbers.min() > 0 and numbers.max() >= 20 * numbers.min():
        axes.set_xscale("log")
    axes.set(xlabel=key, ylabel=quantity.label)
    plain(axes)
    if len(lines) > 1:
        axes.legend(**BESIDE)
    return figure


def _draw_line(axes: Axes, name: str, rows: pd.DataFrame, line: Line, quantity: Quantity) -> None:
    options = line.options(len(rows)) | {"markevery": 1}
    values, margins = quantity.value[rows.index], quantity.margin[rows.index]
    axes.errorbar(rows["number"], values, yerr=margins, capsize=3, label=name, **options)
    lost = rows["number"][quantity.lost[rows.index]]
    # each line has its crosses at a height of its own, so that none hides another
    height = np.full(len(lost), 0.03 * (1 + line.place))
    axes.plot(lost, height, "x", color=line.colour, transform=axes.get_xaxis_transform())
