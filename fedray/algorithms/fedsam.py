"""FedSAM: clients look for flat minima.

Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu: Generalized Federated Learning via Sharpness Aware Minimization. ICML
2022, Algorithm 1. The adaptive variant is that of J. Kwon, J. Kim, H. Park, I. K. Choi: ASAM. ICML 2021, Equation 7.
"""

from __future__ import annotations

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.gradients.rows import squared_norms

LEAST = 1e-12
"""Added to norms, so that a gradient of zero moves nothing."""


class FedSAM(FedAvg):
    """FedAvg whose local steps follow the gradient at the worst model nearby, on the same mini-batch:
    e = rho g_i(y_{j-1}) / ||g_i(y_{j-1})||; y_j = y_{j-1} - eta_l g_i(y_{j-1} + e).

    Symbols as in :class:`FedAvg`: y_j is a client's model after j local steps, and g_i its mini-batch gradient. With
    ``adaptive`` (ASAM) the neighbourhood is larger for larger weights: e = rho T^2 g / ||T g||, where T = |y_{j-1}|.
    """

    asynchronous = True
    allows_aggregation = True
    allows_private = True
    paper = "Qu et al., ICML 2022"
    work = Work(forwards=1, backwards=1, per_step=5)

    class Hyper(base.Hyper):
        rho: float = base.parameter(0.05, "radius of the neighbourhood (rho)", ge=0)
        adaptive: bool = base.parameter(False, "scale the neighbourhood by the weights (ASAM)")

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y = carry["y"]
        g = client.objective.gradient(y, batch)
        scale = y.parameters.abs() if self.hyper.adaptive else 1.0
        direction = scale * g
        e = self.hyper.rho * scale * direction / (squared_norms(direction).sqrt().float() + LEAST)
        return client.optimizer.descend(carry, "y", client.objective.gradient(y + e, batch))
