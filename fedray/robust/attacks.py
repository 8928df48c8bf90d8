"""Attacks: what Byzantine clients send, or what they train on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.samples import Indices
from fedray.core.seeds import Purpose, stream
from fedray.robust.backdoor import Backdoor


@dataclass(frozen=True)
class Attack:
    """An attack by a fixed set of clients.

    Attributes:
        kind: Its name, a value of ``attack.kind``.
        byzantine: The numbers of the clients that attack.
        strength: How strong it is: ``attack.scale``, ``attack.z`` or ``attack.eps``; None for what follows from the
            numbers of clients.
        seed: ``run.seed``, for noise.
        classes: How many classes there are.
        backdoor: The mark on images, for a ``backdoor``.
        marked: Which samples attackers mark, bool ``[samples]``.
    """

    kind: str
    byzantine: frozenset[int]
    strength: float | None
    seed: int
    classes: int = 0
    backdoor: Backdoor | None = None
    marked: NDArray[np.bool_] | None = None

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
        if self.kind in ("sign_flip", "backdoor"):
            rows[which] *= (self.strength or 1.0) * (-1 if self.kind == "sign_flip" else 1)
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

    def poison(self, stored: Any, labels: Tensor, clients: Sequence[int], indices: Indices) -> tuple[Any, Tensor]:
        """Returns the stored inputs and the labels ``[..., C, b]`` on which ``clients`` train, of the samples
        ``indices`` ``[..., C, b]``. Byzantine clients have classes - 1 - y for the label y, or with a backdoor the mark
        on some images, and its target for their labels."""
        lies = torch.tensor([client in self.byzantine for client in clients], device=labels.device)[:, None]
        if self.backdoor is None or self.marked is None:
            return stored, torch.where(lies, self.classes - 1 - labels, labels)
        lies = lies & torch.from_numpy(self.marked[indices]).to(labels.device)
        of_images = lies.view(*lies.shape, *[1] * (stored.dim() - lies.dim()))
        stored = torch.where(of_images, self.backdoor.marked(stored), stored)
        return stored, torch.where(lies, torch.full_like(labels, self.backdoor.target), labels)


def hidden(members: int, f: int) -> float:
    """Returns the largest z for which ``f`` attackers among ``members`` clients can hide within the spread of the
    others: the quantile of the normal distribution at (m - f - s) / (m - f), s = floor(m / 2 + 1) - f (Baruch, Baruch,
    Goldberg: A Little Is Enough. NeurIPS 2019, Algorithm 3)."""
    needed = max(math.floor(members / 2 + 1) - f, 1)
    share = (members - f - needed) / (members - f)
    return NormalDist().inv_cdf(min(max(share, 0.01), 0.99))
