"""Lets the Byzantine clients of a run carry out its attack, where uploads, samples or test samples are theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.samples import Indices, Samples
from fedray.core.structure import map_leaves
from fedray.robust.attack import Attack, AttackedRows
from fedray.robust.results import checked
from fedray.usercode.importing import as_user_error


@dataclass(frozen=True)
class Attackers:
    """The Byzantine ``clients`` of a run, which carry out ``attack``. ``seed`` is ``run.seed``."""

    attack: Attack
    clients: frozenset[int]
    seed: int

    def upload(self, rows: Tensor, clients: Sequence[int], round: int, name: str, place: int) -> Tensor:
        """Replaces the uploads of Byzantine clients, and returns ``rows``.

        Args:
            rows: The uploads of the m ``clients`` of a cohort, float32 ``[m, d]``, which are overwritten.
            clients: Their numbers.
            round: The round, from 1.
            name: The name of the upload.
            place: The number of the upload among those of the phase.
        """
        rows_of = [row for row, client in enumerate(clients) if client in self.clients]
        if not rows_of:
            return rows
        byzantine = torch.zeros(len(rows), dtype=torch.bool)
        byzantine[rows_of] = True
        byzantine = byzantine.to(rows.device)
        numbers = [clients[row] for row in rows_of]
        sent = AttackedRows(name, round, numbers, len(rows), rows, byzantine, self.seed, place)
        own = rows[byzantine]
        with as_user_error(f"{self._name}.upload failed on the upload {name!r} of round {round}"):
            found = self.attack.upload(own, sent)
        rows[byzantine] = checked(found, own, f"{self._name}.upload")
        return rows

    def poison(self, stored: Any, labels: Tensor, clients: Sequence[int], indices: Indices) -> tuple[Any, Tensor]:
        """Returns the stored inputs and the labels ``[J, C, b, ...]`` on which C ``clients`` train in place of those of
        the samples ``indices`` ``[J, C, b]``."""
        lies = [row for row, client in enumerate(clients) if client in self.clients]
        if not lies:
            return stored, labels

        def replaced(whole: Tensor, part: Any) -> Tensor:
            changed = whole.clone()
            changed[:, lies] = checked(part, whole[:, lies], f"{self._name}.poison")
            return changed

        with as_user_error(f"{self._name}.poison failed"):
            own = map_leaves(lambda each: each[:, lies], stored)
            inputs, targets = self.attack.poison(own, labels[:, lies], indices[:, lies])
            return map_leaves(replaced, stored, inputs), replaced(labels, targets)

    @property
    def _name(self) -> str:
        return f"attack: {type(self.attack).__name__}"


@dataclass(frozen=True)
class DisguisedSamples:
    """The test ``samples`` as ``attack`` shows them to the model, and the labels for which it wants them to be
    taken."""

    samples: Samples
    attack: Attack

    def gather(self, indices: NDArray[np.int64]) -> tuple[Any, Tensor]:
        """Returns inputs and targets, as :meth:`fedray.core.samples.Samples.gather`."""
        what, (stored, labels) = f"attack: {type(self.attack).__name__}.disguise", self.samples.raw(indices)
        with as_user_error(f"{what} failed"):
            shown, wanted = self.attack.disguise(stored, labels)
            shown = map_leaves(lambda own, each: checked(each, own, what), stored, shown)
        return self.samples.inputs(shown), checked(wanted, labels, what)
