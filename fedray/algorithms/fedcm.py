"""FedCM: client-level momentum from the last round.

J. Xu, S. Wang, L. Wang, A. C.-C. Yao: FedCM: Federated Learning with Client-level Momentum. arXiv 2106.10874, 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Traffic, mean
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server import Server
from fedray.core.context import Context


class FedCM(FedAvg):
    """y_j = y_{j-1} - eta_l (alpha g_i(y_{j-1}) + (1 - alpha) Delta); Delta <- mean_i (x^r - y_i) / (J_i eta_l), of the
    last cohort alone; x^{r+1} = x^r - eta_g (x^r - xbar), where the paper's eta_g is ours times J eta_l.
    """

    paper = "Xu et al. 2021, arXiv 2106.10874"
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1)
    weighting = "uniform"

    class Hyper(base.Hyper):
        alpha: float = base.parameter(0.1, "share of the fresh gradient (alpha)", gt=0, le=1)

    def init_server(self, server: Server) -> None:
        server["delta"] = torch.zeros_like(server["x"])

    def broadcast(self, server: Server, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "delta": server["delta"]})

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        y, alpha = carry["y"], self.hyper.alpha
        return {"y": ctx.descend(y, alpha * ctx.grad(y, batch) + (1 - alpha) * ctx.shared["delta"])}

    def end(self, ctx: Context, carry: Carry) -> Result:
        y = carry["y"]
        return Result(uploads={"y": mean(y), "delta": mean((ctx.shared["x"] - y) / (ctx.J * ctx.lr))})

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        server["delta"] = sums["delta"]
        server.move(sums["y"])
