"""Those with the largest losses among some candidates."""

from __future__ import annotations

import numpy as np

from fedray.errors import UserError
from fedray.selection.known import LOSS, Known
from fedray.selection.selection import Chosen, Selection


class PowerOfChoice(Selection):
    """Draws d ``candidates`` in proportion to their samples, and takes the m with the largest losses F_i(x) of the
    server's model over all samples that they hold. With ``cached`` these are the training losses of their last
    participation (rpow-d), and those that never took part come first.

    Y. J. Cho, J. Wang, G. Joshi: Towards Understanding Biased Client Selection in Federated Learning. AISTATS 2022,
    Section 3.
    """

    why = "selection_loss"
    by_samples = True

    def __init__(self, candidates: int, cached: bool = False) -> None:
        if isinstance(candidates, bool) or candidates < 1 or candidates != int(candidates):
            raise ValueError(f"candidates must be a whole number of at least 1, not {candidates}")
        if not isinstance(cached, bool):
            raise ValueError(f"cached must be true or false, not {cached!r}")
        self.candidates, self.cached = int(candidates), cached
        self.columns = (LOSS,) if cached else ()
        self.asks = 0 if cached else self.candidates

    def check(self, count: int, clients: int) -> None:
        if not count <= self.candidates <= clients:
            raise UserError(
                f"train.sampling: candidates={self.candidates} must be at least {count}, the clients that are chosen, "
                f"and at most {clients}, those that have samples"
            )

    def choose(self, known: Known) -> Chosen:
        candidates = known.draw(self.candidates, known.sizes)
        losses = known.column(LOSS, candidates, np.inf) if self.cached else known.losses(candidates).mean
        # a client all of whose tokens are ignored has no loss, and comes last; of equal ones the first comes first
        order = np.argsort(-np.where(np.isnan(losses), -np.inf, losses), kind="stable")
        largest = np.sort(order[: known.count])
        return Chosen(candidates[largest], losses[largest])
