"""pFedMe: personal models are near the local ones, by Moreau envelopes.

C. T. Dinh, N. H. Tran, T. D. Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedray.algorithms import base
from fedray.algorithms.base import Algorithm, Carry, Result, Upload, Work
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model


class PFedMe(Algorithm):
    """A local step of w_i minimises the loss of a personal model theta_i near it on one mini-batch, by K steps, and
    goes towards it: theta <- theta - eta_p (g_i(theta) + lambda (theta - w)), K times;
    w <- w - eta_l lambda (w - theta); x^{r+1} = (1 - beta) x^r + beta sum_i p_i w_i.

    Symbols as in :class:`FedAvg`: x^r is the server's model, with which w and theta begin, g_i a client's mini-batch
    gradient, p_i its aggregation weight. In a step theta begins where the step before has left it; its steps are those
    of the clients' optimizer. The personal model is the last theta_i; a client that never took part has x^r.
    """

    allows_aggregation = True
    allows_private = True
    paper = "Dinh et al., NeurIPS 2020"
    client_models = ("theta",)
    uses_server_lr = False
    any_optimizer = True

    class Hyper(base.Hyper):
        lam: float = base.parameter(15.0, "how near personal models are (lambda)", gt=0)
        inner_steps: int = base.parameter(5, "steps to a personal model (K)", ge=1)
        personal_lr: float | None = base.parameter(
            None, "learning rate of these steps (eta_p) in all rounds: train.lr", gt=0
        )
        beta: float = base.parameter(1.0, "how far the server goes to the clients' mean (beta)", gt=0)

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        more = self.hyper.inner_steps - 1
        self.work = Work(forwards=more, backwards=more, per_step=2 * self.hyper.inner_steps + 2)

    def begin(self, client: ClientPhase) -> Carry:
        return Carry({"w": client.start("x"), "theta": client.start("x")})

    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        w, lam = carry["w"], self.hyper.lam
        for _ in range(self.hyper.inner_steps):
            theta = carry["theta"]
            pulled = client.objective.gradient(theta, batch) + lam * (theta - w)
            direction, carry = client.optimizer.direction(carry, "theta", pulled)
            carry = carry.update(theta=theta.moved(direction, -(self.hyper.personal_lr or client.lr)))
        theta = carry["theta"]
        return carry.update(w=w.moved(w - theta, -client.lr * lam).with_buffers_of(theta))

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        return Result({"y": Upload.weighted_mean(carry["w"])}, state={"theta": carry["theta"]})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server["x"] = server["x"].lerp(sums["y"], self.hyper.beta)

    def personal_model(self, client: ClientPhase) -> Model:
        return Model.where(client.known, client.state["theta"], client.start("x"))
