"""Draws how many samples of each class the clients hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedray.data.partitions.holdings import Holdings
from fedray.util.figures import ShownFigure

STACKED = 40
"""Up to this number, clients are drawn as bars. If there are more, they are the columns of a heat map."""
LEGEND = 20
"""Up to this number, classes are shown by name, in the legend of the bars or beside the heat map. If there are more,
the bars have a colour scale and the heat map has numbers."""
LONGEST = 20
"""The number of characters after which a name is cut off."""


def draw_holdings(held: Holdings) -> Figure:
    """Draws a figure that shows how many training samples of each class each client has (``held``).

    Up to :data:`STACKED` clients are drawn as stacked bars. More are drawn as a heat map of classes by clients, which
    shows the share of each class in a client's samples, with the clients' sizes above it. There the clients are sorted
    by their most frequent class, so that skew is visible. Where there is room, classes and clients have their names
    from the data.
    """
    counts = held.counts
    bars = len(counts) <= STACKED
    figure = ShownFigure(figsize=(min(4 + 0.25 * len(counts), 11), 4.2) if bars else (10, 5), layout="constrained")
    if bars:
        _bars(figure, counts, held.classes or tuple(map(str, range(counts.shape[1]))), held.clients)
    else:
        _heat_map(figure, counts, held.classes)
    return figure


def _bars(figure: Figure, counts: np.ndarray, class_names: Sequence[str], client_names: Sequence[str] | None) -> None:
    clients, classes = counts.shape
    axes = figure.subplots()
    few = classes <= 10
    colours = colormaps["tab10"](range(classes)) if few else colormaps["turbo"](np.linspace(0, 1, classes))
    bottom = np.zeros(clients)
    for c in range(classes):
        axes.bar(
            range(clients), counts[:, c], bottom=bottom, width=0.85, color=colours[c], label=_short(class_names[c])
        )
        bottom += counts[:, c]
    top = 1.05 * max(1, bottom.max())
    axes.set(xlabel="client", ylabel="training samples", xlim=(-0.6, clients - 0.4), ylim=(0, top))
    if client_names is None:
        axes.xaxis.set_major_locator(MaxNLocator(20, integer=True, steps=[1, 2, 5, 10]))
    else:
        shown = [_short(name) for name in client_names]
        axes.set_xticks(range(clients), shown, rotation=90 if max(map(len, shown)) > 2 else 0)
    axes.spines[["top", "right"]].set_visible(False)
    if 1 < classes <= LEGEND:
        figure.legend(title="label", loc="outside right upper", frameon=False, reverse=True)
    elif classes > 1:
        figure.colorbar(ScalarMappable(Normalize(0, classes - 1), "turbo"), ax=axes, label="label")


def _heat_map(figure: Figure, counts: np.ndarray, class_names: Sequence[str] | None) -> None:
    sizes = counts.sum(axis=1)
    shares = counts / np.maximum(sizes, 1)[:, None]
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    top.stairs(sizes[order], np.arange(len(counts) + 1) - 0.5, fill=True, color="0.55")
    top.set(ylabel="samples", ylim=(0, None))
    top.spines[["top", "right"]].set_visible(False)
    image = main.imshow(shares[order].T, aspect="auto", cmap="viridis", vmin=0, origin="lower", interpolation="nearest")
    main.set(xlabel=f"{len(counts):,} clients, by most frequent label", ylabel="label")
    if class_names is not None and len(class_names) <= LEGEND:
        main.set_yticks(range(len(class_names)), [_short(name) for name in class_names])
    else:
        main.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=main, label="share of the client's samples", format=PercentFormatter(1, 0))


def _short(name: str) -> str:
    """Returns a name cut to :data:`LONGEST` characters and escaped for matplotlib.

    matplotlib reads $ as mathematics, and leaves names that begin with _ out of a legend.
    """
    text = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    return f"{' ' if text.startswith('_') else ''}{text}".replace("$", r"\$")
