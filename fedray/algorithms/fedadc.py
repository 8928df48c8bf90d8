"""FedADC: the server momentum, built into the local steps.

E. Ozfatura, K. Ozfatura, D. Gündüz: FedADC: Accelerated Federated Learning with Drift Control. ISIT 2021 (arXiv
2012.09102). The self-distillation of the longer version is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Traffic
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server import Server
from fedray.core.context import Context


class FedADC(FedAvg):
    """mbar = beta_l m / J; y_j = y_{j-1} - eta_l (g_i(y_{j-1}) + mbar); Dbar = (x^r - xbar) / eta_l;
    m <- Dbar + (beta_g - beta_l) m (beta_l m is in Dbar already); x^{r+1} = x^r - alpha eta_l m.

    ``nesterov``: z = y_{j-1} - eta_l mbar; y_j = z - eta_l g_i(z).
    """

    paper = "Ozfatura et al., ISIT 2021"
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1)
    uses_server_lr = False

    class Hyper(base.Hyper):
        beta_g: float = base.parameter(0.9, "global momentum (beta_g)", ge=0, lt=1)
        beta_l: float | None = base.parameter(None, "local momentum (beta_l), at most beta_g; = beta_g", ge=0, lt=1)
        alpha: float = base.parameter(1.0, "server learning rate (alpha)", gt=0)
        variant: Literal["heavyball", "nesterov"] = base.parameter("heavyball", "where the gradient is taken")

        @model_validator(mode="after")
        def _local_at_most_global(self) -> FedADC.Hyper:
            if self.beta_l is not None and self.beta_l > self.beta_g:
                raise ValueError(f"algorithm.beta_l={self.beta_l} must be at most algorithm.beta_g={self.beta_g}")
            return self

    def implied(self, cohort: int, clients: int, steps: int | None) -> Mapping[str, Any]:
        return {"beta_l": self.hyper.beta_g}

    def init_server(self, server: Server) -> None:
        server["m"] = torch.zeros_like(server["x"])

    def broadcast(self, server: Server, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "m": server["m"]})

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        y, mbar = carry["y"], self.hyper.beta_l * ctx.shared["m"] / ctx.J
        if self.hyper.variant == "nesterov":
            z = y - ctx.lr * mbar
            return {"y": ctx.descend(z, ctx.grad(z, batch))}
        return {"y": ctx.descend(y, ctx.grad(y, batch) + mbar)}

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        gathered = (server["x"] - sums["y"]) / server.lr
        server["m"] = gathered + (self.hyper.beta_g - self.hyper.beta_l) * server["m"]
        server["x"] = server["x"] - self.hyper.alpha * server.lr * server["m"]
