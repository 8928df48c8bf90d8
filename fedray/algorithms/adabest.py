"""AdaBest: drift estimates that decay while a client is away.

F. Varno, M. Saghayi, L. Rafiee Sevyeri, S. Gupta, S. Matwin, M. Havaei: AdaBest: Minimizing Client Drift in Federated
Learning via Adaptive Bias Estimation. ECCV 2022 (arXiv 2204.13170).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Result, Work, mean
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server import Server
from fedray.core.context import Context


class AdaBest(FedAvg):
    """y_j = y_{j-1} - eta_l (g_i(y_{j-1}) - h_i); h_i <- h_i / gap_i + mu (x^r - y_J);
    h = beta (xbar_prev - xbar); x^{r+1} = xbar - h; xbar_prev <- xbar, from xbar_prev = x^1.

    ``mu_scaling: fedsim`` divides mu by the mini-batches of an epoch, as the authors' code does.
    """

    paper = "Varno et al., ECCV 2022"
    assumes_plain_sgd = True
    client_state = ("h",)
    work = Work(per_step=2)
    weighting = "uniform"
    uses_server_lr = False

    class Hyper(base.Hyper):
        mu: float = base.parameter(0.1, "weight of the drift estimate (mu)", ge=0)
        beta: float = base.parameter(0.85, "server momentum (beta)", ge=0, lt=1)
        mu_scaling: Literal["paper", "fedsim"] = base.parameter("paper", "what mu is a multiple of")

    def init_server(self, server: Server) -> None:
        server["xbar"] = server["x"].clone()

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        return {"y": ctx.descend(carry["y"], ctx.grad(carry["y"], batch) - ctx.state["h"])}

    def end(self, ctx: Context, carry: Carry) -> Result:
        mu = self.hyper.mu / ctx.epoch_steps() if self.hyper.mu_scaling == "fedsim" else self.hyper.mu
        h = ctx.state["h"] / ctx.gap.clamp(min=1) + mu * (ctx.shared["x"] - carry["y"])
        return Result(uploads={"y": mean(carry["y"])}, state={"h": h})

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        server["x"] = sums["y"] - self.hyper.beta * (server["xbar"] - sums["y"])
        server["xbar"] = sums["y"]

    def monitors(self, server: Server) -> Mapping[str, Tensor]:
        """The clients' average xbar, which the authors' code deploys beside x."""
        return {"averaged": server["xbar"]}
