"""FedAvg: local SGD, averaged.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedray.algorithms.base import Algorithm, Carry, Result, Upload, in_place
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch


class FedAvg(Algorithm):
    """y_j = y_{j-1} - eta_l g_i(y_{j-1}) from y_0 = x^r; x^{r+1} = x^r - eta_g (x^r - sum_i p_i y_i)."""

    paper = "McMahan et al., AISTATS 2017"
    any_optimizer = True

    def begin(self, client: ClientPhase) -> Carry:
        return Carry({"y": client.start("x")})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        return client.optimizer.descend(carry, "y", client.objective.gradient(carry["y"], batch))

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        return Result(uploads={"y": Upload.weighted_mean(carry["y"])})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server.move(sums["y"])
