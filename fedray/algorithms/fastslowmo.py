"""FastSlowMo: Nesterov momentum at the workers and at the aggregator.

Z. Yang, J. Fu, W. Bao, D. Yuan, A. Y. Zomaya: FastSlowMo: Federated Learning With Combined Worker and Aggregator
Momenta. IEEE Transactions on Artificial Intelligence 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.fednag import FedNAG
from fedray.algorithms.server import Server


class FastSlowMo(FedNAG):
    """Workers as in FedNAG; y_new = xbar; x^{r+1} = y_new + gamma_a (y_new - y_srv); y_srv <- y_new, from y_srv = x^1.

    What the workers' momentum is after the server's jump is a matter of representation: the paper's notation carries
    ybar (``carry: y``); carrying the velocity instead (v = (xbar - ybar) / gamma) is another algorithm.
    """

    paper = "Yang, Fu et al., IEEE TAI 2022"

    class Hyper(base.Hyper):
        gamma: float = base.parameter(0.5, "worker momentum (gamma)", ge=0, lt=1)
        gamma_a: float = base.parameter(0.5, "aggregator momentum (gamma_a)", ge=0, lt=1)
        carry: Literal["y", "velocity"] = base.parameter("y", "what the workers keep over the server's jump")

    def init_server(self, server: Server) -> None:
        super().init_server(server)
        server["y_srv"] = server["x"].clone()

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        server["x"] = sums["x"] + self.hyper.gamma_a * (sums["x"] - server["y_srv"])
        server["y_srv"] = sums["x"]
        server["y"] = sums["y"] if self.hyper.carry == "y" else server["x"] - (sums["x"] - sums["y"])
