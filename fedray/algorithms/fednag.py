"""FedNAG: Nesterov accelerated gradient at the clients, whose models and momenta the server averages.

Z. Yang, W. Bao, D. Yuan, N. H. Tran, A. Y. Zomaya: Federated Learning with Nesterov Accelerated Gradient. TPDS 2022
(arXiv 2009.08716). The same rules are eqs. 6-7 in the paper of pFedMo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedray.algorithms import base
from fedray.algorithms.base import Algorithm, Broadcast, Carry, Result, Traffic, Upload
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class FedNAG(Algorithm):
    """Clients train with Nesterov's accelerated gradient, and the server averages the models x and the iterates y:
    y_t = x_{t-1} - eta g_i(x_{t-1}); x_t = y_t + gamma (y_t - y_{t-1}); the server averages x and y, and sends both.

    Here x_t and y_t are those of one client after t local steps, eta is the clients' learning rate, and g_i the
    gradient of client i on a mini-batch. Under partial participation, a client that was left out of earlier rounds
    starts from the current averages of x and y when it takes part again.
    """

    paper = "Yang et al., TPDS 2022"
    sends_updates = False
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1, vectors_up=1)
    uses_server_lr = False

    class Hyper(base.Hyper):
        gamma: float = base.parameter(0.5, "momentum factor (gamma, eq. 7)", ge=0, lt=1)

    def init_server(self, server: ServerState) -> None:
        server["y"] = server["x"].parameters.clone()

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "y": server["y"]})

    def begin(self, client: ClientPhase) -> Carry:
        return Carry({"x": client.start("x"), "y": client.start("y")})

    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        before = carry["y"]
        carry = client.optimizer.descend(carry, "x", client.objective.gradient(carry["x"], batch))
        y = carry["x"]
        return carry.update(x=y + self.hyper.gamma * (y.parameters - before), y=y.parameters)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        return Result(uploads={"x": Upload.weighted_mean(carry["x"]), "y": Upload.weighted_mean(carry["y"])})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server["x"], server["y"] = sums["x"], sums["y"]
