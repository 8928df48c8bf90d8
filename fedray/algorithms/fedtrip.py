"""FedTrip: a triplet of models: near the global one, away from the own last one.

X. Li, M. Liu, S. Sun, Y. Wang, H. Jiang, X. Jiang: FedTrip: A Resource-Efficient Federated Learning Method with Triplet
Regularization. IPDPS 2023 (arXiv 2304.05824), eq. 5 and Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Result, Work, mean
from fedray.algorithms.fedavg import FedAvg
from fedray.core.context import Context


class FedTrip(FedAvg):
    """Local loss f_i(y) + (mu/2) (||y - x^r||^2 - xi ||y - w_i||^2), w_i the own final model of the last participation:
    gradient g_i + mu ((y - x^r) + xi (w_i - y)); xi = 0 at the first participation.

    The paper says in its text that xi is the interval between participations, but its theory (E[xi] = p ln p / (p - 1),
    xi in (0, 1]) is that of one over it, which is the default; the literal reading can diverge.
    """

    paper = "Li et al., IPDPS 2023"
    client_state = ("w",)
    work = Work(per_step=4)

    class Hyper(base.Hyper):
        mu: float = base.parameter(0.4, "weight of the triplet term (mu, eq. 5)", ge=0)
        xi_scale: float = base.parameter(1.0, "factor on xi", ge=0)
        xi_mode: Literal["inverse_gap", "gap", "const"] = base.parameter("inverse_gap", "what xi is")
        xi_const: float = base.parameter(1.0, "xi under xi_mode: const", ge=0)

    def advice(self, momentum: float, cohort: int, clients: int, server_lr: float) -> Iterator[str]:
        if self.hyper.xi_mode == "gap":
            yield "algorithm.xi_mode=gap: a client that was away pushes with xi > 1, which can diverge"

    def _xi(self, ctx: Context) -> Tensor:
        modes = {
            "inverse_gap": 1 / ctx.gap.clamp(min=1),
            "gap": ctx.gap,
            "const": torch.full_like(ctx.gap, self.hyper.xi_const),
        }
        return torch.where(ctx.gap > 0, self.hyper.xi_scale * modes[self.hyper.xi_mode], 0)

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        y, x, w = carry["y"], ctx.shared["x"], ctx.state["w"]
        return {"y": ctx.descend(y, ctx.grad(y, batch) + self.hyper.mu * ((y - x) + self._xi(ctx) * (w - y)))}

    def end(self, ctx: Context, carry: Carry) -> Result:
        return Result(uploads={"y": mean(carry["y"])}, state={"w": carry["y"]})
