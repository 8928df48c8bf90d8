"""FedProx: FedAvg with a proximal term.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith: Federated Optimization in Heterogeneous Networks.
MLSys 2020, eq. 2 and Algorithm 2.
"""

from __future__ import annotations

from typing import Literal

import torch

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class FedProx(FedAvg):
    """FedAvg with a local loss that has an additional term, which pulls clients towards the server's model:
    f_i(y) + (mu/2) ||y - x^r||^2, so that y_j = y_{j-1} - eta_l (g_i(y_{j-1}) + mu (y_{j-1} - x^r)).

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_j a client's model after j local steps, f_i its loss,
    g_i its mini-batch gradient, and eta_l the clients' learning rate. With ``anchor: epoch``, as in the code of
    FedTrip's authors, x^r is replaced by the client's own model at the beginning of the epoch.
    """

    asynchronous = True
    allows_aggregation = True
    allows_private = True
    paper = "Li et al., MLSys 2020"
    work = Work(per_step=2)

    class Hyper(base.Hyper):
        mu: float = base.parameter(0.01, "weight of the proximal term (mu, eq. 2)", ge=0)
        anchor: Literal["round", "epoch"] = base.parameter(
            "round", "to what clients are pulled: the server's model, or their own at the beginning of each epoch"
        )

    def begin(self, client: ClientPhase) -> Carry:
        carry = super().begin(client)
        if self.hyper.anchor == "epoch":
            carry = carry.update(anchor=carry["y"].parameters)
        return carry

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y, x = carry["y"], client.shared["x"]
        if self.hyper.anchor == "epoch":
            begins = client.data.begins_epoch(batch.step)
            carry = carry.update(anchor=torch.where(begins, y.parameters, carry["anchor"]))
        away = y - x if self.hyper.anchor == "round" else y.parameters - carry["anchor"]
        return client.optimizer.descend(carry, "y", client.objective.gradient(y, batch) + self.hyper.mu * away)
