"""FedProx: FedAvg with a proximal term.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith: Federated Optimization in Heterogeneous Networks.
MLSys 2020, eq. 2 and Algorithm 2.
"""

from __future__ import annotations

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class FedProx(FedAvg):
    """FedAvg with a local loss that has an additional term, which pulls clients towards the server's model:
    f_i(y) + (mu/2) ||y - x^r||^2, so that y_j = y_{j-1} - eta_l (g_i(y_{j-1}) + mu (y_{j-1} - x^r)).

    The symbols are those of :class:`FedAvg`.
    """

    paper = "Li et al., MLSys 2020"
    work = Work(per_step=2)

    class Hyper(base.Hyper):
        mu: float = base.parameter(0.01, "weight of the proximal term (mu, eq. 2)", ge=0)

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y, x = carry["y"], client.shared["x"]
        gradient = client.objective.gradient(y, batch) + self.hyper.mu * (y - x)
        return client.optimizer.descend(carry, "y", gradient)
