"""FedExP: the server's step is the larger, the more the clients' updates differ.

D. Jhunjhunwala, S. Wang, G. Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation. ICLR 2023, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Result, Work
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.vectors import Model
from fedray.gradients.rows import squared_norms


class FedExP(FedAvg):
    """FedAvg whose server learning rate follows from the updates, as in projections onto convex sets:
    D_i = x^r - y_i; D = sum_i p_i D_i; eta_g = max(1, sum_i p_i ||D_i||^2 / (2 (||D||^2 + eps)));
    x^{r+1} = x^r - eta_g D.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_i a client's final model, p_i its aggregation weight.
    The iterates of a long step may swing, so what is deployed and evaluated is the mean of the last two, x^{r+1} and
    x^r (``average_last``).
    """

    paper = "Jhunjhunwala et al., ICLR 2023"
    uses_server_lr = False
    sends_numbers = True
    work = Work(once=3)

    class Hyper(base.Hyper):
        eps: float = base.parameter(1e-3, "keeps the step finite where updates cancel out (eps)", ge=0)
        average_last: bool = base.parameter(True, "evaluate and save the mean of the last two models")

    def init_server(self, server: ServerState) -> None:
        server["before"] = server["x"]

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        uploads = super().end(client, carry).uploads
        return Result(uploads, scalars={"square": squared_norms(carry["y"] - client.shared["x"])})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        mean = math.fsum(p * square for p, square in zip(server.cohort.weights, scalars["square"], strict=True))
        whole = 2 * (float(squared_norms((server["x"] - sums["y"])[None])) + self.hyper.eps)
        server["before"], x = server["x"], server["x"]
        server["x"] = x.lerp(sums["y"], max(1.0, mean / whole) if whole else 1.0)

    def eval_model(self, server: ServerState) -> Model:
        x: Model = server["x"]
        return server["before"].lerp(x, 0.5) if self.hyper.average_last else x
