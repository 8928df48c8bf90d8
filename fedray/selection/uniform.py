"""Clients that are equally likely."""

from __future__ import annotations

from fedray.selection.known import Known
from fedray.selection.selection import Chosen, Selection


class Uniform(Selection):
    """Draws the m clients of a round without replacement, all equally likely."""

    uniform = True

    def choose(self, known: Known) -> Chosen:
        return Chosen(known.draw(known.count))
