"""FedDyn: a dynamic regulariser that aligns the clients with the global optimum.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama: Federated Learning Based on Dynamic
Regularization. ICLR 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Result, Work, mean, total
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server import Server
from fedray.core.context import Context


class FedDyn(FedAvg):
    """y_j = y_{j-1} - eta_l (g_i(y_{j-1}) - gstate_i + alpha (y_{j-1} - x^r));
    gstate_i <- gstate_i - alpha (y_J - x^r); h <- h - (alpha/N) sum_S (y_i - x^r); x^{r+1} = mean_S y_i - h/alpha.

    Kept as q_i = -gstate_i / alpha and q = -h / alpha = mean_i q_i, the sums of what was moved: no division by alpha.
    """

    paper = "Acar et al., ICLR 2021"
    assumes_plain_sgd = True
    client_state = ("q",)
    work = Work(per_step=4)
    weighting = "uniform"
    uses_server_lr = False

    class Hyper(base.Hyper):
        alpha: float = base.parameter(0.01, "weight of the regulariser (alpha)", gt=0)
        eval: Literal["server", "avg_selected"] = base.parameter("server", "the evaluated model: x, or mean_S y_i")

    def init_server(self, server: Server) -> None:
        server["q"] = torch.zeros_like(server["x"])
        server["mean"] = server["x"].clone()

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        y, x, q = carry["y"], ctx.shared["x"], ctx.state["q"]
        return {"y": ctx.descend(y, ctx.grad(y, batch) + self.hyper.alpha * (y - x + q))}

    def end(self, ctx: Context, carry: Carry) -> Result:
        moved = carry["y"] - ctx.shared["x"]
        return Result(uploads={"y": mean(carry["y"]), "moved": total(moved)}, state={"q": ctx.state["q"] + moved})

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        server["q"] = server["q"] + sums["moved"] / server.N
        server["mean"] = sums["y"]
        server["x"] = sums["y"] + server["q"]

    def eval_model(self, server: Server) -> Tensor:
        return server["mean"] if self.hyper.eval == "avg_selected" else server["x"]

    def monitors(self, server: Server) -> Mapping[str, Tensor]:
        """The one of the two models that is not evaluated: the authors' code reports both."""
        return {"server": server["x"]} if self.hyper.eval == "avg_selected" else {"averaged": server["mean"]}
