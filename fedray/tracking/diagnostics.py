"""Measures how far clients drift apart: an algorithm that also measures its clients' local updates
(``run.diagnostics``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedray.algorithms.base import Algorithm, Broadcast, Result, Upload
from fedray.algorithms.server_state import ServerState
from fedray.client.optimizer import Carry
from fedray.client.phase import ClientPhase
from fedray.core.vectors import Model
from fedray.errors import UserError

LOCAL_UPDATE = "local update"
"""The name of the local updates among an algorithm's uploads and kept values. No algorithm uses it for anything
else."""


class Measured(Algorithm):
    """A mixin for an algorithm that also measures its clients' local updates (``run.diagnostics``).

    :func:`measured` makes a class that inherits from this class first and from the algorithm's own class second. A
    local update is y_i - x^r, where y_i is the client's model after its local steps, and x^r the first model that the
    server sent for this training.

    Each client's update is stored after its training, and compared with the mean of all updates later, because the mean
    is only known when all clients have trained. For this, each round gets an additional phase (part of the round) at
    its end, ``measure``. The algorithm's own methods do not notice the measuring, so the run's results are the same to
    the bit.
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
        ``width`` is the number of the model's trainable parameters.

        A local update is the difference of two models in their trainable parameters: the client's model after its local
        steps minus the model that the server sent. ``carry`` has the models and vectors of the clients after their last
        local step; its first model is the trained one. ``client`` has what the server sent.
        """
        sent = next(value for value in client.shared.values() if isinstance(value, Model))
        update = carry.model.parameters - sent.parameters
        return update if client.private is None else cast(Tensor, client.private.without(update, update.shape[-1]))

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        result, update = super().end(client, carry), self.update_of(client, carry)
        result.uploads = {**result.uploads, LOCAL_UPDATE: Upload.weighted_mean(update)}
        result.kept = {**result.kept, LOCAL_UPDATE: update}
        return result

    def measure(self, client: ClientPhase) -> Result:
        """Measures how far each client has moved in this round, in an additional phase after all clients have trained.

        The result has three numbers for each client. ``drift`` is the length of its local update, which is its model
        after the local steps minus the model that the server sent. ``spread`` is the distance of its model from the
        mean of the cohort's models, and ``alignment`` the cosine of its update and the cohort's mean update. All
        lengths are Euclidean, over the trainable parameters.
        """
        update, mean = client.kept[LOCAL_UPDATE], client.shared["mean"]
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
        if LOCAL_UPDATE in sums:
            self.mean = sums[LOCAL_UPDATE]
        super().server_update(server, phase, {name: sums[name] for name in sums if name != LOCAL_UPDATE}, scalars)


def measured(algorithm: Algorithm, against: str = "") -> Measured:
    """Returns an algorithm with the rules and hyper-parameters of ``algorithm`` that also measures its clients' local
    updates (``run.diagnostics``).

    ``against`` says with what each round is also compared, by :mod:`fedray.engine.diagnostics`: with a round of all
    clients (``all_clients``), with a model that is trained by the mean of the clients' gradients (``virtual``), or with
    nothing (""). This function only checks whether the algorithm allows it.

    Raises :class:`UserError` if the algorithm has no phase ``train`` with local steps; if ``against`` is not "" and
    ``train`` is not the first phase; or if ``against`` is ``virtual`` and the algorithm's clients keep states between
    rounds, because a virtual model has none.
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
