"""FastSlowMo: Nesterov momentum at the workers and at the aggregator.

Z. Yang, S. Fu, W. Bao, D. Yuan, A. Y. Zomaya: FastSlowMo: Federated Learning With Combined Worker and Aggregator
Momenta. IEEE Transactions on Artificial Intelligence 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast
from fedray.algorithms.fednag import FedNAG
from fedray.algorithms.server_state import ServerState


class FastSlowMo(FedNAG):
    """Clients (workers) train as in FedNAG, with Nesterov momentum, and the server adds a momentum over rounds:
    y_new = xbar; x^{r+1} = y_new + gamma_a (y_new - y_srv); y_srv <- y_new, from y_srv = x^1.

    Here x^r is the server's model in round r, xbar the average of the workers' models, gamma_a the factor of the
    server's momentum, and y_srv the average of the previous round. As in :class:`FedNAG`, a worker has a model x_t and
    an iterate y_t after t local steps.

    The server's momentum moves x, so ``carry`` says with which y workers begin the next round. With ``carry: y``, as in
    the paper, they begin with the average of their iterates y. ``carry: velocity`` is not the paper's algorithm: with
    it workers keep the average of the momentum buffers buf_t that torch's Nesterov SGD would have, for which x_t - y_t
    = -gamma eta_l buf_t. They begin with y = x^{r+1} + gamma eta_l buf, where buf is that average, gamma the workers'
    momentum factor, and eta_l their learning rate.
    """

    paper = "Yang, Fu et al., IEEE TAI 2022"
    assumes_plain_sgd = True

    class Hyper(base.Hyper):
        gamma: float = base.parameter(0.5, "worker momentum (gamma)", ge=0, lt=1)
        gamma_a: float = base.parameter(0.5, "aggregator momentum (gamma_a)", ge=0, lt=1)
        carry: Literal["y", "velocity"] = base.parameter("y", "what the workers keep over the server's jump")

    def init_server(self, server: ServerState) -> None:
        super().init_server(server)
        server["y_srv"] = server["x"].clone()
        server["lag"] = server["x"].zeros()

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        if self.hyper.carry == "velocity":
            server["y"] = server["x"].parameters + server.lr * server["lag"]
        return super().broadcast(server, phase)

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server["x"] = sums["x"] + self.hyper.gamma_a * (sums["x"] - server["y_srv"])
        server["y_srv"] = sums["x"]
        server["y"] = sums["y"]
        server["lag"] = (sums["y"] - sums["x"].parameters) / server.lr
