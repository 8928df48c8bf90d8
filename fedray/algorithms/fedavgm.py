"""FedAvgM: FedAvg with momentum at the server.

T.-M. H. Hsu, H. Qi, M. Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. arXiv 1909.06335, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedray.algorithms import base
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState


class FedAvgM(FedAvg):
    """FedAvg with momentum at the server, over the rounds:
    d = x^r - xbar; v <- beta v + d; x^{r+1} = x^r - eta_g v, or x^r - eta_g (d + beta v) with ``nesterov``.

    Symbols as in :class:`FedAvg`: x^r is the server's model, xbar the weighted mean of the clients' final models, and
    eta_g the server's learning rate. v is the momentum, 0 at first.
    """

    asynchronous = True
    allows_aggregation = True
    allows_private = True
    paper = "Hsu et al. 2019, arXiv 1909.06335"

    class Hyper(base.Hyper):
        beta: float = base.parameter(0.9, "server momentum (beta)", ge=0, lt=1)
        nesterov: bool = base.parameter(False, "Nesterov's form")

    def init_server(self, server: ServerState) -> None:
        server["v"] = server["x"].zeros()

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        x = server["x"].with_buffers_of(sums["y"])
        d = x - sums["y"]
        server["v"] = self.hyper.beta * server["v"] + d
        step = d + self.hyper.beta * server["v"] if self.hyper.nesterov else server["v"]
        server["x"] = x - server.server_lr * step
