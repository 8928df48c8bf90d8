"""FedADC: the server's momentum is part of the clients' local steps.

E. Ozfatura, K. Ozfatura, D. Gündüz: FedADC: Accelerated Federated Learning with Drift Control. ISIT 2021 (arXiv
2012.09102). The self-distillation of the paper's longer version is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Traffic, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class FedADC(FedAvg):
    """FedAvg whose clients add the server's momentum m to their local steps:
    mbar = beta_l m / J; y_j = y_{j-1} - eta_l (g_i(y_{j-1}) + mbar); Dbar = (x^r - xbar) / eta_l;
    m <- Dbar + (beta_g - beta_l) m (beta_l m is in Dbar already); x^{r+1} = x^r - alpha eta_l m.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_j a client's model after j of its J local steps, g_i its
    mini-batch gradient, xbar the weighted mean of the clients' final models, and eta_l the clients' learning rate. mbar
    is the part of the momentum that is added in each local step, and Dbar the clients' mean update in units of a
    gradient. beta_l and beta_g are the momentum factors of clients and server, and alpha is the server's learning rate.
    With ``variant: nesterov``, the local step is z = y_{j-1} - eta_l mbar; y_j = z - eta_l g_i(z).
    """

    paper = "Ozfatura et al., ISIT 2021"
    any_optimizer = False
    assumes_plain_sgd = True
    traffic = Traffic(vectors_down=1)
    uses_server_lr = False

    class Hyper(base.Hyper):
        beta_g: float = base.parameter(0.9, "global momentum (beta_g)", ge=0, lt=1)
        beta_l: float | None = base.parameter(None, "local momentum (beta_l), at most beta_g; = beta_g", ge=0, lt=1)
        alpha: float = base.parameter(1.0, "server learning rate (alpha)", gt=0)
        variant: Literal["heavyball", "nesterov"] = base.parameter("heavyball", "where the gradient is taken")

        @model_validator(mode="after")
        def _local_at_most_global(self) -> FedADC.Hyper:
            if self.beta_l is not None and self.beta_l > self.beta_g:
                raise ValueError(f"algorithm.beta_l={self.beta_l} must be at most algorithm.beta_g={self.beta_g}")
            return self

    def resolved_defaults(self, cohort: int, clients: int, steps: int | None) -> Mapping[str, Any]:
        return {"beta_l": self.hyper.beta_g}

    def init_server(self, server: ServerState) -> None:
        server["m"] = server["x"].zeros()

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({"x": server["x"], "m": server["m"]})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y, mbar = carry["y"], self.hyper.beta_l * client.shared["m"] / client.J
        if self.hyper.variant == "nesterov":
            z = y - client.lr * mbar
            return client.optimizer.descend(carry.update(y=z), "y", client.objective.gradient(z, batch))
        return client.optimizer.descend(carry, "y", client.objective.gradient(y, batch) + mbar)

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        x = server["x"].with_buffers_of(sums["y"])
        gathered = (x - sums["y"]) / server.lr
        server["m"] = gathered + (self.hyper.beta_g - self.hyper.beta_l) * server["m"]
        server["x"] = x - self.hyper.alpha * server.lr * server["m"]
