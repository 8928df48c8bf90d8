"""Writes figures as files, for print and for screens."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fedray.util.files import replacement_of

DOTS_PER_INCH = 150


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes a figure into ``folder`` as ``name``.png and ``name``.svg, and returns their paths."""
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    with replacement_of(png) as staging:
        figure.savefig(staging, dpi=DOTS_PER_INCH, format="png")
    with replacement_of(svg) as staging:
        staging.write_bytes(svg_of(figure))
    return [png, svg]


def svg_of(figure: Figure) -> bytes:
    """Returns a figure as SVG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedray"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
