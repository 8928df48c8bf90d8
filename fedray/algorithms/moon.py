"""MOON: model-contrastive learning: representations near the global model's, away from the client's last ones.

Q. Li, B. He, D. Song: Model-Contrastive Federated Learning. CVPR 2021, eq. 3 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model
from fedray.gradients.passes import Outputs


class Moon(FedAvg):
    """FedAvg with a contrastive loss L_con, which keeps representations near those of the global model, and away from
    those of the client's earlier models: the local loss is f_i(y) + mu L_con,
    with z the representations of a sample under y, the global model x^r (z_g) and the client's last P final models
    (z_p), s(a, b) = cos(a, b) / T:
        L_con = -log(exp(s(z, z_g)) / (exp(s(z, z_g)) + sum_p exp(s(z, z_p)))).

    As in :class:`FedAvg`, y is the client's model and f_i its loss. P is ``buffer`` and T ``temperature``. ``first``
    says from which model z_p comes at a client's first participation: from none, so that L_con = 0 (``skip``); from a
    model that is drawn for the client, as in the authors' code (``init``); or from the received model x^r (``global``).
    """

    allows_aggregation = True
    allows_private = True
    paper = "Li, He, Song, CVPR 2021"
    needs_head = "projection"

    class Hyper(base.Hyper):
        mu: float = base.parameter(1.0, "weight of the contrastive loss (mu, eq. 4)", ge=0)
        temperature: float = base.parameter(0.5, "temperature of the contrastive loss (tau, eq. 3)", gt=0)
        buffer: int = base.parameter(1, "how many of its last models a client keeps (P)", ge=1)
        first: Literal["skip", "init", "global"] = base.parameter("skip", "the last model before there is one")

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.client_models = tuple(f"last{age}" for age in range(1, self.hyper.buffer + 1))
        self.work = Work(forwards=1 + self.hyper.buffer)

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        times = server.column("times")
        return Broadcast({"x": server["x"]}, {"times": [times.get(client, 0) for client in server.cohort.ids]})

    def begin(self, client: ClientPhase) -> Carry:
        x, times = client.start("x"), client.scalars["times"]
        new = times == 0
        known = times if self.hyper.first == "skip" else times + 1
        first = x_g = client.start("x")
        if self.hyper.first == "init" and new.any():
            first = client.initial_models(per_client=True)
        # if there is no such model, x^r takes its place, and the loss ignores it
        last = {
            name: Model.where(new | (known <= age), x_g if age else first, client.state[name])
            for age, name in enumerate(self.client_models)
        }
        return Carry({"y": x, "x_g": x_g, "known": known, **last})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y = carry["y"]
        z_g = client.objective.forward(carry["x_g"], batch.x).features
        others = [client.objective.forward(carry[name], batch.x).features for name in self.client_models]
        gradient = client.objective.gradient(y, batch, self.loss, [carry["known"], z_g, *others])
        return client.optimizer.descend(carry, "y", gradient)

    def loss(self, outputs: Outputs, task: Tensor, known: Tensor, z_g: Tensor, *others: Tensor) -> Tensor:
        """Returns the loss f_i + mu L_con of each sample of a client's mini-batch, ``[b]``, where L_con is the
        contrastive loss.

        ``outputs`` has the representations ``[b, d]`` of the samples under the model that is trained, and ``task`` is
        their task loss f_i ``[b]``. ``z_g`` and ``others`` are the representations under the global model and under the
        client's earlier models, the latest first. ``known [1]`` is the number of earlier models that the client has;
        the loss ignores all ``others`` after them.
        """
        similar = torch.stack([torch.cosine_similarity(outputs.features, z, dim=1) for z in (z_g, *others)])
        exists = torch.arange(len(similar), device=known.device) <= known
        s = torch.where(exists[:, None], similar / self.hyper.temperature, -torch.inf)
        mu: float = self.hyper.mu
        return task - mu * torch.log_softmax(s, dim=0)[0]

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        kept = [carry["y"], *(carry[name] for name in self.client_models[:-1])]
        uploads = super().end(client, carry).uploads
        return Result(uploads, state=dict(zip(self.client_models, kept, strict=True)))

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        super().server_update(server, phase, sums, scalars)
        times = server.column("times")
        times |= {client: times.get(client, 0) + 1 for client in server.cohort.ids}
