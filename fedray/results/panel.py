"""Draws panels: curves with their intervals in one pair of axes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedray.results.style import MOST_LINES, Line, escaped, figure_of, label_axes, legend

T = TypeVar("T")

BAND = "line: mean over the runs that did not diverge; band: its 95 % interval (of two runs, from one to the other)"


@dataclass(frozen=True)
class Curve:
    """One curve of a panel (a pair of axes), which is the mean of several runs, and the band around it.

    ``name`` is its name in the legend, and ``line`` is its style. ``points`` is a DataFrame with a row for each point:
    the columns ``x`` and ``mean`` are the point, and ``low`` and ``high`` the ends of the band at ``x``
    (:func:`fedray.results.curves.mean_curve`).
    """

    name: str
    line: Line
    points: pd.DataFrame


@dataclass(frozen=True)
class Panel:
    """The content of one pair of axes in a figure: ``curves``, which are means over runs, with bands around them.

    ``over`` is the quantity on the horizontal axis, such as ``rounds`` or ``bytes``. ``title`` is the text above the
    axes, and ``ylabel`` the text at the vertical axis. The curves' values are multiplied by ``scale`` before they are
    drawn, by 100 for a percentage, for example. ``ceiling`` is the largest value that can result, such as 100 for a
    percentage; it is infinite if there is none.
    """

    title: str
    ylabel: str
    over: str
    curves: Sequence[Curve]
    scale: float = 1.0
    ceiling: float = np.inf


def bands_caption(seeds: int) -> str:
    """Returns a text for the caption of a figure, which says what the bands around its curves are if each curve is the
    mean of ``seeds`` runs, such as ``bands: 95 % intervals over 5 seeds``."""
    if seeds < 2:
        return "one seed"
    return "bands: from one of 2 seeds to the other" if seeds == 2 else f"bands: 95 % intervals over {seeds} seeds"


def parts_of(items: Sequence[T], first: T | None = None) -> Iterator[Sequence[T]]:
    """Divides ``items``, such as the groups of a comparison, into parts of at most nine, because one panel of a figure
    can't show more lines. Yields the parts.

    If there are several parts and ``first`` is not None, each part begins with it. It is one of the items, such as the
    baseline.
    """
    if len(items) <= MOST_LINES:
        yield items
        return
    others = [item for item in items if item is not first]
    head = [] if first is None else [first]
    size = MOST_LINES - len(head)
    for place in range(0, len(others), size):
        yield [*head, *others[place : place + size]]


def draw_panels(panels: Sequence[Panel]) -> Figure:
    """Draws the panels (pairs of axes) into one figure and returns it. A row of the figure has at most two panels,
    and each panel has a legend beside it."""
    legends = [[curve.name for curve in panel.curves] for panel in panels]
    figure, axes = figure_of(max(1, len(panels)), 2, legends=legends)
    for place, panel in zip(axes, panels, strict=False):
        _draw(place, panel)
    return figure


def _draw(axes: Axes, panel: Panel) -> None:
    for curve in panel.curves:
        points, options = curve.points, curve.line.options(len(curve.points))
        axes.plot(points["x"], panel.scale * points["mean"], label=escaped(curve.name), **options)
        low, high = panel.scale * points["low"], panel.scale * points["high"]
        axes.fill_between(points["x"], low, high, color=curve.line.colour, alpha=0.13, linewidth=0)
    label_axes(axes, panel.over, panel.ylabel, escaped(panel.title))
    values = np.concatenate(
        [np.zeros(0), *(panel.scale * curve.points["mean"].to_numpy(float) for curve in panel.curves)]
    )
    values = values[np.isfinite(values)]
    if len(values):
        axes.set_xlim(left=0)
        # the axis ends a little beyond the means, so that wide intervals do not press the curves together
        least, most = values.min(), values.max()
        if np.isinf(panel.ceiling) and least > 0 and most > 100 * least:
            axes.set_yscale("log")
            axes.set_ylim(least / 1.5, 1.5 * most)
        else:
            axes.set_ylim(ends_of(values, axes.get_ylim(), panel.ceiling))
    legend(axes)


def ends_of(values: NDArray[np.float64], drawn: tuple[float, float], ceiling: float) -> tuple[float, float]:
    """Returns the lower and the upper end of a vertical axis, which lie a little beyond the means that are drawn. Wide
    intervals around the means may be cut off.

    Args:
        values: the means, of which there is at least one.
        drawn: the lower and the upper end of the axis with which everything, intervals included, is visible. The result
            does not go beyond them, unless all means are equal.
        ceiling: the largest value that a mean can have.
    """
    least, most = float(values.min()), float(values.max())
    room = 0.15 * (most - least) or 0.1 * abs(most) or 1.0
    if most > least:
        return max(drawn[0], least - room), min(drawn[1], most + room, max(most, ceiling))
    return least - room, most + room
