"""Per-FedAvg: the global model is one from which a gradient step leads to a good personal model.

A. Fallah, A. Mokhtari, A. Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach. NeurIPS 2020, Algorithm 1 in the first-order variant (FO).
"""

from __future__ import annotations

import torch

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Work
from fedray.algorithms.fedavg import FedAvg
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model


class PerFedAvg(FedAvg):
    """FedAvg of first-order meta-learning: of two mini-batches b1 and b2 that follow each other the first gives the
    personal model y', and the second the step of y: y' = y - alpha g_i(y; b1); y <- y - eta_l g_i(y'; b2).

    Symbols as in :class:`FedAvg`: y is a client's local model, g_i its gradient on a mini-batch, G_i on all samples. So
    2 J local steps are J steps of y; a last mini-batch without a partner is used twice. The personal model is
    x^r - alpha G_i(x^r); ``run.finetune_steps`` scores further steps.
    """

    allows_aggregation = True
    allows_private = True
    paper = "Fallah et al., NeurIPS 2020"
    work = Work(per_step=1)

    class Hyper(base.Hyper):
        alpha: float = base.parameter(0.01, "step to the personal model (alpha)", ge=0)

    def begin(self, client: ClientPhase) -> Carry:
        return super().begin(client).update(near=client.start("x"))

    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        if batch.step % 2:
            return self._descend(client, carry, batch)
        y = carry["y"]
        carry = carry.update(near=y.moved(client.objective.gradient(y, batch), -self.hyper.alpha))
        alone = torch.eq(client.J, batch.step + 1)
        if not alone.any():
            return carry
        # the others go on with what they have
        last = self._descend(client, carry.update(near=carry["near"].clone()), batch)
        made = Carry.where(alone, last, carry)
        return made.remember("y", made.memory("y").buffers, carry.memory("y").steps)

    def _descend(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        near = carry["near"]
        carry = client.optimizer.descend(carry, "y", client.objective.gradient(near, batch))
        return carry.update(y=carry["y"].with_buffers_of(near))

    def personal_model(self, client: ClientPhase) -> Model:
        x: Model = client.start("x")
        return x.moved(client.objective.full_gradient(x), -self.hyper.alpha)
