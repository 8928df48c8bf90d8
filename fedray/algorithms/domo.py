"""DOMO: momentum at the server and at the clients, fused.

A. Xu, H. Huang: Coordinating Momenta for Cross-Silo Federated Learning. AAAI 2022 (arXiv 2102.03970), DOMO and DOMO-S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Algorithm, Broadcast, Carry, Result, Traffic, mean
from fedray.algorithms.server import Server
from fedray.core.context import Context


class DOMO(Algorithm):
    """l_0 = 0; l_j = mu_l l_{j-1} + g_i(y_{j-1}); y_j = y_{j-1} - eta_l l_j; dbar_i = (1/J) sum_j l_j;
    m <- mu_s m + sum_i p_i dbar_i; x^{r+1} = x^r - alpha eta_l J m.

    ``pre`` (DOMO) starts from y_0 = x^r - beta eta_l J m; ``step`` (DOMO-S) from x^r, with eta_l beta m in every step.
    Where J_i differ, J is the client's own at the client and sum_i p_i J_i at the server.
    """

    paper = "Xu and Huang, AAAI 2022"
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1)
    uses_server_lr = False

    class Hyper(base.Hyper):
        mu_s: float = base.parameter(0.9, "server momentum (mu_s)", ge=0, lt=1)
        mu_l: float = base.parameter(0.9, "local momentum (mu_l)", ge=0, lt=1)
        alpha: float = base.parameter(1.0, "server learning rate (alpha)", gt=0)
        beta: float = base.parameter(0.9, "fusion coefficient (beta)", ge=0)
        variant: Literal["pre", "step"] = base.parameter("pre", "pre: DOMO; step: DOMO-S")

    def init_server(self, server: Server) -> None:
        server["m"] = torch.zeros_like(server["x"])

    def broadcast(self, server: Server, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "m": server["m"]})

    def begin(self, ctx: Context) -> Carry:
        x, m = ctx.start("x"), ctx.start("m")
        y = x - self.hyper.beta * ctx.lr * ctx.J * m if self.hyper.variant == "pre" else x
        return {"y": y, "l": torch.zeros_like(m), "total": torch.zeros_like(m)}

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        y = carry["y"]
        l = self.hyper.mu_l * carry["l"] + ctx.assemble(y, ctx.grad(y, batch))
        direction = l + self.hyper.beta * ctx.shared["m"] if self.hyper.variant == "step" else l
        return {"y": y - ctx.lr * direction, "l": l, "total": carry["total"] + l}

    def end(self, ctx: Context, carry: Carry) -> Result:
        return Result(uploads={"d": mean(carry["total"] / ctx.J)})

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        steps = sum(p * J for p, J in zip(server.cohort.weights, server.cohort.steps, strict=True))
        server["m"] = self.hyper.mu_s * server["m"] + sums["d"]
        server["x"] = server["x"] - self.hyper.alpha * server.lr * steps * server["m"]
