"""The pictures of what was measured, and of the model of a round's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from fedray.results.style import BESIDE, COLOURS, MARKERS, clean_frame, figure_of
from round_time.model import COHORT, PROJECTED, Fit, Measured, checks, projected
from round_time.points import WORKS, Point
from round_time.records import Row, point_of
from round_time.traffic import sent

PANEL = (4.6, 3.5)
LEGEND = 1.6
"""The width in inches of a legend beside the panels."""

STYLES = {model: (COLOURS[place], MARKERS[place]) for place, model in enumerate(WORKS)}

DOTS: dict[str, Any] = {"markersize": 5}

PARTS: Mapping[str, Callable[[str], bool]] = {
    "training": lambda term: term.startswith("step of"),
    "network": lambda term: term == "MB between hosts",
    "adding up sums": lambda term: term == "MB of sums",
    "tasks and actors": lambda term: term in ("task", "actor"),
    "the rest": lambda term: True,
}
"""The parts of a round's time in the picture of the projection; a term belongs to the first one that takes it."""


def figures(
    rows: Sequence[Row], measured: Sequence[Measured], fitted: Fit | None, network: Fit | None, processors: int
) -> Iterator[tuple[str, Figure]]:
    """Yields the pictures, each with the name of its file. ``fitted`` is the model of a round's time, and ``network``
    the same for the network of the projection, whose nodes have ``processors``."""
    yield "time", _time(rows, fitted)
    yield "resources", _resources(rows, fitted)
    if fitted is not None and network is not None:
        yield "model", _model(measured, fitted)
        yield "projection", _projection(network, processors)


AXES = {
    "clients": "registered clients, of whom at most 100 take part",
    "cohort": "clients in a round",
    "actors": "client actors",
    "hosts": "hosts, with an actor each",
}
"""What is on the horizontal axis of a panel, a field of a point, and its label."""


def _lies_on(point: Point, axis: str) -> bool:
    """Whether ``point`` belongs to the panel of ``axis``: it is its model's usual point in every other respect."""
    free = {"turn", axis}
    if axis == "clients" and point.cohort == point.clients:
        # there are no more clients
        free.add("cohort")
    if axis == "hosts":
        if point.actors != point.hosts:
            return False
        free.add("actors")
    usual = vars(Point(point.model))
    return all(value == usual[name] for name, value in vars(point).items() if name not in free)


def _time(rows: Sequence[Row], fitted: Fit | None) -> Figure:
    """The time of a round over each axis: dots as measured, lines by the model."""
    figure, places = figure_of(4, legend_width=LEGEND, panel=PANEL)
    for axes, axis in zip(places, AXES, strict=True):
        found = [row for row in rows if _lies_on(point_of(row), axis)]
        _draw(axes, found, axis, "seconds", _seconds_by(fitted))
        ticks = {row["point"][axis] for row in found}
        if axis == "cohort":
            on_gpu = [row for row in rows if row["point"]["device"] == "cuda"]
            _draw(axes, on_gpu, axis, "seconds", None, fillstyle="none")
            ticks |= {row["point"][axis] for row in on_gpu}
        _log(axes, ticks, AXES[axis], "seconds of a round")
    gpu = "\nhollow: on a GPU" if any(row["point"]["device"] == "cuda" for row in rows) else ""
    _legend(places[1], rows, f"dots: measured{gpu}\nlines: the model")
    return figure


Predicted: TypeAlias = Callable[[Row], float]
"""A function that predicts what was measured in a row."""


def _seconds_by(fitted: Fit | None) -> Predicted | None:
    return None if fitted is None else lambda row: fitted.seconds(point_of(row), row["processors"])


def _sums_by(fitted: Fit | None) -> Predicted | None:
    def predicted(row: Row) -> float:
        assert fitted is not None
        known = fitted.known[row["point"]["model"]]
        return 8 * known.parameters * sent(point_of(row), known).nodes

    return None if fitted is None else predicted


def _draw(
    axes: Axes,
    rows: Sequence[Row],
    axis: str,
    what: str,
    by: Predicted | None,
    unit: float = 1.0,
    fillstyle: str = "full",
) -> None:
    """Draws the column ``what`` of ``rows``, in multiples of ``unit``, as dots, and what the function ``by`` predicts
    of it as lines."""
    for model, (colour, marker) in STYLES.items():
        own = sorted((row for row in rows if row["point"]["model"] == model), key=lambda row: row["point"][axis])
        x = [row["point"][axis] for row in own]
        if len(set(x)) < 2:
            # one value shows no growth
            continue
        axes.plot(x, [row[what] / unit for row in own], marker, color=colour, fillstyle=fillstyle, **DOTS)
        if by is not None:
            axes.plot(x, [by(row) / unit for row in own], color=colour, linewidth=1.2, alpha=0.7)


def _resources(rows: Sequence[Row], fitted: Fit | None) -> Figure:
    """What reaches the server, over the cohort and the actors, and the memory, over clients and models."""
    figure, places = figure_of(4, legend_width=LEGEND, panel=PANEL)
    for axes, axis in zip(places, ("cohort", "actors"), strict=False):
        found = [row for row in rows if _lies_on(point_of(row), axis)]
        _draw(axes, found, axis, "sum_bytes", _sums_by(fitted), unit=1e6)
        ylabel = "sums that reach the server,\nMB a round"
        _log(axes, {row["point"][axis] for row in found}, AXES[axis], ylabel)
    _memory_of_clients(places[2], rows)
    _memory_of_models(places[3], rows)
    _legend(places[1], rows, "dots: measured\nlines: predicted")
    return figure


def _memory_of_clients(axes: Axes, rows: Sequence[Row]) -> None:
    found = [{**row, "memory": row["memory"]["all"] / 1024} for row in rows if _lies_on(point_of(row), "clients")]
    _draw(axes, found, "clients", "memory", None)
    ticks = {row["point"]["clients"] for row in found}
    _log(axes, ticks, AXES["clients"], "memory of all processes, GiB", y="linear")
    axes.set_ylim(bottom=0)


def _memory_of_models(axes: Axes, rows: Sequence[Row]) -> None:
    """The memory of each kind of process, as bars for each model at its usual point."""
    kinds = ("driver", "server", "actor", "shared")
    names = {"shared": "object store"}
    largest: dict[str, Row] = {}
    for row in rows:
        if row["point"]["device"] == "cpu" and row["point"]["hosts"] == 1:
            kept = largest.get(row["point"]["model"])
            if kept is None or row["point"]["cohort"] > kept["point"]["cohort"]:
                largest[row["point"]["model"]] = row
    for place, (model, row) in enumerate(largest.items()):
        heights = [row["memory"].get(kind, 0.0) / 1024 for kind in kinds]
        offsets = np.arange(len(kinds)) + 0.8 * (place - (len(largest) - 1) / 2) / len(largest)
        axes.bar(offsets, heights, width=0.75 / len(largest), color=STYLES[model][0])
    axes.set_xticks(range(len(kinds)), [names.get(kind, kind) for kind in kinds])
    axes.set(ylabel="largest process of its kind, GiB", xlabel="kind of process, at the largest cohort measured")
    clean_frame(axes)


def _log(axes: Axes, ticks: set[float], xlabel: str, ylabel: str, y: str = "log") -> None:
    axes.set(xlabel=xlabel, ylabel=ylabel)
    clean_frame(axes)
    if not ticks:
        axes.text(0.5, 0.5, "no points yet", ha="center", transform=axes.transAxes)
        return
    axes.set_xscale("log")
    axes.set_yscale(y)
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if y == "log":
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes, rows: Sequence[Row], title: str) -> None:
    present = {row["point"]["model"] for row in rows}
    handles = [
        axes.plot([], [], marker, color=colour, label=WORKS[model].name, **DOTS)[0]
        for model, (colour, marker) in STYLES.items()
        if model in present
    ]
    axes.legend(handles=handles, title=title, title_fontsize=9, alignment="left", **BESIDE)


def _model(measured: Sequence[Measured], fitted: Fit) -> Figure:
    """Predicted against measured seconds: of the points of the fit, and of those that a check left out."""
    figure, (axes,) = figure_of(1, legend_width=3.4, panel=(4.6, 4.2))
    x = [row.seconds for row in measured]
    y = [fitted.seconds(row.point, row.processors) for row in measured]
    axes.plot(x, y, "o", color="0.65", markersize=4)
    for place, check in enumerate(checks(measured), 1):
        predicted = [check.fitted.seconds(row.point, row.processors) for row in check.left_out]
        axes.plot(
            [row.seconds for row in check.left_out], predicted, MARKERS[place], color=COLOURS[place], markersize=6,
            fillstyle="none", label=check.name,
        )  # fmt: skip
    ends = np.array([min(*x, *y) / 1.5, 1.5 * max(*x, *y)])
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, ends / 1.25, ends * 1.25, color="black", alpha=0.07, linewidth=0, label="within 25 %")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="seconds of a round, measured", ylabel="seconds of a round, predicted")
    clean_frame(axes)
    title = "grey dots: points of the fit\nhollow: left out of it, then predicted:"
    axes.legend(title=title, title_fontsize=9, alignment="left", **BESIDE)
    return figure


def _projection(network: Fit, processors: int) -> Figure:
    """The time of a round on up to 100 nodes, and what it consists of."""
    wanted = [(model, steps) for model, steps in PROJECTED if model in network.known]
    figure, places = figure_of(len(wanted), legend_width=LEGEND, panel=PANEL)
    nodes = np.unique(np.geomspace(1, 100, 40).round().astype(int))
    for axes, (model, steps) in zip(places, wanted, strict=True):
        heights = {part: np.zeros(len(nodes)) for part in PARTS}
        for place, count in enumerate(nodes):
            point, all_processors = projected(model, int(count), processors, steps=steps, **COHORT)
            for term, seconds in network.parts(point, all_processors).items():
                heights[next(part for part, takes in PARTS.items() if takes(term))][place] += seconds
        axes.stackplot(nodes, list(heights.values()), labels=list(heights), colors=COLOURS[1:], alpha=0.85)
        axes.set_title(f"{WORKS[model].name}, {steps} local step{'s' if steps > 1 else ''}", fontsize=10, loc="left")
        _log(axes, {1, 3, 10, 30, 100}, "nodes", "seconds of a round", y="linear")
        axes.set_xlim(1, 100)
    handles, labels = places[0].get_legend_handles_labels()
    places[min(1, len(places) - 1)].legend(handles[::-1], labels[::-1], **BESIDE)
    return figure
