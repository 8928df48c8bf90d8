"""SCAFFOLD-M: SCAFFOLD's control variates on the gradient, and FedCM's momentum over rounds.

Z. Cheng, X. Huang, P. Wu, K. Yuan: Momentum Benefits Non-IID Federated Learning Simply and Provably. ICLR 2024 (arXiv
2306.16504), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Traffic, Upload, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class ScaffoldM(FedAvg):
    """SCAFFOLD's control variates c_i and c, together with FedCM's momentum g over rounds:
    y_j = y_{j-1} - eta_l (beta (g_i(y_{j-1}) - c_i + c) + (1 - beta) g); c_i+ = mean_j g_i(y_{j-1}), over the
    mini-batches of the round; g <- mean_i (x^r - y_i) / (J_i eta_l); c <- c + (1/N) sum_S (c_i+ - c_i);
    x^{r+1} = x^r + eta_g mean_i (y_i - x^r).

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_j a client's model after j of its J_i local steps, y_i
    its final one, g_i its mini-batch gradient, mean_i the weighted mean over the cohort S, and N the number of clients
    that hold samples. With ``train.weighting: samples``, c is sum_i (n_i / n) c_i over all clients instead, where n_i
    of the n samples are client i's, so that c stays the mean of the clients' c_i.
    """

    name = "scaffold_m"
    paper = "Cheng et al., ICLR 2024"
    sends_updates = False
    any_optimizer = False
    assumes_plain_sgd = True
    client_state = ("c",)
    traffic = Traffic(vectors_down=2, vectors_up=1)
    work = Work(per_step=3, once=2)
    weighting = "uniform"

    class Hyper(base.Hyper):
        beta: float = base.parameter(0.1, "share of the fresh gradient (beta)", gt=0, le=1)

    def init_server(self, server: ServerState) -> None:
        server["c"], server["g"] = server["x"].zeros(), server["x"].zeros()

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "c": server["c"], "g": server["g"]}, {"share": server.shares()})

    def begin(self, client: ClientPhase) -> Carry:
        x = client.start("x")
        return Carry({"y": x, "met": x.zeros()})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        beta, c, g = self.hyper.beta, client.shared["c"], client.shared["g"]
        met = client.objective.gradient(carry["y"], batch)
        carry = client.optimizer.descend(carry, "y", beta * (met - client.state["c"] + c) + (1 - beta) * g)
        return carry.update(met=carry["met"] + met)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        y, x, renewed = carry["y"], client.start("x"), carry["met"] / client.J
        dc = client.scalars["share"] * (renewed - client.state["c"])
        g = (x - y) / (client.J * client.lr)
        uploads = {"y": Upload.weighted_mean(y), "g": Upload.weighted_mean(g), "dc": Upload.sum(dc)}
        return Result(uploads=uploads, state={"c": renewed})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server["c"] = server["c"] + sums["dc"]
        server["g"] = sums["g"]
        server.move(sums["y"])
