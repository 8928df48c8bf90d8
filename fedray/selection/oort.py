"""Those that are most useful, and some that are new."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedray.selection.known import ROOT_MEAN_SQUARE, SECONDS, Known
from fedray.selection.selection import Chosen, Selection


class Oort(Selection):
    """Draws a share epsilon of clients that never took part, and the others in proportion to their utilities, cut at
    the 95th percentile. In round r epsilon is max(0.2, 0.9 0.98^(r-1)), and the utility of client i is
    n_i sqrt(mean loss^2) + sqrt(0.1 ln r / last_i), times (T / t_i)^alpha if it took t_i > T. ``seconds`` is T.

    F. Lai, X. Zhu, H. V. Madhyastha, M. Chowdhury: Oort: Efficient Federated Learning via Guided Participant Selection.
    OSDI 2021, Algorithm 1 and Equation 2.
    """

    why = "selection_utility"

    def __init__(self, seconds: float | None = None, alpha: float | None = None) -> None:
        if seconds is None and alpha is not None:
            raise ValueError("alpha needs seconds, beyond which a client counts less")
        if not (seconds is None or seconds > 0) or not (alpha is None or alpha >= 0):
            raise ValueError(f"seconds must be above 0 and alpha at least 0, not {seconds} and {alpha}")
        self.seconds, self.alpha = seconds, 2.0 if alpha is None else float(alpha)
        self.columns = (ROOT_MEAN_SQUARE,) if seconds is None else (ROOT_MEAN_SQUARE, SECONDS)

    def choose(self, known: Known) -> Chosen:
        utilities = self.utilities(known)
        (new,), (seen,) = np.isnan(utilities).nonzero(), (~np.isnan(utilities)).nonzero()
        epsilon = max(0.2, 0.9 * 0.98 ** (known.round - 1))
        explored = min(len(new), max(round(epsilon * known.count), known.count - len(seen)))
        places = known.rng.choice(new, explored, replace=False)
        if known.count > explored:
            cut = np.minimum(utilities[seen], np.quantile(utilities[seen], 0.95)) + np.finfo(float).tiny
            drawn = known.rng.choice(seen, known.count - explored, replace=False, p=cut / cut.sum())
            places = np.concatenate([places, drawn])
        places = np.sort(places)
        return Chosen(known.ids[places], utilities[places])

    def utilities(self, known: Known) -> NDArray[np.float64]:
        """Returns the utility of each client, NaN for one that never took part."""
        last = known.last_round
        # whoever has computed losses has not taken part if too few answered for a robust rule
        losses: NDArray[np.float64] = np.where(last > 0, known.column(ROOT_MEAN_SQUARE), np.nan)
        found: NDArray[np.float64] = known.sizes * losses + np.sqrt(0.1 * math.log(known.round) / np.maximum(last, 1))
        if self.seconds is not None:
            took = known.column(SECONDS)
            late = took > self.seconds
            found[late] *= [(self.seconds / each) ** self.alpha for each in took[late].tolist()]
        return found
