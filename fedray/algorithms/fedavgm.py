"""FedAvgM: FedAvg with momentum at the server.

T.-M. H. Hsu, H. Qi, M. Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification. arXiv 1909.06335, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server import Server


class FedAvgM(FedAvg):
    """d = x^r - xbar; v <- beta v + d; x^{r+1} = x^r - eta_g v, or x^r - eta_g (d + beta v) with ``nesterov``."""

    paper = "Hsu et al. 2019, arXiv 1909.06335"

    class Hyper(base.Hyper):
        beta: float = base.parameter(0.9, "server momentum (beta)", ge=0, lt=1)
        nesterov: bool = base.parameter(False, "Nesterov's form")

    def init_server(self, server: Server) -> None:
        server["v"] = torch.zeros_like(server["x"])

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        d = server["x"] - sums["y"]
        server["v"] = self.hyper.beta * server["v"] + d
        step = d + self.hyper.beta * server["v"] if self.hyper.nesterov else server["v"]
        server["x"] = server["x"] - server.server_lr * step
