"""SCAFFOLD: control variates against client drift.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Traffic, Work, mean, total
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server import Server
from fedray.core.context import Context


class Scaffold(FedAvg):
    """y_j = y_{j-1} - eta_l (g_i(y_{j-1}) - c_i + c); c_i+ = G_i(x^r) (option 1) or c_i - c + (x^r - y_J) / (J eta_l)
    (option 2); x^{r+1} = x^r + eta_g mean_i (y_i - x^r); c <- c + (1/N) sum_S (c_i+ - c_i), so that c = mean_i c_i.

    With ``train.weighting: samples``, c is sum_i (n_i / n) c_i over all clients instead.
    """

    paper = "Karimireddy et al., ICML 2020"
    assumes_plain_sgd = True
    client_state = ("c",)
    traffic = Traffic(vectors_down=1, vectors_up=1)
    weighting = "uniform"

    class Hyper(base.Hyper):
        option: Literal[1, 2] = base.parameter(2, "how c_i is renewed: 1 full-batch gradient, 2 from the local steps")

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.work = Work(per_step=2, once=2, full_gradients=1 if self.hyper.option == 1 else 0)

    def init_server(self, server: Server) -> None:
        server["c"] = torch.zeros_like(server["x"])

    def broadcast(self, server: Server, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "c": server["c"]}, {"share": server.shares()})

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        y = carry["y"]
        return {"y": ctx.descend(y, ctx.grad(y, batch) - ctx.state["c"] + ctx.shared["c"])}

    def end(self, ctx: Context, carry: Carry) -> Result:
        y, x, c = carry["y"], ctx.start("x"), ctx.state["c"]
        renewed = ctx.full_grad(x) if self.hyper.option == 1 else c - ctx.shared["c"] + (x - y) / (ctx.J * ctx.lr)
        return Result(uploads={"y": mean(y), "dc": total(ctx.given["share"] * (renewed - c))}, state={"c": renewed})

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        server["c"] = server["c"] + sums["dc"]
        server.move(sums["y"])
