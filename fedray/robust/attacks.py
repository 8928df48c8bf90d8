"""Attacks: what Byzantine clients send, or what they train on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from fedray.core.seeds import Purpose, stream


@dataclass(frozen=True)
class Attack:
    """An attack by a fixed set of clients.

    Attributes:
        kind: Its name, a value of ``attack.kind``.
        byzantine: The numbers of the clients that attack.
        strength: How strong it is: ``attack.scale``, ``attack.z`` or ``attack.eps``; None for what follows from the
            numbers of clients.
        seed: ``run.seed``, for noise.
    """

    kind: str
    byzantine: frozenset[int]
    strength: float | None
    seed: int

    def upload(self, rows: Tensor, clients: Sequence[int], round: int, place: int) -> Tensor:
        """Replaces the uploads of Byzantine clients, and returns ``rows``.

        Args:
            rows: The uploads of the m ``clients`` of a cohort, float32 ``[m, d]``, which are overwritten.
            clients: Their numbers.
            round: The round, from 1.
            place: The number of the upload among those of the phase, so that each has noise of its own.
        """
        lies = [client in self.byzantine for client in clients]
        if self.kind == "label_flip" or not any(lies):
            return rows
        which = torch.tensor(lies, device=rows.device)
        if self.kind == "sign_flip":
            rows[which] *= -(self.strength or 1.0)
        elif self.kind == "noise":
            for position, client in enumerate(clients):
                if lies[position]:
                    drawn = stream(self.seed, Purpose.ATTACK, round, client, place)
                    noise = torch.from_numpy(drawn.standard_normal(rows.shape[1], dtype=np.float32))
                    rows[position] = (self.strength or 1.0) * noise.to(rows.device)
        elif all(lies):
            rows[:] = 0
        else:
            rows[which] = self._from_honest(rows[~which], len(rows))
        return rows

    def _from_honest(self, honest: Tensor, members: int) -> Tensor:
        """Returns what attackers send that know the uploads of the ``honest`` clients of a cohort of ``members``."""
        mean = honest.mean(dim=0)
        if self.kind == "ipm":
            return -(0.5 if self.strength is None else self.strength) * mean
        z = self.strength if self.strength is not None else hidden(members, members - len(honest))
        return mean - z * honest.std(dim=0, correction=0)

    def labels(self, labels: Tensor, clients: Sequence[int], classes: int) -> Tensor:
        """Returns the labels ``[..., C, b]`` on which ``clients`` train: Byzantine ones have classes - 1 - y for y."""
        lies = torch.tensor([client in self.byzantine for client in clients], device=labels.device)[:, None]
        return torch.where(lies, classes - 1 - labels, labels)


def hidden(members: int, f: int) -> float:
    """Returns the largest z for which ``f`` attackers among ``members`` clients can hide within the spread of the
    others: the quantile of the normal distribution at (m - f - s) / (m - f), s = floor(m / 2 + 1) - f (Baruch, Baruch,
    Goldberg: A Little Is Enough. NeurIPS 2019, Algorithm 3)."""
    needed = max(math.floor(members / 2 + 1) - f, 1)
    share = (members - f - needed) / (members - f)
    return NormalDist().inv_cdf(min(max(share, 0.01), 0.99))
