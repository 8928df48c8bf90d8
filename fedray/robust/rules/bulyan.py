"""Uploads chosen by Krum, and then a trimmed mean."""

from __future__ import annotations

import torch
from torch import Tensor

from fedray.robust.rules.krum import Krum, best, distances
from fedray.robust.rules.median import Median


class Bulyan(Krum):
    """Chooses theta = m - 2 f uploads, one after another, each by :class:`Krum` among those that are left; then takes
    the mean of the theta - 2 f values of each coordinate that are nearest to the median of the chosen ones.

    El Mhamdi, Guerraoui, Rouault: The Hidden Vulnerability of Distributed Learning in Byzantium. ICML 2018, Section 4.
    """

    def least(self) -> int:
        return 4 * self.f + 3

    def __call__(self, rows: Tensor, weights: Tensor, before: Tensor | None) -> Tensor:
        squares, left, theta = distances(rows), list(range(len(rows))), len(rows) - 2 * self.f
        chosen: list[int] = []
        while len(chosen) < theta:
            among = torch.tensor(left, device=rows.device)
            chosen.append(left.pop(best(squares[among][:, among], self.f)[0]))
        rows = rows[torch.tensor(sorted(chosen), device=rows.device)]
        median = Median()(rows, weights, None)
        nearest = (rows - median).abs().argsort(dim=0, stable=True)[: theta - 2 * self.f]
        return rows.gather(0, nearest).mean(dim=0)
