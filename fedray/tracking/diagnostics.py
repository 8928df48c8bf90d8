"""Measures how far clients drift apart: an algorithm that also measures its clients' local updates
(``run.diagnostics``)."""

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
"""The name of the local updates among an algorithm's uploads and kept values. No algorithm uses it for anything
else."""


class Measured(Algorithm):
    """A mixin for an algorithm that also measures its clients' local updates (``run.diagnostics``).

    :func:`measured` makes a class of which this is the first base and the algorithm's own class the second. An update
    is y_i - x^r, where y_i is the client's model after its local steps, and x^r the first model in the server's
    broadcast. The mean of the updates is only known when all clients have trained. So the algorithm gets another phase,
    ``measure``, in which each client compares its update, stored since its training, with the mean. The algorithm's
    rules see nothing of this, so the results are the same to the bit.
    """

    sent: Model
    """x^r of the current round, which the server's rule will replace."""
    mean: Tensor
    """The cohort's mean update by aggregation weights, ``[width]``."""

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        if phase == self.phases[0]:
            self.sent = server["x"]
        return Broadcast({"mean": self.mean}) if phase == "measure" else super().broadcast(server, phase)

    def update_of(self, client: ClientPhase, carry: Carry) -> Tensor:
        """Returns the local updates of the C clients that are trained together, ``[C, width]``, a row for each client.
        ``width`` is the number of the model's parameters.

        An update is the client's model after its local steps, which is the first one in ``carry``, minus the model that
        the server sent, over the trainable parameters.
        """
        sent = next(value for value in client.shared.values() if isinstance(value, Model))
        return carry.model.parameters - sent.parameters

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        result, update = super().end(client, carry), self.update_of(client, carry)
        result.uploads = {**result.uploads, UPDATE: Upload.weighted_mean(update)}
        result.kept = {**result.kept, UPDATE: update}
        return result

    def measure(self, client: ClientPhase) -> Result:
        """Measures how far each client has moved in this round, in an additional phase after all clients have trained.

        The result has three numbers for each client. ``drift`` is the length of its local update, which is its model
        after the local steps minus the model that the server sent. ``spread`` is the distance of its model from the
        mean of the cohort's models, and ``alignment`` the cosine of its update and the cohort's mean update. All
        lengths are Euclidean, over the trainable parameters.
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
    """Returns an algorithm with the rules and hyper-parameters of ``algorithm`` that also measures its clients' local
    updates (``run.diagnostics``).

    ``against`` is what the cohort is compared with elsewhere; here it is only checked. It is ``all_clients``,
    ``virtual`` for a model that is trained with the mean of the clients' gradients, or "" for nothing. Raises
    :class:`UserError` if the algorithm has no phase ``train`` with local steps; if ``against`` is not "" and ``train``
    is not the first phase; or if ``against`` is ``virtual`` and clients keep states, because a virtual model has none.
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
