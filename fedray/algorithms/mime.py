"""Mime and MimeLite: server statistics that are frozen while clients train, with and without a control variate.

S. P. Karimireddy, M. Jaggi, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: Breaking the centralized barrier
for cross-device federated learning. NeurIPS 2021 (arXiv 2008.03606).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Traffic, Work, mean
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server import Server
from fedray.core.context import Context


class MimeLite(FedAvg):
    """y_j = y_{j-1} - eta_l ((1 - beta) g_i(y_{j-1}) + beta s) with s frozen; then c = sum_i p_i G_i(x^r), the
    full-batch gradients, s <- (1 - beta) c + beta s, x^{r+1} = x^r - eta_g (x^r - xbar). MimeLite proper is beta = 0.

    Without ``dampening`` the factors (1 - beta) are 1, as in torch's momentum.
    """

    paper = "Karimireddy et al., NeurIPS 2021"
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1, vectors_up=1)
    work = Work(full_gradients=1)
    weighting = "uniform"
    beta = 0.0
    dampening = True

    def init_server(self, server: Server) -> None:
        server["s"] = torch.zeros_like(server["x"])

    def broadcast(self, server: Server, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "s": server["s"]})

    def momentum(self, fresh: Tensor, s: Tensor) -> Tensor:
        """U of the paper: the fresh gradient mixed into the statistics s."""
        return (1 - self.beta if self.dampening else 1.0) * fresh + self.beta * s

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        y = carry["y"]
        return {"y": ctx.descend(y, self.momentum(ctx.grad(y, batch), ctx.shared["s"]))}

    def end(self, ctx: Context, carry: Carry) -> Result:
        return Result(uploads={"y": mean(carry["y"]), "c": mean(ctx.full_grad(ctx.start("x")))})

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        server["s"] = self.momentum(sums["c"], server["s"])
        server.move(sums["y"])


class Mime(MimeLite):
    """As MimeLite, with the gradient corrected on the same mini-batch: g_i(y_{j-1}) - g_i(x^r) + c.

    c is needed before training, so the full-batch gradients are a phase of their own.
    """

    phases = ("gradients", "train")
    traffic = Traffic(vectors_down=2, vectors_up=1)
    work = Work(forwards=1, backwards=1, full_gradients=1)
    # 2.5 by content, but in two exchanges
    ghbm_overhead = 3.0

    def broadcast(self, server: Server, phase: str) -> Broadcast:
        names = ("x",) if phase == "gradients" else ("x", "s", "c")
        return Broadcast({name: server[name] for name in names})

    def gradients(self, ctx: Context) -> Result:
        """The phase ``gradients``: G_i(x^r)."""
        return Result(uploads={"c": mean(ctx.full_grad(ctx.start("x")))})

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        y, x = carry["y"], ctx.start("x")
        corrected = ctx.grad(y, batch) - ctx.grad(x, batch, keep_buffers=True) + ctx.shared["c"]
        return {"y": ctx.descend(y, self.momentum(corrected, ctx.shared["s"]))}

    def end(self, ctx: Context, carry: Carry) -> Result:
        return Result(uploads={"y": mean(carry["y"])})

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        if phase == "gradients":
            server["c"] = sums["c"]
        else:
            super().reduce(server, phase, {"y": sums["y"], "c": server["c"]}, scalars)


class MomentumHyper(base.Hyper):
    """Hyper-parameters of the variants with momentum."""

    beta: float = base.parameter(0.9, "momentum (beta)", ge=0, lt=1)
    dampening: bool = base.parameter(True, "U = (1 - beta) g + beta s as in the paper, else g + beta s")


class MimeLiteMom(MimeLite):
    """MimeLite with momentum."""

    Hyper = MomentumHyper

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.beta, self.dampening = self.hyper.beta, self.hyper.dampening


class MimeMom(Mime):
    """Mime with momentum."""

    Hyper = MomentumHyper

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.beta, self.dampening = self.hyper.beta, self.hyper.dampening
