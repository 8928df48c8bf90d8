"""The picture of how good models are for single clients, round by round."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedray.results.clients import FINETUNED, PERSONAL
from fedray.results.runs import RecordedRun
from fedray.results.style import COLOURS, clean_frame, figure_of, label_axes, style

MOST_CLIENTS = 200
"""The largest number of clients that have a line each. Of more clients there are bands."""

MODELS = {PERSONAL: "personal models", FINETUNED: "fine-tuned on each client", "global_": "global model"}
"""What columns of evaluation.parquet begin with, and the titles of their panels."""

STATISTICS = {
    "mean": ("mean over clients", "-"), "weighted_mean": ("mean, weighted by test samples", "--"),
    "worst_tenth": ("worst tenth of the clients", ":"),
}  # fmt: skip
"""The statistics in metrics.csv that are drawn, with their names and dashes."""

BANDS = {(0.05, 0.95): ("nine tenths of the clients", 0.2), (0.25, 0.75): ("half of the clients", 0.5)}
"""Quantiles between which there is a band, with its name and its opacity."""

WIDTH, HEIGHT = 5.6, 2.4
"""The size of a panel, in inches. One is below the other, because pages are two pictures of this width wide."""


def draw_client_curves(run: RecordedRun, rows: pd.DataFrame) -> Figure | None:
    """Returns a figure with a panel for each kind of model that was scored: a thin line for each client over the
    rounds, or bands between quantiles if there are more than :data:`MOST_CLIENTS`, and above them the mean, the
    weighted mean and the worst tenth of the clients that ``run.eval_clients`` chose. ``rows`` are those of
    evaluation.parquet. Returns None if no client was scored more than once."""
    measure = run.measure
    chosen = rows[rows["in_eval_clients"]] if rows["in_eval_clients"].any() else rows
    columns = {name: f"{name}{measure.metric}" for name in MODELS if f"{name}{measure.metric}" in chosen}
    columns = {name: column for name, column in columns.items() if chosen[column].notna().any()}
    if not columns or not chosen["client"].duplicated().any():
        return None
    figure, panels = figure_of(len(columns), columns=1, panel=(WIDTH, HEIGHT))
    for axes, (name, column) in zip(panels, columns.items(), strict=True):
        if axes is not panels[0]:
            axes.sharey(panels[0])
        of_clients = measure.scale * chosen.pivot(index="round", columns="client", values=column)
        _draw_clients(axes, of_clients)
        prefix = "clients_" + ("" if name == "global_" else name) + measure.metric
        for what, (label, dashes) in STATISTICS.items():
            if f"{prefix}_{what}" in run.rows:
                values = measure.scale * run.rows.set_index("round")[f"{prefix}_{what}"].dropna()
                axes.plot(values.index, values, dashes, color=COLOURS[1], linewidth=1.8, label=label)
        label_axes(axes, "rounds", "", MODELS[name])
        axes.set_xlim(left=0)
        axes.label_outer()
    figure.supylabel(f"{measure.words} on a client's test share{measure.unit}", fontsize=style().text + 1)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=style().text)
    return figure


def _draw_clients(axes: Axes, of_clients: pd.DataFrame) -> None:
    """Draws the table ``of_clients``, which has a row for each round and a column for each client, where it was scored
    in this round."""
    if of_clients.shape[1] > MOST_CLIENTS:
        for (low, high), (label, opacity) in BANDS.items():
            ends = of_clients.quantile([low, high], axis=1).T
            axes.fill_between(ends.index, ends[low], ends[high], color=COLOURS[-1], alpha=opacity, lw=0, label=label)
    else:
        for place, client in enumerate(of_clients):
            values = of_clients[client].dropna()
            name = None if place else "single clients"
            axes.plot(values.index, values, color=COLOURS[-1], alpha=0.5, linewidth=0.7, label=name)
    clean_frame(axes)
