"""FedNAG: Nesterov accelerated gradient at the clients, model and momentum averaged.

Z. Yang, W. Bao, D. Yuan, N. H. Tran, A. Y. Zomaya: Federated Learning with Nesterov Accelerated Gradient. TPDS 2022
(arXiv 2009.08716); the same rules stand as eqs. 6-7 in the paper of pFedMo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Algorithm, Broadcast, Carry, Result, Traffic, mean
from fedray.algorithms.server import Server
from fedray.core.context import Context


class FedNAG(Algorithm):
    """y_t = x_{t-1} - eta g_i(x_{t-1}); x_t = y_t + gamma (y_t - y_{t-1}); the server averages x and y, and sends both.

    Under partial participation a client that was not sampled simply receives both when it next is.
    """

    paper = "Yang et al., TPDS 2022"
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1, vectors_up=1)
    uses_server_lr = False

    class Hyper(base.Hyper):
        gamma: float = base.parameter(0.5, "momentum factor (gamma, eq. 7)", ge=0, lt=1)

    def init_server(self, server: Server) -> None:
        server["y"] = server["x"].clone()

    def broadcast(self, server: Server, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "y": server["y"]})

    def begin(self, ctx: Context) -> Carry:
        return {"x": ctx.start("x"), "y": ctx.start("y")}

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        y = ctx.descend(carry["x"], ctx.grad(carry["x"], batch))
        return {"x": y + self.hyper.gamma * (y - carry["y"]), "y": y}

    def end(self, ctx: Context, carry: Carry) -> Result:
        return Result(uploads={"x": mean(carry["x"]), "y": mean(carry["y"])})

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        server["x"], server["y"] = sums["x"], sums["y"]
