"""How far clients drift apart: an algorithm that also measures its clients' local updates (``run.diagnostics``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedray.algorithms.base import Algorithm, Broadcast, Result, Upload
from fedray.algorithms.server_state import ServerState
from fedray.client.optimizer import Carry
from fedray.client.phase import ClientPhase
from fedray.core.vectors import Model
from fedray.errors import UserError

UPDATE = "local update"
"""The name of what the added phase needs, which no algorithm uses for anything else."""


class Measured(Algorithm):
    """The part of an algorithm that measures; :func:`measured` puts it before the algorithm's own class.

    y_i is the client's model when its local steps are over, and x^r the model that the server sent: the first one of
    its broadcast. The mean of the updates is known only when all clients have trained. So the algorithm gets a last
    phase, ``measure``, in which each client compares its own update, which it has kept, with the mean. No rule sees any
    of this, so that no bit of the result changes.
    """

    sent: Model
    """x^r of the round in progress, which the server's rule will replace."""
    mean: Tensor
    """The mean update of its cohort, by their aggregation weights, ``[width]``."""

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        if phase == self.phases[0]:
            self.sent = server["x"]
        return Broadcast({"mean": self.mean}) if phase == "measure" else super().broadcast(server, phase)

    def update_of(self, client: ClientPhase, carry: Carry) -> Tensor:
        """Returns the local updates y_i - x^r, ``[C, width]``."""
        sent = next(value for value in client.shared.values() if isinstance(value, Model))
        return carry.model.parameters - sent.parameters

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        result, update = super().end(client, carry), self.update_of(client, carry)
        result.uploads = {**result.uploads, UPDATE: Upload.weighted_mean(update)}
        result.kept = {**result.kept, UPDATE: update}
        return result

    def measure(self, client: ClientPhase) -> Result:
        """Measures each client, in Euclidean lengths over the trainable parameters.

        ``drift`` is the length of its update, y_i - x^r, ``spread`` the distance of its model from the mean of the
        cohort's models, and ``alignment`` the cosine of its update and the cohort's mean update.
        """
        update, mean = client.kept[UPDATE], client.shared["mean"]
        return Result(
            scalars={
                "drift": torch.linalg.vector_norm(update, dim=1, keepdim=True),
                "spread": torch.linalg.vector_norm(update - mean, dim=1, keepdim=True),
                "alignment": cosine_similarity(update, mean[None], dim=1)[:, None],
            }
        )

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        if phase == "measure":
            server.client_scalars |= scalars
            return
        if UPDATE in sums:
            self.mean = sums[UPDATE]
        super().server_update(server, phase, {name: sums[name] for name in sums if name != UPDATE}, scalars)


def measured(algorithm: Algorithm, against: str = "") -> Measured:
    """Returns the algorithm with the same rules and hyper-parameters, which also measures its clients' updates.

    ``against`` names what the cohort is to be compared with, ``all_clients`` or ``virtual``, if anything. Raises
    :class:`UserError` if it does not train its clients by local steps, in its phase ``train``, which has to be the
    first one for a comparison; and if clients keep states, which a virtual model has not.
    """
    if "train" not in algorithm.phases or type(algorithm).train is not Algorithm.train:
        raise UserError(
            f"run.diagnostics: {type(algorithm).__name__} has no local steps that could be measured: it needs a phase "
            "train, by begin, step and end"
        )
    if against and algorithm.phases[0] != "train":
        raise UserError(
            f"run.diagnostics={against}: {type(algorithm).__name__} does not begin with local training; use true"
        )
    if against == "virtual" and algorithm.stateful:
        raise UserError(f"run.diagnostics=virtual: the clients of {type(algorithm).__name__} keep states; use true")
    cls = type(type(algorithm).__name__, (Measured, type(algorithm)), {"__doc__": type(algorithm).__doc__})
    found: Measured = cls(algorithm.hyper)
    found.phases = (*found.phases, "measure")
    return found
