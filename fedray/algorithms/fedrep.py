"""FedRep: each client keeps a head of its own, which it trains before the shared representation.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai: Exploiting Shared Representations for Personalized Federated
Learning. ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Work, in_place
from fedray.algorithms.fedper import FedPer
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class FedRep(FedPer):
    """FedPer in two parts: a client makes ``head_steps`` local steps (or ``head_epochs`` epochs) of its own head H
    alone, and then its J local steps of the base B alone, which it sends.

    H_s = H_{s-1} - eta_l g_i(B^r, H_{s-1})_H; B_j = B_{j-1} - eta_l g_i(B_{j-1}, H_S)_B. Symbols as in
    :class:`FedAvg`: g_i is a client's mini-batch gradient, eta_l the clients' learning rate. The steps of the head have
    mini-batches of their own. ``private`` names the layers of the head (the last layer unless set).
    """

    allows_aggregation = True
    paper = "Collins et al., ICML 2021"

    class Hyper(FedPer.Hyper):
        head_steps: int = base.parameter(10, "local steps of the head before those of the base", ge=0)
        head_epochs: int | None = base.parameter(None, "epochs of the head, in place of head_steps", ge=1)

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        steps, epochs = self.hyper.head_steps, self.hyper.head_epochs
        self.work = Work(further=steps) if epochs is None else Work(further_epochs=epochs)

    def begin(self, client: ClientPhase) -> Carry:
        carry, epochs = super().begin(client), self.hyper.head_epochs
        steps = self.hyper.head_steps if epochs is None else None
        if steps == 0:
            return carry
        trained = self.local_steps(client.further(steps, epochs=epochs), carry, self.head_step)
        # the optimizer of the base is another one
        return Carry({"y": trained["y"]})

    @in_place
    def head_step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        head = client.parameters_of(*self.hyper.private)
        return client.optimizer.descend(carry, "y", client.objective.gradient(carry["y"], batch), only=head)

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        base = ~client.parameters_of(*self.hyper.private)
        return client.optimizer.descend(carry, "y", client.objective.gradient(carry["y"], batch), only=base)
