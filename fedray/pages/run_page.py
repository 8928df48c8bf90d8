"""The page about one run: its curves, who holds what, how good it is for single clients, and where the time went."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedray.config.section import in_message
from fedray.data.partitions.holdings import Holdings
from fedray.data.partitions.plot import draw_holdings
from fedray.errors import UserError, first_sentence
from fedray.results.clients import SHARES
from fedray.results.measure import Measure
from fedray.results.page import Page, Picture, Section
from fedray.results.runs import LeftOut, Run, read_run
from fedray.results.style import BESIDE, MOST_LINES, drawn, dress, figure_of, lines_for, plain, width_of
from fedray.results.tables import Table, digits_of, in_units

TOLD = (
    "data.source", "data.clients", "data.partition.kind", "data.partition.alpha", "model.name",
    "train.cohort_size", "train.local_steps", "train.local_epochs", "train.batch_size", "train.lr", "train.momentum",
    "train.weighting", "run.seed", "data.seed",
)  # fmt: skip
"""The settings that the page shows; the others are in config.yaml."""

TIMES = ("gradient", "algorithm", "data", "transport", "waiting", "server", "evaluation", "checkpoint")
"""The columns of profile.csv, in the order in which they are drawn."""

Drawn = Iterator[tuple[str, Figure]]


def run_page(folder: Path) -> Page:
    """Returns the page about the run in ``folder``. Raises :class:`UserError` if it has not ended, or is damaged."""
    run = read_run(folder, whole=True)
    if isinstance(run, LeftOut):
        raise UserError(f"there is nothing to report of {folder}: {run.reason}")
    measure = Measure(run.summary.get("metric", "accuracy"), run.summary.get("mode", "max"))
    parts: Mapping[str, Drawn] = {
        "Curves": _curves(run, measure),
        "Who holds what": _holdings(run),
        "Single clients": _clients(run, measure),
        "Drift": _drift(run),
        "Time of a round": _times(run),
    }
    sections = [Section("What it reached", tables=list(_tables(run, measure)))]
    for title, figures in parts.items():
        pictures = [Picture.of(caption, figure) for caption, figure in figures]
        if pictures:
            sections.append(Section(title, pictures=pictures))
    lead = [
        f"{run.summary['status']} after {run.summary['rounds']} rounds; {run.summary.get('parameters', 0):,} "
        f"parameters; made by fedray {run.versions.get('fedray')}, torch {run.versions.get('torch')}.",
        str(folder.resolve()),
    ]
    return Page(f"Run {folder.resolve().name}", lead, sections)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A context in which a damaged file or folder is told as the user's."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged: {first_sentence(error)}") from None


def _tables(run: Run, measure: Measure) -> Iterator[Table]:
    values = {
        "final": run.final(measure),
        "best": run.best(measure),
        "mean of the last ten evaluations": run.last(measure),
    }
    digits = digits_of(list(values.values()), measure)
    shown = {
        name: f"{measure.scale * value:.{digits}f}" if math.isfinite(value) else "none"
        for name, value in values.items()
    }
    yield Table(
        f"test {measure.words}{measure.unit}", pd.DataFrame({"": [*shown], "evaluated model": [*shown.values()]})
    )
    last = run.rows.iloc[-1]
    costs = {
        "rounds": f"{last['round']:,.0f}", "local steps of a client": f"{last['iterations']:,.0f}",
        "bytes to all clients": in_units(last["bytes_down"], "B"),
        "bytes from all clients": in_units(last["bytes_up"], "B"), "FLOPs": in_units(last["flops"], "FLOP"),
        "seconds": in_units(last["wall_seconds"]),
    }  # fmt: skip
    yield Table("what it took", pd.DataFrame({"": [*costs], "in all": [*costs.values()]}))
    settings = {
        key: value
        for key, value in run.settings.items()
        if (key in TOLD or key.startswith("algorithm.")) and value is not None
    }
    yield Table("settings", pd.DataFrame({"": [*settings], "value": [*map(in_message, settings.values())]}))


def _curves(run: Run, measure: Measure) -> Drawn:
    """Yields the metric of every model that was evaluated on the test set, and the losses."""
    of_models = [
        name for name in map(str, run.rows) if name.endswith(f"_{measure.metric}") and not name.startswith("clients_")
    ]
    for title, columns, scale in (
        (f"{measure.words}{measure.unit}", of_models, measure.scale),
        ("loss", ["train_loss", "test_loss"], 1.0),
    ):
        there = [name for name in columns if name in run.rows and run.rows[name].notna().any()][:MOST_LINES]
        if not there:
            continue
        rows = run.rows[["round", *there]].assign(**{name: scale * run.rows[name] for name in there})
        yield f"{title} over rounds: {', '.join(there)}", _lines(dict.fromkeys(there, rows), title)


def _holdings(run: Run) -> Drawn:
    path = run.folder / "partition.parquet"
    if path.exists():
        with _reading(path):
            held = Holdings.read(path)
        clients = int((held.counts.sum(1) > 0).sum())
        yield f"training samples of each class of {clients:,} clients", draw_holdings(held)


def _clients(run: Run, measure: Measure) -> Drawn:
    """Yields the distribution of each scored model over the clients of the last evaluation, and who took part."""
    folder = run.folder / "evaluation.parquet"
    if folder.is_dir() and any(folder.glob("part-*.parquet")):
        with _reading(folder):
            rows = pq.read_table(max(folder.glob("part-*.parquet"))).to_pandas()
        rows = rows[rows["round"] == rows["round"].max()]
        models = [name for name in map(str, rows) if name.endswith(f"_{measure.metric}") and rows[name].notna().any()]
        if models:
            figure, (axes,) = figure_of(1, legend_width=width_of(models))
            for name, line in lines_for(models[:MOST_LINES]).items():
                values = measure.scale * np.quantile(rows[name].dropna().to_numpy(), SHARES)
                axes.plot(100 * SHARES, values, label=drawn(name), **line.options(len(SHARES)))
            axes.set(
                xlabel="clients that are no better, %", ylabel=f"{measure.words} on a client's test share{measure.unit}"
            )
            plain(axes)
            axes.legend(**BESIDE)
            yield f"clients sorted by their {measure.words}, in round {rows['round'].iloc[0]}", figure
    folder = run.folder / "clients.parquet"
    if folder.is_dir() and any(folder.glob("part-*.parquet")):
        with _reading(folder):
            rows = pq.read_table(folder, columns=["client"]).to_pandas()
        counts = rows["client"].value_counts().to_numpy()
        figure, (axes,) = figure_of(1)
        axes.bar(*np.unique(counts, return_counts=True), width=0.9, color="#0072b2")
        axes.set(xlabel="rounds in which a client took part", ylabel="clients")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        plain(axes)
        yield f"how often clients took part: {len(counts):,} of {run.settings.get('data.clients')} did", figure


DRIFT = {
    "lengths": (["drift", "spread", "update_norm", "virtual_distance"], "length"),
    "directions": (["alignment"], "cosine"),
    "errors": (["cohort_error", "momentum_error"], "distance from all clients' mean, over its length"),
}
"""The columns that run.diagnostics adds to metrics.csv, by what they are, with the label of their axis."""

LAYERS = 9
"""The most layers that are drawn. Of more, those that changed most."""


def _drift(run: Run) -> Drawn:
    """Yields how far clients' models drift apart, and how much each layer changes, if that was measured."""
    if not {"drift", "spread", "alignment", "update_norm"} <= {*run.rows}:
        return
    for named, ylabel in DRIFT.values():
        columns = [name for name in named if name in run.rows and run.rows[name].notna().any()]
        if not columns:
            continue
        yield f"{', '.join(columns)} over rounds (run.diagnostics)", _lines({n: run.rows for n in columns}, ylabel)
    path = run.folder / "layers.parquet"
    if path.is_dir() and any(path.glob("part-*.parquet")):
        with _reading(path):
            rows = pq.read_table(path).to_pandas()
        rows["change"] = rows["update_norm"] / rows["norm"].where(rows["norm"] > 0)
        most = rows.groupby("layer", sort=False)["change"].mean().nlargest(LAYERS).index
        shown = {layer: rows[rows["layer"] == layer].rename(columns={"change": layer}) for layer in map(str, most)}
        title = "change of a layer in a round over its length"
        of_all = f"; the {LAYERS} that changed most" if rows["layer"].nunique() > LAYERS else ""
        yield f"{title}{of_all}", _lines(shown, title)


def _lines(rows: Mapping[str, pd.DataFrame], ylabel: str) -> Figure:
    """Returns a figure with a line over rounds for each column, which is a key of ``rows``."""
    figure, (axes,) = figure_of(1, legend_width=width_of(list(rows)))
    for name, line in lines_for(list(rows)).items():
        own = rows[name].dropna(subset=name)
        axes.plot(own["round"], own[name], label=drawn(name), **line.options(len(own)))
    dress(axes, "rounds", ylabel, "")
    axes.set_xlim(left=0)
    axes.legend(**BESIDE)
    return figure


def _times(run: Run) -> Drawn:
    figure, (axes,) = figure_of(1)
    axes.plot(run.rows["round"], run.rows["round_seconds"], color="#0072b2", linewidth=1)
    dress(axes, "rounds", "seconds", "")
    axes.set_ylim(bottom=0)
    yield "seconds of each round, without its own evaluation and checkpoint", figure
    path = run.folder / "profile.csv"
    if path.exists():
        figure, (axes,) = figure_of(1, legend_width=1.4)
        with _reading(path):
            profile = pd.read_csv(path)
        _stack(axes, profile)
        yield "where the time of a round went, as means over parts of the run (--profile)", figure


def _stack(axes: Axes, profile: pd.DataFrame) -> None:
    """Draws the seconds of a round by what they were spent on, as means over at most 60 parts of the run."""
    part = np.arange(len(profile)) * min(60, len(profile)) // max(1, len(profile))
    means = profile.groupby(part).mean()
    lines = lines_for(TIMES)
    there = [name for name in TIMES if name in means]
    colours = [lines[name].colour for name in there]
    axes.stackplot(means["round"], [means[name] for name in there], labels=there, colors=colours, alpha=0.85)
    dress(axes, "rounds", "seconds per round", "")
    axes.legend(**{**BESIDE, "reverse": True})
