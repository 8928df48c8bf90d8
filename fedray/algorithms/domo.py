"""DOMO: momentum at the server and at the clients, fused.

A. Xu, H. Huang: Coordinating Momenta for Cross-Silo Federated Learning. AAAI 2022 (arXiv 2102.03970), DOMO and DOMO-S.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from fedray.algorithms import base
from fedray.algorithms.base import Algorithm, Broadcast, Carry, Result, Traffic, Upload
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class DOMO(Algorithm):
    """FedAvg with momentum at clients and server, in which clients start from the model moved along the server's
    momentum:
    l_0 = 0; l_j = mu_l l_{j-1} + g_i(y_{j-1}); y_j = y_{j-1} - eta_l l_j; dbar_i = (1/J) sum_j l_j;
    m <- mu_s m + sum_i p_i dbar_i; x^{r+1} = x^r - alpha eta_l J m.

    l_j is the momentum of a client, with the factor mu_l, and m that of the server, with the factor mu_s. dbar_i, which
    client i sends, is the mean of its l_j. The other symbols are those of :class:`FedAvg`: x^r is the server's model,
    y_j a client's model after j of its J local steps, g_i its mini-batch gradient, p_i its aggregation weight, and
    eta_l the clients' learning rate. alpha is the server's learning rate.

    beta says how far clients move along the server's momentum. They start from y_0 = x^r - beta eta_l J m (``variant:
    pre``, DOMO), or start from x^r and subtract eta_l beta m in every step (``variant: step``, DOMO-S). If clients make
    different numbers of steps, J stands for J_i in client i's formulas, and for the mean sum_i p_i J_i in the server's.
    """

    paper = "Xu and Huang, AAAI 2022"
    sends_updates = False
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1)
    uses_server_lr = False

    class Hyper(base.Hyper):
        mu_s: float = base.parameter(0.9, "server momentum (mu_s)", ge=0, lt=1)
        mu_l: float = base.parameter(0.9, "local momentum (mu_l)", ge=0, lt=1)
        alpha: float = base.parameter(1.0, "server learning rate (alpha)", gt=0)
        beta: float = base.parameter(0.9, "fusion coefficient (beta)", ge=0)
        variant: Literal["pre", "step"] = base.parameter("pre", "pre: DOMO; step: DOMO-S")

    def init_server(self, server: ServerState) -> None:
        server["m"] = server["x"].zeros()

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "m": server["m"]})

    def begin(self, client: ClientPhase) -> Carry:
        x, m = client.start("x"), client.start("m")
        y = x - self.hyper.beta * client.lr * client.J * m if self.hyper.variant == "pre" else x
        return Carry({"y": y, "l": torch.zeros_like(m), "total": torch.zeros_like(m)})

    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y = carry["y"]
        g, carry = client.optimizer.direction(carry, "y", client.objective.gradient(y, batch))
        l = self.hyper.mu_l * carry["l"] + g
        direction = l + self.hyper.beta * client.shared["m"] if self.hyper.variant == "step" else l
        return carry.update(y=y - client.lr * direction, l=l, total=carry["total"] + l)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        # dbar_i is sent in place of the parameters of y_i, together with the buffers of y_i
        return Result(uploads={"d": Upload.weighted_mean(carry["y"].with_parameters(carry["total"] / client.J))})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        steps = sum(p * J for p, J in zip(server.cohort.weights, server.cohort.steps, strict=True))
        server["m"] = self.hyper.mu_s * server["m"] + sums["d"].parameters
        x = server["x"].with_buffers_of(sums["d"])
        server["x"] = x - self.hyper.alpha * server.lr * steps * server["m"]
