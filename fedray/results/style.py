"""The style of pictures, and how they are saved: colours that colour-blind people can tell apart, and sizes for
print."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from fedray.util.figures import ShownFigure
from fedray.util.files import replacement_of

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
"""Black, the colours of Okabe and Ito without yellow, which is pale on white, a brown and a grey."""

MARKERS = "os^Dv<>PX"

HANDLE, LETTER, LINE = 0.6, 0.075, 0.13
"""The widths in inches of a legend's sample of a line and of a letter of 9 points, and the height of a line of text."""

MOST_LINES = len(COLOURS)
"""The largest number of lines in a panel."""

PANEL = (5.6, 3.6)
"""The width and height of a panel, in inches."""

BELOW: dict[str, Any] = {
    "loc": "upper center", "bbox_to_anchor": (0.5, -0.22), "frameon": False, "borderaxespad": 0, "handlelength": 2.6,
    "columnspacing": 1.0,
}  # fmt: skip
"""Matplotlib's options for a legend below its panel, where a column has no room beside it."""

BESIDE: dict[str, Any] = {
    "loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False, "fontsize": 9, "borderaxespad": 0,
}  # fmt: skip
"""Matplotlib's options for a legend beside its panel, where it hides nothing."""


@dataclass(frozen=True)
class Style:
    """How all pictures look: the width and height of a ``panel`` in inches, the size of its ``text`` in points, whether
    the legend is ``beside`` it or below, whether lines have different ``dashes`` as well as colours, and the
    ``formats`` of the files."""

    panel: tuple[float, float]
    text: float
    beside: bool
    dashes: bool
    formats: tuple[str, ...]


STYLES = {
    "page": Style(PANEL, 9, True, False, ("png", "svg")),
    # a column of a paper of two columns is 3.3 inches wide, and its captions have 8 or 9 points
    "paper": Style((3.3, 2.2), 8, False, True, ("png", "svg", "pdf")),
}
"""The styles of pictures by name (``fedray compare --style``)."""

DASHES = ("-", (0, (5, 1.5)), (0, (2, 1)), (0, (6, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
"""Patterns of lines that can be told apart in print without colours."""

_style: ContextVar[Style] = ContextVar("style", default=STYLES["page"])


def style() -> Style:
    """Returns the style in which pictures are drawn now."""
    return _style.get()


@contextlib.contextmanager
def styled(name: str) -> Iterator[None]:
    """A context in which pictures are drawn in the style ``name``."""
    before, text = _style.set(STYLES[name]), STYLES[name].text
    sizes: dict[Any, Any] = {} if name == "page" else {
        "font.size": text, "axes.labelsize": text, "axes.titlesize": text, "xtick.labelsize": text - 1,
        "ytick.labelsize": text - 1, "legend.fontsize": text - 1, "lines.linewidth": 1.2,
        # type 3 fonts are refused by some publishers
        "pdf.fonttype": 42,
    }  # fmt: skip
    try:
        with matplotlib.rc_context(sizes):
            yield
    finally:
        _style.reset(before)


@dataclass(frozen=True)
class Line:
    """The style of one group's line in a picture: its colour, its marker, its ``place`` among the lines of the picture,
    from 0, and the number of lines in the picture, ``lines``. The place decides which points have a marker."""

    colour: str
    marker: str
    place: int
    lines: int

    def options(self, points: int) -> dict[str, Any]:
        """Returns Matplotlib's options for drawing a line of this style that has ``points`` points, as keyword
        arguments of ``plot``. About eight of the points have a marker.

        Where there are enough points, different lines have markers at different points. So a line that is hidden under
        another one can be seen by its markers.
        """
        every = max(1, points // 8, min(self.lines, points))
        dashes = DASHES[self.place % len(DASHES)] if style().dashes else "-"
        return {
            "color": self.colour, "linestyle": dashes, "marker": self.marker,
            "markevery": (self.place * every // self.lines, every),
            "markersize": 4.5 * style().text / 9, "linewidth": 1.5 * style().text / 9, "markeredgecolor": "white",
            "markeredgewidth": 0.5,
        }  # fmt: skip


def lines_for(labels: Sequence[str]) -> dict[str, Line]:
    """Returns a line style for each of the ``labels``, by label. Of nine successive labels, no two have the same colour
    or marker."""
    distinct = list(dict.fromkeys(labels))
    lines = min(len(distinct), MOST_LINES)
    return {
        label: Line(COLOURS[place % MOST_LINES], MARKERS[place % MOST_LINES], place % MOST_LINES, lines)
        for place, label in enumerate(distinct)
    }


def figure_of(
    panels: int,
    columns: int = 2,
    legend_width: float = 0,
    panel: tuple[float, float] | None = None,
    legends: Sequence[Sequence[str]] = (),
) -> tuple[Figure, list[Axes]]:
    """Returns an empty Matplotlib figure and the axes of its ``panels`` panels, in rows of at most ``columns``.

    ``panel`` is the width and height of each panel in inches, unless the style's. ``legends`` has the names in
    the legend of each panel (:func:`legend`), for which there is room beside or below it; without it ``legend_width``
    is the additional width of the figure in inches for what is beside its panels.
    """
    columns, panel = min(columns, panels), panel or style().panel
    if style().beside:
        legend_width = max(map(width_of, legends), default=legend_width / columns) * columns
    else:
        lines = max((_below(names).lines for names in legends), default=0)
        panel, legend_width = (panel[0], panel[1] + LINE * lines), 0
    rows = -(-panels // columns)
    size = (panel[0] * columns + legend_width, panel[1] * rows)
    figure = ShownFigure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for left in axes[panels:]:
        left.set_axis_off()
    return figure, list(axes[:panels])


UNIT_OF_AXIS = {"bytes": "B", "flops": "FLOP", "virtual_seconds": "s", "joules": "J", "wall_seconds": "s"}
LABEL_OF_AXIS = {
    "rounds": "rounds", "iterations": "local steps of a client", "bytes": "bytes that all clients exchanged",
    "flops": "FLOPs of clients and server", "virtual_seconds": "virtual seconds",
    "joules": "joules of all clients", "wall_seconds": "seconds",
}  # fmt: skip


def label_axes(axes: Axes, over: str, ylabel: str, title: str) -> None:
    """Gives a panel its title, its axis labels, units and grid. ``over`` is the quantity on the horizontal axis, such
    as ``rounds`` or ``bytes``, which decides its label and unit."""
    axes.set(xlabel=LABEL_OF_AXIS[over], ylabel=ylabel)
    axes.set_title(title, fontsize=style().text + 1, loc="left")
    if over in UNIT_OF_AXIS:
        axes.xaxis.set_major_formatter(EngFormatter(UNIT_OF_AXIS[over]))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    clean_frame(axes)


def legend(axes: Axes) -> None:
    """Puts a legend beside or below ``axes``, with the lines in the order in which they were drawn. All pictures of a
    comparison have the same order."""
    handles, names = axes.get_legend_handles_labels()
    if handles and style().beside:
        axes.legend(**BESIDE)
    elif handles:
        below = _below(names)
        # Matplotlib fills columns, and people read rows
        order = [place for column in range(below.columns) for place in range(column, len(names), below.columns)]
        axes.legend([handles[i] for i in order], [below.names[i] for i in order], ncols=below.columns, **BELOW)


@dataclass(frozen=True)
class _Below:
    """A legend below its panel: in how many ``columns`` its ``names`` are, of which long ones have several lines, and
    how many ``lines`` are one below the other."""

    columns: int
    names: list[str]

    @property
    def lines(self) -> int:
        return -(-sum(name.count("\n") + 1 for name in self.names) // self.columns)


def _below(names: Sequence[str]) -> _Below:
    """Returns how a legend with ``names`` fits below a panel: in two columns, or in one if the names are long."""
    letter = LETTER * (style().text - 1) / 9
    longest, room = max(map(len, names), default=0), style().panel[0]
    if 2 * (HANDLE + letter * longest) <= room:
        return _Below(2, list(names))
    return _Below(1, [textwrap.fill(name, int((room - HANDLE) / letter)) for name in names])


def width_of(names: Sequence[str]) -> float:
    """Returns the width in inches that a legend with these ``names`` needs."""
    return HANDLE + LETTER * max(map(len, names), default=0)


def escaped(name: str) -> str:
    """Returns ``name`` so that a legend shows it unchanged: Matplotlib would read ``$`` as mathematics, and leave out
    names that begin with ``_``."""
    return f"{' ' if name.startswith('_') else ''}{name}".replace("$", r"\$")


def clean_frame(axes: Axes) -> None:
    """Makes a panel easier to read: removes the upper and the right side of its frame, which carry no information, and
    adds a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


DOTS_PER_INCH = 150


def paths_of_picture(folder: Path, name: str) -> list[Path]:
    """Returns the paths of the files ``name``.png and so on in ``folder``, in the formats of the style."""
    return [folder / f"{name}.{kind}" for kind in style().formats]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes a figure into ``folder`` as files ``name``.png and so on, in the formats of the style, and returns their
    paths."""
    paths = paths_of_picture(folder, name)
    for path in paths:
        if path.suffix == ".png":
            save_png(figure, path)
            continue
        with replacement_of(path) as staging:
            staging.write_bytes(svg_of(figure) if path.suffix == ".svg" else pdf_of(figure))
    return paths


def pdf_of(figure: Figure) -> bytes:
    """Returns the PDF file of a figure as bytes, which are the same for a figure drawn again from the same data."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="pdf", metadata={"CreationDate": None})
    return buffer.getvalue()


def save_png(figure: Figure, path: Path, **options: Any) -> Path:
    """Writes a figure to ``path`` as a PNG file with 150 dots per inch, and returns the path. ``options`` go to
    Matplotlib's ``savefig``."""
    with replacement_of(path) as staging:
        figure.savefig(staging, dpi=DOTS_PER_INCH, format="png", **options)
    return path


def svg_of(figure: Figure) -> bytes:
    """Returns the SVG file of a figure as bytes. A figure that is drawn again from the same data gives the same
    bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedray"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
