"""FedACG: clients start ahead of the global model, where the server's momentum will lead it.

G. Kim, J. Kim, B. Han: Communication-Efficient Federated Learning with Accelerated Client Gradient. CVPR 2024 (arXiv
2201.03172).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model


class FedACG(FedAvg):
    """FedAvg whose clients start from z, the point to which the server's momentum m will lead, and are pulled to z:
    z = x^r + lambda m; y_j = y_{j-1} - eta_l (g_i(y_{j-1}) + beta (y_{j-1} - z)) from y_0 = z;
    m <- lambda m + mean_i (y_i - z); x^{r+1} = x^r + m = mean_i y_i.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_j a client's model after j local steps, y_i the final
    one of client i, g_i its mini-batch gradient, eta_l the clients' learning rate, and mean_i the weighted mean over
    the cohort. The server sends only z. The model that is evaluated is x.
    """

    paper = "Kim et al., CVPR 2024"
    work = Work(per_step=2)
    uses_server_lr = False
    weighting = "uniform"

    class Hyper(base.Hyper):
        lam: float = base.parameter(0.85, "server momentum (lambda)", ge=0, lt=1)
        beta: float = base.parameter(0.01, "weight of the proximal term (beta)", ge=0)

    def init_server(self, server: ServerState) -> None:
        server["m"] = server["x"].zeros()

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({"z": self._lookahead(server)})

    def begin(self, client: ClientPhase) -> Carry:
        return Carry({"y": client.start("z")})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y, z = carry["y"], client.shared["z"]
        gradient = client.objective.gradient(y, batch) + self.hyper.beta * (y - z)
        return client.optimizer.descend(carry, "y", gradient)

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server["m"] = self.hyper.lam * server["m"] + (sums["y"] - self._lookahead(server))
        server["x"] = sums["y"]

    def _lookahead(self, server: ServerState) -> Model:
        lookahead: Model = server["x"] + self.hyper.lam * server["m"]
        return lookahead
