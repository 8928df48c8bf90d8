"""q-FedAvg: clients with larger losses count more, so that accuracies are more alike.

T. Li, M. Sanjabi, A. Beirami, V. Smith: Fair Resource Allocation in Federated Learning. ICLR 2020, Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Result, Upload, Work
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.gradients.rows import squared_norms

LEAST = 1e-10
"""Added to losses, so that a client whose loss is 0 can be weighted too."""


class QFedAvg(FedAvg):
    """FedAvg for the objective sum_i F_i(x)^{q+1} / (q + 1), where F_i is client i's mean loss over all its samples:
    D_i = L (x^r - y_i), L = 1 / eta_l; h_i = q F_i^{q-1} ||D_i||^2 + L F_i^q;
    x^{r+1} = x^r - eta_g sum_i F_i^q D_i / sum_i h_i, with F_i at x^r.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_i a client's final model, eta_l the clients' learning
    rate. All clients of the cohort count the same but for their losses; q = 0 is FedAvg with uniform weights.
    """

    paper = "Li et al., ICLR 2020"
    weighting = "uniform"
    any_optimizer = False
    own_weights = True
    sends_numbers = True
    work = Work(once=4, full_losses=1)

    class Hyper(base.Hyper):
        q: float = base.parameter(1.0, "how much more larger losses count (q)", ge=0)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        q, loss = self.hyper.q, client.objective.full_loss(client.start("x")).double()
        # none of the client's targets may count, as in its local steps
        loss = torch.where(loss.isnan(), 0.0, loss) + LEAST
        square = squared_norms((carry["y"] - client.shared["x"]) / client.lr)
        h = q * loss ** (q - 1) * square + loss**q / client.lr
        return Result({"y": Upload.mean_by(loss**q, carry["y"])}, scalars={"weight": loss**q, "h": h})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        # sum_i F_i^q D_i is L sum_i F_i^q times the way to the mean by F_i^q
        way = math.fsum(scalars["weight"]) / (server.lr * math.fsum(scalars["h"]))
        server["x"] = server["x"].lerp(sums["y"], server.server_lr * way)
