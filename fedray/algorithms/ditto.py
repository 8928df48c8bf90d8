"""Ditto: each client trains a model of its own beside the global one, which it must not leave too far.

T. Li, S. Hu, A. Beirami, V. Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021,
Algorithm 1.
"""

from __future__ import annotations

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Result, Upload, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model


class Ditto(FedAvg):
    """FedAvg, beside which a client of the cohort makes s steps of its own model v_i:
    v <- v - eta_p (g_i(v) + lambda (v - x^r)).

    Symbols as in :class:`FedAvg`: x^r is the server's model as the client has received it, and g_i the client's
    mini-batch gradient. v_i begins with the run's initial model. Its steps have mini-batches of their own, and the
    clients' optimizer with the learning rate eta_p. The personal model is v_i; a client that never took part has x^r.
    """

    allows_aggregation = True
    allows_private = True
    paper = "Li et al., ICML 2021"
    client_models = ("v",)

    class Hyper(base.Hyper):
        lam: float = base.parameter(0.1, "pull of the own model to the global one (lambda)", ge=0)
        personal_lr: float | None = base.parameter(
            None, "learning rate of the own model (eta_p) in all rounds: train.lr", gt=0
        )
        personal_steps: int | None = base.parameter(None, "steps of the own model (s): as many as local steps", ge=1)

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        steps = self.hyper.personal_steps
        self.work = Work(forwards=1, backwards=1, per_step=2) if steps is None else Work(further=steps, once=2 * steps)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        v = client.state["v"]
        if not client.known.all():
            v = Model.where(client.known, v, client.initial_models(per_client=False))
        again = client.further(self.hyper.personal_steps, self.hyper.personal_lr)
        own = self.local_steps(again, Carry({"v": v}), self.personal_step)
        return Result({"y": Upload.weighted_mean(carry["y"])}, state={"v": own["v"]})

    @in_place
    def personal_step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        v = carry["v"]
        pull = self.hyper.lam * (v - client.shared["x"])
        return client.optimizer.descend(carry, "v", client.objective.gradient(v, batch) + pull)

    def personal_model(self, client: ClientPhase) -> Model:
        return Model.where(client.known, client.state["v"], client.start("x"))
