"""FedMom: Nesterov momentum at the server.

Z. Huo, Q. Yang, B. Gu, L. Carin, H. Huang: Faster On-Device Training Using New Federated Momentum Algorithm. arXiv
2002.02090, 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedray.algorithms import base
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState


class FedMom(FedAvg):
    """FedAvg with Nesterov momentum at the server, over the rounds:
    v_new = x^r - eta (x^r - xbar); x^{r+1} = v_new + beta (v_new - v_prev); v_prev <- v_new, from v_prev = x^1.

    Symbols as in :class:`FedAvg`: x^r is the server's model, and xbar the weighted mean of the clients' final models.
    The paper has eta = N/m (m of N clients are the cohort) because its weights sum to 1 over all clients; here the
    weights of the cohort sum to 1, and eta is 1 by default.
    """

    allows_aggregation = True
    allows_private = True
    paper = "Huo et al. 2020, arXiv 2002.02090"
    uses_server_lr = False

    class Hyper(base.Hyper):
        beta: float = base.parameter(0.9, "server momentum (beta)", ge=0, lt=1)
        eta: float = base.parameter(1.0, "server learning rate (eta)", gt=0)

    def init_server(self, server: ServerState) -> None:
        server["v"] = server["x"].clone()

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        v = server["x"].lerp(sums["y"], self.hyper.eta)
        server["x"] = v + self.hyper.beta * (v - server["v"])
        server["v"] = v
