"""FedSiam-DA: dual aggregation, with a stop-gradient Siamese pair of the local model and a trained global one.

M. Yang et al.: FedSiam-DA: Dual-aggregated Federated Learning via Siamese Network under Non-IID Data. 2022
(arXiv 2211.09421), eqs. 8-13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, cosine_similarity

from fedray.algorithms import base
from fedray.algorithms.base import Algorithm, Broadcast, Carry, Result, Work, mean, weighted
from fedray.algorithms.server import Server
from fedray.core.context import Context
from fedray.core.model import Outputs


class FedSiamDA(Algorithm):
    """With z the projection of a sample and p the prediction from it, under the local model y (z_k, p_k), a copy w_f of
    the global model (z_f, p_f), and an earlier local model, hist (z_h); sg stops gradients. In each local step
        w_f <- w_f - eta_l grad mu/2 (-cos(p_f, sg z_k))                                        (8)
        y <- y - eta_l grad [f_i(y) + mu (cos(sg z_h, z_k) - 1/2 cos(p_k, sg z_f))]             (9-11)
    where z_f is that of the new w_f, which is discarded after the round. Then w_0 = mean_i y_i (13), and
    x^{r+1} = sum_i D_i y_i / sum_i D_i, D_i = max(0, cos(y_i, w_0)) over what is trained; without ``dual`` it is w_0.

    hist is the local model at the end of the last epoch (or step, or round), the final one of the last participation
    at first; the term is dropped while there is none.
    """

    name = "fedsiam_da"
    paper = "Yang et al., 2022 (arXiv 2211.09421)"
    heads = ("siam",)
    client_models = ("last",)
    weighting = "uniform"
    uses_server_lr = False
    work = Work(forwards=3, backwards=1, predictions=2)

    class Hyper(base.Hyper):
        mu: float = base.parameter(0.1, "weight of the Siamese terms (mu, eq. 11)", ge=0)
        hist: Literal["prev_epoch", "prev_step", "prev_round"] = base.parameter(
            "prev_epoch", "the local model that representations are kept away from"
        )
        dual: bool = base.parameter(True, "aggregate twice, the second time by similarity to the mean")

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        if self.hyper.dual:
            self.phases = ("train", "reweigh")

    def broadcast(self, server: Server, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"]} if phase == "train" else {"w_0": server["x"]})

    def begin(self, ctx: Context) -> Carry:
        x, known = ctx.start("x"), ctx.gap > 0
        w_f = ctx.whole(x)
        # where there is no hist yet, x^r stands in, and the loss leaves it out
        hist = torch.where(known, ctx.state["last"], w_f)
        return {"y": x, "w_f": w_f, "hist": hist, "known": known.float()}

    def step(self, ctx: Context, carry: Carry, batch: Any, j: int) -> Carry:
        mu, y, w_f, hist, known = self.hyper.mu, carry["y"], carry["w_f"], carry["hist"], carry["known"]
        begins = ctx.epoch(j) > ctx.epoch(j - 1)
        if j and self.hyper.hist == "prev_epoch" and begins.any():
            hist, known = torch.where(begins, ctx.whole(y), hist), torch.where(begins, 1, known)

        def attraction(outputs: Outputs, task: Tensor, z_k: Tensor) -> Tensor:
            return -mu / 2 * cosine_similarity(outputs.prediction, z_k, dim=1)

        def loss(outputs: Outputs, task: Tensor, z_h: Tensor, known: Tensor, z_f: Tensor) -> Tensor:
            apart = known * cosine_similarity(z_h, outputs.features, dim=1)
            return task + mu * (apart - cosine_similarity(outputs.prediction, z_f, dim=1) / 2)

        next_hist = ctx.whole(y) if self.hyper.hist == "prev_step" else hist
        local = ctx.train_pass(y, batch)
        w_f = w_f.sub(ctx.grad(w_f, batch, attraction, [local.features]), alpha=ctx.lr)
        z_f, z_h = ctx.forward(w_f, batch.x).features, ctx.forward(hist, batch.x).features
        y = ctx.descend(y, local.grad(loss, [z_h, known, z_f]))
        if self.hyper.hist == "prev_step":
            known = torch.ones_like(known)
        return {"y": y, "w_f": w_f, "hist": next_hist, "known": known}

    def end(self, ctx: Context, carry: Carry) -> Result:
        y = carry["y"]
        return Result({"y": mean(y)}, state={"last": ctx.whole(y)}, kept={"y": y})

    def reweigh(self, ctx: Context) -> Result:
        """The phase ``reweigh``: D_i and the mean that it weighs."""
        y = ctx.kept["y"]
        D = cosine_similarity(y, ctx.shared["w_0"][None], dim=1)[:, None].clamp(min=0)
        return Result({"y": weighted(D, ctx.whole(y))}, scalars={"similarity": D})

    def reduce(
        self, server: Server, phase: str, sums: Mapping[str, Tensor], scalars: Mapping[str, list[float]]
    ) -> None:
        if phase == "reweigh":
            server.client_scalars["similarity"] = scalars["similarity"]
            if sum(scalars["similarity"]) < 1e-12:
                return
        server.move(sums["y"])
