"""One block of clients after another."""

from __future__ import annotations

import numpy as np

from fedray.selection.known import Known
from fedray.selection.selection import Chosen, Selection


class Cyclic(Selection):
    """Takes the clients in an order that is drawn once: round r has those at the places (r - 1) m .. r m - 1, modulo
    their number N."""

    def choose(self, known: Known) -> Chosen:
        places = np.arange((known.round - 1) * known.count, known.round * known.count)
        return Chosen(np.sort(known.order[places % len(known.ids)]))
