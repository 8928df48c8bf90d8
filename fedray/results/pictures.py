"""Draws the pictures of a comparison: curves with their intervals, and distributions of a metric over clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from fedray.results.clients import FINETUNED, PERSONAL, SHARES, distribution
from fedray.results.comparison import ComparisonTables, Environment
from fedray.results.curves import mean_curve
from fedray.results.grouping import Group
from fedray.results.measure import Measure
from fedray.results.number_pictures import number_figures
from fedray.results.panel import Curve, Panel, draw_panels, parts_of
from fedray.results.style import LABEL_OF_AXIS, MOST_LINES, Line, clean_frame, escaped, figure_of, legend, lines_for

LOSSES = {"test_loss": "test loss", "train_loss": "loss on the clients' batches"}
"""The losses that are drawn in addition to the compared metric, with their axis labels."""

OF_CLIENTS = {PERSONAL: "of personal models", FINETUNED: "of fine-tuned models"}
"""The clients' own models, whose mean metric is drawn where a run has it, with their names at the axes."""


def figures_of(comparison: ComparisonTables) -> Iterator[tuple[str, Figure]]:
    """Draws all pictures of a comparison. Yields pairs: a sentence that says what the figure shows, and the figure."""
    for environment in comparison.environments:
        yield from environment_figures(comparison, environment)
    yield from number_figures(comparison)


def environment_figures(comparison: ComparisonTables, environment: Environment) -> Iterator[tuple[str, Figure]]:
    """Draws the pictures of one part of a comparison, ``environment``, which has groups of runs on the same data and
    model. Yields pairs: a sentence that says what the figure shows, and the figure.

    They show the metric, that of the clients' own models, and the losses over the rounds (or another axis), and the
    metric's distribution over clients.
    """
    for panel in panels_of(comparison, environment, [*_metrics(comparison.measure), *LOSSES]):
        names = ", ".join(curve.name for curve in panel.curves)
        where = f"{panel.title}: " if panel.title else ""
        yield f"{where}{panel.ylabel} over {LABEL_OF_AXIS[panel.over]}, of {names}", draw_panels([panel])
    yield from _clients_figures(comparison, environment)


def curves_figure(comparison: ComparisonTables) -> Figure:
    """Returns the one figure that a comparison writes as curves.png and curves.svg, for papers: for each environment
    (groups on the same data and model) a panel with the compared metric, one with that of the clients' personal models
    if any were scored, the same for fine-tuned ones, and one with the test loss."""
    columns = [*_metrics(comparison.measure), "test_loss"]
    return draw_panels([panel for each in comparison.environments for panel in panels_of(comparison, each, columns)])


def panels_of(comparison: ComparisonTables, environment: Environment, columns: Sequence[str]) -> Iterator[Panel]:
    """Yields the panels (pairs of axes) that show the groups of ``environment``. A panel has the mean curves of one of
    ``columns``, which are columns of metrics.csv, for at most nine groups. A column that no run has is left out.

    If there are more groups, there are several panels for a column. Each has the baseline, if there is one, and further
    groups, the best first.
    """
    measure = comparison.measure
    labels = LOSSES | _metrics(measure)
    parts = list(parts_of(environment.groups, environment.baseline))
    for column in columns:
        is_loss = column in LOSSES
        for number, groups in enumerate(parts, 1):
            part = f"part {number} of {len(parts)}" if len(parts) > 1 else ""
            lines = _lines(groups, comparison)
            points = {group: mean_curve(group.runs, column, comparison.over) for group in groups}
            # a group whose runs all diverged is named, and one that has no such models is not
            curves = [
                Curve(_name(group, column), lines[group.label], found)
                for group, found in points.items()
                if len(found) or not group.ended
            ]
            if any(map(len, points.values())):
                yield Panel(
                    title=", ".join(filter(None, [environment.name, part])),
                    ylabel=labels[column],
                    over=comparison.over,
                    curves=curves,
                    scale=1.0 if is_loss else measure.scale,
                    ceiling=100.0 if measure.percent and not is_loss else np.inf,
                )


def _metrics(measure: Measure) -> dict[str, str]:
    """Returns the columns that hold the metric ``measure``: the compared one, and the means over clients of their own
    models. The values are axis labels."""
    own = {
        replace(measure, of=f"clients_{kind.rstrip('_')}").column: f"test {measure.words} {words}, mean{measure.unit}"
        for kind, words in OF_CLIENTS.items()
    }
    return {measure.column: f"test {measure.words}{measure.unit}"} | own


def _lines(groups: Sequence[Group], comparison: ComparisonTables) -> dict[str, Line]:
    """Returns the line style of each group, by the group's name.

    A name has the same style in all pictures, if there are not more names than styles.
    """
    baselines = [each.baseline.label for each in comparison.environments if each.baseline is not None]
    names = [*baselines, *(group.label for group in comparison.groups)]
    return lines_for(names if len(set(names)) <= MOST_LINES else [group.label for group in groups])


def _name(group: Group, column: str = "") -> str:
    """Returns the name of a group in a legend. That of a curve of ``column`` says whether the curve is that of a global
    model whose private layers have initial values."""
    lost = len(group.runs) - len(group.ended)
    marks = ["global model"] * (column.startswith("test_") and group.has_private_layers)
    marks += [f"{lost} of {len(group.runs)} diverged"] * bool(lost)
    return f"{group.label} ({', '.join(marks)})" if marks else group.label


def _clients_figures(comparison: ComparisonTables, environment: Environment) -> Iterator[tuple[str, Figure]]:
    """Yields figures of the metric's distribution over clients, if clients were scored, as pairs of a sentence about
    the figure and the figure."""
    measure = comparison.measure
    for groups in parts_of(environment.groups, environment.baseline):
        found = {group: distribution(group.runs, measure) for group in groups}
        if all(values is None for values in found.values()):
            continue
        figure, (axes,) = figure_of(1, legends=[list(map(_name, groups))])
        lines = _lines(groups, comparison)
        for group, values in found.items():
            if values is not None:
                options = lines[group.label].options(len(values))
                axes.plot(100 * SHARES, measure.scale * values, label=escaped(_name(group)), **options)
        axes.set(xlabel="clients that are no better, %", ylabel=f"a client's test {measure.words}{measure.unit}")
        clean_frame(axes)
        legend(axes)
        where = f"{environment.name}: " if environment.name else ""
        text = f"{where}clients sorted by their test {measure.words} at the end, with their personal models where they "
        yield text + "have some; means over runs", figure
