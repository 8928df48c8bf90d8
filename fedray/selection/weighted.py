"""Clients in proportion to their samples."""

from __future__ import annotations

from fedray.selection.known import Known
from fedray.selection.selection import Chosen, Selection


class Weighted(Selection):
    """Draws the m clients of a round without replacement, one after another, in proportion to their samples n_i."""

    by_samples = True

    def choose(self, known: Known) -> Chosen:
        return Chosen(known.draw(known.count, known.sizes))
