"""FedTrip: clients are pulled to the global model, and pushed away from their own last model.

X. Li, M. Liu, S. Sun, Y. Wang, H. Jiang, X. Jiang: FedTrip: A Resource-Efficient Federated Learning Method with Triplet
Regularization. IPDPS 2023 (arXiv 2304.05824), eq. 5 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Result, Upload, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class FedTrip(FedAvg):
    """FedAvg with a local loss that pulls clients towards the server's model and away from w_i, the final model of the
    client's last participation: f_i(y) + (mu/2) (||y - x^r||^2 - xi ||y - w_i||^2),
    whose gradient is g_i + mu ((y - x^r) + xi (w_i - y)); xi = 0 at the first participation.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y a client's model, f_i its loss, and g_i its mini-batch
    gradient. mu and xi are weights.

    By default xi is one over the number of rounds since the client last took part (``xi_mode: inverse_gap``). The
    paper's text says that xi is this number itself (``xi_mode: gap``), but training can then diverge. The paper's
    theory fits the default: there xi is in (0, 1], with the mean E[xi] = p ln p / (p - 1), where p is the probability
    with which a client takes part in a round.

    The code of FedTrip's authors does three things that the defaults do not. A client that takes part for the first
    time, in round r, has a random initial model as w_i, and xi = 1/r (``first: own_initial``). mu is divided by the
    number of local epochs (``mu_per: epoch``). Clients keep their momentum between rounds (``train.momentum_reset:
    never``).
    """

    allows_aggregation = True
    allows_private = True
    paper = "Li et al., IPDPS 2023"
    client_state = ("w",)
    work = Work(per_step=4)

    class Hyper(base.Hyper):
        mu: float = base.parameter(0.4, "weight of the triplet term (mu, eq. 5)", ge=0)
        mu_per: Literal["round", "epoch"] = base.parameter("round", "epoch: mu is divided by the local epochs")
        xi_scale: float = base.parameter(1.0, "factor on xi", ge=0)
        xi_mode: Literal["inverse_gap", "gap", "const"] = base.parameter("inverse_gap", "what xi is")
        xi_const: float = base.parameter(1.0, "xi under xi_mode: const", ge=0)
        first: Literal["nothing", "initial", "own_initial"] = base.parameter(
            "nothing", "w_i before a client has taken part: none, the run's initial model, or a random one of its own"
        )

    def advice(self, momentum: float, cohort: int, clients: int, server_lr: float) -> Iterator[str]:
        if self.hyper.xi_mode == "gap":
            yield "algorithm.xi_mode=gap: a client that was away pushes with xi > 1, which can diverge"
        if self.hyper.xi_mode != "const" and self.hyper.xi_const != 1:
            yield f"algorithm.xi_const={self.hyper.xi_const:g} changes nothing: it is for algorithm.xi_mode=const"

    def begin(self, client: ClientPhase) -> Carry:
        w = client.state["w"]
        if self.hyper.first != "nothing":
            initial = client.initial_models(per_client=self.hyper.first == "own_initial")
            w = torch.where(client.gap > 0, w, initial.parameters)
        return super().begin(client).update(w=w)

    def _xi(self, client: ClientPhase) -> Tensor:
        gap = client.gap
        if self.hyper.first != "nothing":
            gap = torch.where(gap > 0, gap, client.round)
        modes = {
            "inverse_gap": 1 / gap.clamp(min=1),
            "gap": gap,
            "const": torch.full_like(gap, self.hyper.xi_const),
        }
        return torch.where(gap > 0, self.hyper.xi_scale * modes[self.hyper.xi_mode], 0)

    def _mu(self, client: ClientPhase) -> Any:
        if self.hyper.mu_per == "round":
            return self.hyper.mu
        return self.hyper.mu / (client.J / client.data.epoch_steps()).clamp(min=1)

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y, x, w = carry["y"], client.shared["x"], carry["w"]
        triplet = (y - x) + self._xi(client) * (w - y.parameters)
        return client.optimizer.descend(carry, "y", client.objective.gradient(y, batch) + self._mu(client) * triplet)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        return Result(uploads={"y": Upload.weighted_mean(carry["y"])}, state={"w": carry["y"].parameters})
