"""APFL: a personal model is a mixture of the global one and one of the client's own.

Y. Deng, M. M. Kamani, M. Mahdavi: Adaptive Personalized Federated Learning. arXiv 2003.13461, 2020, Algorithm 1.
"""

from __future__ import annotations

import torch

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Result, Upload, Work
from fedray.algorithms.fedavg import FedAvg
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model
from fedray.gradients.rows import by_rows


class APFL(FedAvg):
    """FedAvg of w, beside which a client trains a model v of its own, so that their mixture is good:
    vbar = a v + (1 - a) w; w <- w - eta_l g_i(w); v <- v - eta_l a g_i(vbar); if ``adaptive``,
    a <- clip(a - eta_l (v - w)^T g_i(vbar), 0, 1).

    All of a step is computed from the models before it, on the same mini-batch. g_i is a client's mini-batch gradient,
    eta_l the clients' learning rate. w begins with the server's model x^r, v with the run's initial model, and a with
    ``alpha``. A client keeps v and a. The personal model is a v + (1 - a) x^r; a client that never took part has x^r.
    """

    allows_aggregation = True
    allows_private = True
    paper = "Deng et al., arXiv 2003.13461, 2020"
    client_models = ("v",)
    client_numbers = ("a",)
    work = Work(forwards=1, backwards=1, per_step=7)

    class Hyper(base.Hyper):
        alpha: float = base.parameter(0.5, "share of the own model in the mixture (a), at the beginning", ge=0, le=1)
        adaptive: bool = base.parameter(True, "learn the share")

    def begin(self, client: ClientPhase) -> Carry:
        known, v = client.known, client.state["v"]
        if not known.all():
            v = Model.where(known, v, client.initial_models(per_client=False))
        return super().begin(client).update(v=v, a=torch.where(known, client.state["a"], self.hyper.alpha))

    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        w, v, a = carry["y"], carry["v"], carry["a"]
        mixed = mixture(v, w, a)
        g, of_mixed = client.objective.gradient(w, batch), client.objective.gradient(mixed, batch)
        if self.hyper.adaptive:
            slope = by_rows(lambda apart, g: (apart * g).sum(dim=1, keepdim=True), v - w, of_mixed)
            carry = carry.update(a=(a - client.lr * slope).clamp(0, 1))
        carry = client.optimizer.descend(carry, "v", a * of_mixed)
        carry = carry.update(v=carry["v"].with_buffers_of(mixed))
        return client.optimizer.descend(carry, "y", g)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        return Result({"y": Upload.weighted_mean(carry["y"])}, state={"v": carry["v"], "a": carry["a"]})

    def personal_model(self, client: ClientPhase) -> Model:
        x: Model = client.start("x")
        return Model.where(client.known, mixture(client.state["v"], x, client.state["a"]), x)


def mixture(v: Model, w: Model, a: torch.Tensor) -> Model:
    """Returns a v + (1 - a) w for each client, with the running statistics of ``v``. ``a`` is ``[C, 1]``."""
    return w.moved(a * (v - w)).with_buffers_of(v)
