"""The page about one run: its curves, its partition, how good the models are for single clients, and the times of
rounds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedray.config.section import in_message
from fedray.data.partitions.holdings import Holdings
from fedray.data.partitions.plot import draw_holdings
from fedray.errors import UserError, first_sentence
from fedray.pages.client_curves import draw_client_curves
from fedray.results.clients import SHARES, last_scores
from fedray.results.html_page import Page, Picture, Section
from fedray.results.runs import LeftOut, RecordedRun, read_run
from fedray.results.style import (
    BESIDE,
    COLOURS,
    MOST_LINES,
    clean_frame,
    escaped,
    figure_of,
    label_axes,
    lines_for,
)
from fedray.results.tables import Table, digits_of, in_units
from fedray.system.clock import USED
from fedray.tracking.tables import read_parts

SHOWN_SETTINGS = (
    "data.source", "data.clients", "data.partition.kind", "data.partition.alpha", "model.name",
    "train.cohort_size", "train.local_steps", "train.local_epochs", "train.batch_size", "train.lr", "train.momentum",
    "train.weighting", "run.seed", "data.seed",
)  # fmt: skip
"""The settings that the page shows; the others are in config.yaml."""

TIMES = ("gradient", "compilation", "algorithm", "data", "transport", "waiting", "server", "evaluation", "checkpoint")
"""The columns of profile.csv, in the order in which they are drawn."""

DRIFT = {
    "length": ["drift", "spread", "update_norm", "virtual_distance"],
    "cosine": ["alignment"],
    "distance from all clients' mean, over its length": ["cohort_error", "momentum_error"],
}
"""The columns that run.diagnostics adds to metrics.csv, grouped by the labels of their axes."""

LAYERS = 9
"""The largest number of layers that are drawn. If there are more, those that changed most are drawn."""

Figures = Iterator[tuple[str, Figure]]
"""Figures, each after a sentence that says what it shows."""


def run_page(folder: Path) -> Page:
    """Returns the HTML page about the run in ``folder``, which ``fedray report`` writes to a file. It shows the run's
    results, curves, partition, the scores of single clients, the drift between clients' models and the time of rounds,
    as far as these were recorded. Raises :class:`UserError` if the run has not ended, or if the folder is damaged."""
    run = read_run(folder)
    if isinstance(run, LeftOut):
        raise UserError(f"there is nothing to report of {folder}: {run.reason}")
    parts: Mapping[str, Figures] = {
        "Curves": _curves(run),
        "Privacy": _privacy(run),
        "Who holds what": _holdings(run),
        "Single clients": _clients(run),
        "Drift": _drift(run),
        "Time of a round": _times(run),
    }
    sections = [Section("What it reached", tables=list(_tables(run)))]
    for title, figures in parts.items():
        if pictures := [Picture.of_figure(caption, figure) for caption, figure in figures]:
            sections.append(Section(title, pictures=pictures))
    rounds = run.summary["rounds"]
    lead = [
        f"{run.summary['status']} after {rounds} round{'' if rounds == 1 else 's'}; "
        f"{run.summary.get('parameters', 0):,} parameters; made by fedray {run.versions.get('fedray')}, "
        f"torch {run.versions.get('torch')}.",
        str(folder.resolve()),
    ]
    return Page(f"Run {folder.resolve().name}", lead, sections)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A context in which errors from reading the damaged file or folder ``path`` become a :class:`UserError`."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged: {first_sentence(error)}") from None


def _tables(run: RecordedRun) -> Iterator[Table]:
    measure = run.measure
    values = {
        "final": run.final(measure),
        "best": run.best(measure),
        "mean of the last ten evaluations": run.last(measure),
    }
    digits = digits_of(list(values.values()), measure)
    last = run.rows.iloc[-1]
    yield _table(
        f"test {measure.words}{measure.unit}",
        "evaluated model",
        {n: f"{measure.scale * v:.{digits}f}" if math.isfinite(v) else "none" for n, v in values.items()},
    )
    costs = {
        "rounds": f"{last['round']:,.0f}", "local steps of a client": f"{last['iterations']:,.0f}",
        "bytes to all clients": in_units(last["bytes_down"], "B"),
        "bytes from all clients": in_units(last["bytes_up"], "B"), "FLOPs": in_units(last["flops"], "FLOP"),
        "virtual seconds": in_units(last["virtual_seconds"]), "joules": in_units(last["joules"], "J"),
        "seconds": in_units(last["wall_seconds"]),
        "epsilon": f"{run.rows['epsilon'].dropna().iloc[-1]:.4g}" if _filled(run.rows, ["epsilon"]) else "",
    }  # fmt: skip
    yield _table("what it took", "in all", {name: text for name, text in costs.items() if text})
    shown = {k: v for k, v in run.settings.items() if k in SHOWN_SETTINGS or k.startswith("algorithm.")}
    yield _table("settings", "value", {key: in_message(value) for key, value in shown.items() if value is not None})


def _table(title: str, column: str, cells: Mapping[str, str]) -> Table:
    return Table(title, pd.DataFrame({"": [*cells], column: [*cells.values()]}))


def _curves(run: RecordedRun) -> Figures:
    """Yields figures over the rounds: the metric of every model that was evaluated on the test set, and the losses.
    With a virtual clock the metric is also drawn over the virtual seconds, and over the joules if they are known."""
    ending = f"_{run.measure.metric}"
    of_models = [name for name in map(str, run.rows) if name.endswith(ending) and not name.startswith("clients_")]
    metric = f"{run.measure.words}{run.measure.unit}"
    for title, columns, scale in (metric, of_models, run.measure.scale), ("loss", ["train_loss", "test_loss"], 1.0):
        if evaluated := _filled(run.rows, columns)[:MOST_LINES]:
            lines = scale * run.rows.set_index("round")[evaluated]
            yield f"{title} over rounds: {', '.join(evaluated)}", _draw_lines(lines, title)
    evaluated = _filled(run.rows, of_models)[:MOST_LINES]
    for amount in _filled(run.rows, ["virtual_seconds", "joules"]) if evaluated else ():
        lines = run.measure.scale * run.rows.set_index(amount)[evaluated]
        yield f"{metric} over {amount.replace('_', ' ')}: {', '.join(evaluated)}", _draw_lines(lines, metric, amount)


def _privacy(run: RecordedRun) -> Figures:
    """Yields figures over the rounds of a private run: epsilon, and the length to which updates were clipped."""
    labels = {"epsilon": "epsilon so far", "clip_norm": "length to which updates are clipped"}
    for name in _filled(run.rows.replace(math.inf, math.nan), [*labels]):
        yield f"{name} over rounds (privacy)", _draw_lines(run.rows.set_index("round")[[name]], labels[name])


def _filled(rows: pd.DataFrame, columns: list[str]) -> list[str]:
    """Returns those of ``columns`` that exist in the table ``rows`` and are not empty."""
    return [name for name in columns if name in rows and rows[name].notna().any()]


def _holdings(run: RecordedRun) -> Figures:
    path = run.folder / "partition.parquet"
    if path.exists():
        with _reading(path):
            held = Holdings.read(path)
        clients = int((held.counts.sum(1) > 0).sum())
        each = " of each class" if held.counts.shape[1] > 1 else ""
        yield f"training samples{each} of {clients:,} clients", draw_holdings(held)


def _clients(run: RecordedRun) -> Figures:
    """Yields figures about single clients: their curves, the distribution of each scored model's metric over the
    clients of the last evaluation, and how often clients took part."""
    measure = run.measure
    scores = _read_parts(run.folder / "evaluation.parquet")
    if scores is not None and (curves := draw_client_curves(run, scores)) is not None:
        yield f"{measure.words} of each client over rounds, on its test share", curves
    with _reading(run.folder / "evaluation.parquet"):
        rows = last_scores(run.folder)
    if rows is not None:
        models = _filled(rows, [name for name in map(str, rows) if name.endswith(f"_{measure.metric}")])[:MOST_LINES]
        if models:
            figure, (axes,) = figure_of(1, legends=[models])
            for name, line in lines_for(models).items():
                values = measure.scale * np.quantile(rows[name].dropna().to_numpy(), SHARES)
                axes.plot(100 * SHARES, values, label=escaped(name), **line.options(len(SHARES)))
            ylabel = f"{measure.words} on a client's test share{measure.unit}"
            axes.set(xlabel="clients that are no better, %", ylabel=ylabel)
            clean_frame(axes)
            axes.legend(**BESIDE)
            yield f"clients sorted by their {measure.words}, in round {rows['round'].iloc[0]}", figure
    took_part = _read_parts(run.folder / "clients.parquet")
    if took_part is not None:
        if "outcome" in took_part:
            # others were asked, and late, for example
            took_part = took_part[took_part["outcome"] == USED]
        counts = took_part["client"].value_counts().to_numpy()
        figure, (axes,) = figure_of(1)
        axes.bar(*np.unique(counts, return_counts=True), width=0.9, color=COLOURS[1])
        axes.set(xlabel="rounds in which a client took part", ylabel="clients")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        clean_frame(axes)
        yield f"how often clients took part: {len(counts):,} of {run.settings.get('data.clients')} did", figure


def _read_parts(folder: Path) -> pd.DataFrame | None:
    """Reads a table from a ``folder`` of Parquet files. Returns None if there are no files."""
    if not any(folder.glob("part-*.parquet")):
        return None
    with _reading(folder):
        rows = read_parts(folder)
    return rows


def _drift(run: RecordedRun) -> Figures:
    """Yields figures of the drift between clients' models, and of the change of each layer, if these were measured."""
    if not {"drift", "spread", "alignment", "update_norm"} <= {*run.rows}:
        return
    by_round = run.rows.set_index("round")
    for ylabel, names in DRIFT.items():
        if columns := _filled(run.rows, names):
            yield f"{', '.join(columns)} over rounds (run.diagnostics)", _draw_lines(by_round[columns], ylabel)
    rows = _read_parts(run.folder / "layers.parquet")
    if rows is not None:
        rows["change"] = rows["update_norm"] / rows["norm"].where(rows["norm"] > 0)
        changes = rows.pivot(index="round", columns="layer", values="change")[rows["layer"].unique()]
        most = changes.mean().nlargest(LAYERS).index
        title = "change of a layer in a round over its length"
        of_all = f"; the {LAYERS} that changed most" if len(changes.columns) > LAYERS else ""
        yield f"{title}{of_all}", _draw_lines(changes[most], title)


def _draw_lines(columns: pd.DataFrame, ylabel: str, over: str = "rounds") -> Figure:
    """Returns a figure with a line for each column of a DataFrame whose index is the round, or what ``over`` says."""
    names = list(map(str, columns))
    figure, (axes,) = figure_of(1, legends=[names])
    for name, line in lines_for(names).items():
        values = columns[name].dropna()
        axes.plot(values.index, values, label=escaped(name), **line.options(len(values)))
    label_axes(axes, over, ylabel, "")
    axes.set_xlim(left=0)
    axes.legend(**BESIDE)
    return figure


def _times(run: RecordedRun) -> Figures:
    figure, (axes,) = figure_of(1)
    axes.plot(run.rows["round"], run.rows["round_seconds"], color=COLOURS[1], linewidth=1)
    label_axes(axes, "rounds", "seconds", "")
    axes.set_ylim(bottom=0)
    yield "seconds of each round, without its own evaluation and checkpoint", figure
    path = run.folder / "profile.csv"
    if path.exists():
        with _reading(path):
            profile = pd.read_csv(path)
        # means over at most 60 parts of the run
        means = profile.groupby(np.arange(len(profile)) * min(60, len(profile)) // max(1, len(profile))).mean()
        lines = {name: line for name, line in lines_for(TIMES).items() if name in means}
        colours = [line.colour for line in lines.values()]
        figure, (axes,) = figure_of(1, legend_width=1.4)
        axes.stackplot(means["round"], means[[*lines]].to_numpy().T, labels=[*lines], colors=colours, alpha=0.85)
        label_axes(axes, "rounds", "seconds per round", "")
        axes.legend(**BESIDE, reverse=True)
        yield "where the time of a round went, as means over parts of the run (--profile)", figure
