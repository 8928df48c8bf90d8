"""FedCM: client-level momentum from the last round.

J. Xu, S. Wang, L. Wang, A. C.-C. Yao: FedCM: Federated Learning with Client-level Momentum. arXiv 2106.10874, 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Traffic, Upload, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class FedCM(FedAvg):
    """FedAvg whose clients mix each gradient with Delta, the mean direction of the last cohort:
    y_j = y_{j-1} - eta_l (alpha g_i(y_{j-1}) + (1 - alpha) Delta); Delta <- mean_i (x^r - y_i) / (J_i eta_l);
    x^{r+1} = x^r - eta_g (x^r - xbar).

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_j a client's model after j local steps, y_i the final
    one of client i after J_i steps, g_i its mini-batch gradient, mean_i the weighted mean over the cohort, xbar =
    mean_i y_i, and eta_l and eta_g are the learning rates of clients and server. Delta depends on the last cohort
    alone; nothing of earlier rounds is left in it. The paper's server learning rate is eta_g J eta_l in these symbols.
    """

    paper = "Xu et al. 2021, arXiv 2106.10874"
    sends_updates = False
    any_optimizer = False
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1)
    weighting = "uniform"

    class Hyper(base.Hyper):
        alpha: float = base.parameter(0.1, "share of the fresh gradient (alpha)", gt=0, le=1)

    def init_server(self, server: ServerState) -> None:
        server["delta"] = server["x"].zeros()

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "delta": server["delta"]})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y, alpha = carry["y"], self.hyper.alpha
        gradient = alpha * client.objective.gradient(y, batch) + (1 - alpha) * client.shared["delta"]
        return client.optimizer.descend(carry, "y", gradient)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        y = carry["y"]
        delta = (client.shared["x"] - y) / (client.J * client.lr)
        return Result(uploads={"y": Upload.weighted_mean(y), "delta": Upload.weighted_mean(delta)})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server["delta"] = sums["delta"]
        server.move(sums["y"])
