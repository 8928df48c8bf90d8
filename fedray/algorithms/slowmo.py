"""SlowMo: slow momentum at the server, over rounds of a base optimizer.

J. Wang, V. Tantia, N. Ballas, M. Rabbat: SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum.
ICLR 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server import Server


class SlowMo(FedAvg):
    """u <- beta u + (x^r - xbar) / gamma_r; x^{r+1} = x^r - alpha gamma_r u, where gamma_r is the clients' rate eta_l.

    The base optimizer is the clients' SGD with ``train.momentum``, whose buffer is new in every round.
    """

    paper = "Wang et al., ICLR 2020"
    uses_server_lr = False

    class Hyper(base.Hyper):
        beta: float = base.parameter(0.5, "slow momentum (beta)", ge=0, lt=1)
        alpha: float = base.parameter(1.0, "slow learning rate (alpha)", gt=0)

    def init_server(self, server: Server) -> None:
        server["u"] = torch.zeros_like(server["x"])

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        server["u"] = self.hyper.beta * server["u"] + (server["x"] - sums["y"]) / server.lr
        server["x"] = server["x"] - self.hyper.alpha * server.lr * server["u"]
