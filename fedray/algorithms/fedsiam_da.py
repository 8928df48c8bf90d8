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
from fedray.algorithms.base import Algorithm, Broadcast, Carry, Result, Upload, Work, in_place
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model
from fedray.gradients.passes import Outputs


class FedSiamDA(Algorithm):
    """Clients train with a Siamese loss, which compares representations of their model with those of the global model
    and of an earlier local model; the server averages twice.
    z is the projection of a sample, and p the prediction from it: z_k, p_k under the local model y; z_f, p_f under w_f,
    a copy of the global model; z_h under hist, an earlier local model. No gradient flows through sg. In each local step
        w_f <- w_f - eta_l grad mu/2 (-cos(p_f, sg z_k))                                        (8)
        y <- y - eta_l grad [f_i(y) + mu (cos(sg z_h, z_k) - 1/2 cos(p_k, sg z_f))]             (9-11)
    where z_f is computed with the new w_f. The client discards w_f after the round. Then w_0 = mean_i y_i (13), and
    x^{r+1} = sum_i D_i y_i / sum_i D_i, D_i = max(0, cos(y_i, w_0)) over the trained parameters.
    With ``dual: false``, x^{r+1} is w_0.

    The numbers in parentheses are those of the paper's equations. As in :class:`FedAvg`, x^r is the server's model, y_i
    the final model of client i, f_i its loss, mean_i the weighted mean over the cohort, and eta_l the clients' learning
    rate.

    The key ``hist`` says which earlier local model hist is: y at the end of the previous epoch (``prev_epoch``), y
    before the previous local step (``prev_step``), or the client's final model of its last participation
    (``prev_round``). That final model is also used in the first epoch or step of a round, where the other two do not
    exist. If the client takes part for the first time, there is no final model either; the term with z_h is then left
    out.
    """

    name = "fedsiam_da"
    paper = "Yang et al., 2022 (arXiv 2211.09421)"
    needs_head = "prediction"
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
        # a client's one upload counts in both sums, and its similarity is that of its model as it is
        self.sends_updates = not self.hyper.dual

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"]} if phase == "train" else {"w_0": server["x"]})

    def begin(self, client: ClientPhase) -> Carry:
        x, known = client.start("x"), client.gap > 0
        w_f = client.start("x")
        # if there is no hist yet, x^r takes its place, and the loss ignores it
        hist = Model.where(known, client.state["last"], w_f)
        return Carry({"y": x, "w_f": w_f, "hist": hist, "known": known.float()})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        mu: float = self.hyper.mu
        y, w_f, hist, known = carry["y"], carry["w_f"], carry["hist"], carry["known"]
        begins = client.data.begins_epoch(batch.step)
        if batch.step and self.hyper.hist == "prev_epoch" and begins.any():
            hist, known = Model.where(begins, y, hist), torch.where(begins, 1, known)

        def attraction(outputs: Outputs, task: Tensor, z_k: Tensor) -> Tensor:
            return -mu / 2 * cosine_similarity(outputs.prediction, z_k, dim=1)

        def loss(outputs: Outputs, task: Tensor, z_h: Tensor, known: Tensor, z_f: Tensor) -> Tensor:
            apart = known * cosine_similarity(z_h, outputs.features, dim=1)
            return task + mu * (apart - cosine_similarity(outputs.prediction, z_f, dim=1) / 2)

        next_hist = y.clone() if self.hyper.hist == "prev_step" else hist
        local = client.objective.training_pass(y, batch)
        w_f = w_f.moved(client.objective.gradient(w_f, batch, attraction, [local.features]), -client.lr)
        z_f, z_h = client.objective.forward(w_f, batch.x).features, client.objective.forward(hist, batch.x).features
        carry = client.optimizer.descend(carry, "y", local.gradient(loss, [z_h, known, z_f]))
        if self.hyper.hist == "prev_step":
            known = torch.ones_like(known)
        return carry.update(w_f=w_f, hist=next_hist, known=known)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        y = carry["y"]
        return Result({"y": Upload.weighted_mean(y)}, state={"last": y}, kept={"y": y})

    def reweigh(self, client: ClientPhase) -> Result:
        """Runs the second phase of a round, in which the server averages the clients' models a second time. Returns the
        uploads of a stack of C clients: their models y_i ``[C, ...]``, with the weights D_i ``[C, 1]``, which are the
        models' similarities to the first average."""
        y = client.kept["y"]
        D = cosine_similarity(y.parameters, client.shared["w_0"].parameters[None], dim=1)[:, None].clamp(min=0)
        return Result({"y": Upload.mean_by(D, y)}, scalars={"similarity": D})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        if phase == "reweigh":
            server.client_scalars["similarity"] = scalars["similarity"]
            if sum(scalars["similarity"]) < 1e-12:
                return
        server.move(sums["y"])
