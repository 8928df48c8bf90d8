"""SCAFFOLD: control variates against client drift.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Traffic, Upload, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class Scaffold(FedAvg):
    """FedAvg whose clients correct each gradient by control variates: c_i of the client, and c, the mean of all c_i:
    y_j = y_{j-1} - eta_l (g_i(y_{j-1}) - c_i + c); c_i+ = G_i(x^r) (``option: 1``) or
    c_i - c + (x^r - y_J) / (J eta_l) (``option: 2``); x^{r+1} = x^r + eta_g mean_i (y_i - x^r);
    c <- c + (1/N) sum_S (c_i+ - c_i), so that c = mean_i c_i.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_j a client's model after j of its J local steps, y_i and
    y_J its final one, g_i and G_i its gradients on a mini-batch and on all its samples, S the cohort, and N the number
    of clients that hold samples. c_i+ is the new c_i. With ``train.weighting: samples``, c is sum_i (n_i / n) c_i over
    all clients instead, where n_i of the n samples are client i's.
    """

    paper = "Karimireddy et al., ICML 2020"
    any_optimizer = False
    sends_updates = False
    assumes_plain_sgd = True
    client_state = ("c",)
    traffic = Traffic(vectors_down=1, vectors_up=1)
    weighting = "uniform"

    class Hyper(base.Hyper):
        option: Literal[1, 2] = base.parameter(2, "how c_i is renewed: 1 full-batch gradient, 2 from the local steps")

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.work = Work(per_step=2, once=2, full_gradients=1 if self.hyper.option == 1 else 0)

    def init_server(self, server: ServerState) -> None:
        server["c"] = server["x"].zeros()

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "c": server["c"]}, {"share": server.shares()})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        gradient = client.objective.gradient(carry["y"], batch) - client.state["c"] + client.shared["c"]
        return client.optimizer.descend(carry, "y", gradient)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        y, x, c = carry["y"], client.start("x"), client.state["c"]
        if self.hyper.option == 1:
            renewed = client.objective.full_gradient(x)
        else:
            renewed = c - client.shared["c"] + (x - y) / (client.J * client.lr)
        dc = client.scalars["share"] * (renewed - c)
        return Result(uploads={"y": Upload.weighted_mean(y), "dc": Upload.sum(dc)}, state={"c": renewed})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server["c"] = server["c"] + sums["dc"]
        server.move(sums["y"])
