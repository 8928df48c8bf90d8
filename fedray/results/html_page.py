"""Makes an HTML page from sections with tables and pictures. It is a single file, which needs no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from matplotlib.figure import Figure
from PIL import Image

from fedray.results.style import svg_of
from fedray.results.tables import Table

PIXELS_PER_INCH = 96
"""The number of pixels in an inch, in HTML."""


@dataclass(frozen=True)
class Picture:
    """A picture in an HTML page: a sentence about what it shows (``caption``), its bytes as a data URL (``data``), and
    its width and height in pixels."""

    caption: str
    data: str
    width: int
    height: int

    @classmethod
    def of_figure(cls, caption: str, figure: Figure) -> Picture:
        """Makes a picture in a page, as SVG, from a Matplotlib figure. ``caption`` is the sentence below it."""
        width, height = (round(PIXELS_PER_INCH * inches) for inches in figure.get_size_inches())
        data = base64.b64encode(svg_of(figure)).decode()
        return cls(caption, f"data:image/svg+xml;base64,{data}", width, height)

    @classmethod
    def of_file(cls, caption: str, path: Path) -> Picture:
        """Makes a picture in a page from a PNG file. ``caption`` is the sentence below it."""
        with Image.open(path) as image:
            scale = PIXELS_PER_INCH / image.info.get("dpi", (PIXELS_PER_INCH,))[0]
            width, height = (round(scale * pixels) for pixels in image.size)
        return cls(caption, f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}", width, height)


@dataclass(frozen=True)
class Section:
    """A section of an HTML page, with a title, tables, pictures, paragraphs of text and a list of warnings.
    ``warnings_title`` is a sentence above the ``warnings``."""

    title: str
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    paragraphs: Sequence[str] = ()
    warnings: Sequence[str] = ()
    warnings_title: str = ""


@dataclass(frozen=True)
class Page:
    """An HTML page in one file: its ``title``, the paragraphs at the top (``lead``), its ``sections``, and a line at
    the bottom (``foot``)."""

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    foot: str = "Made by fedray. This page is one file and needs no network."

    def html(self) -> str:
        """Returns the HTML text of the page, to be written to a file. Pictures are inside the text."""
        loader = jinja2.PackageLoader("fedray.results", ".")
        environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True)
        return environment.get_template("page.html.jinja").render(page=self)
