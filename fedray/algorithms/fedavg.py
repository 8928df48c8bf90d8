"""FedAvg: clients train by local SGD, and the server averages their models.

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
    """Each client of the cohort trains the server's model by SGD on its samples, and the server averages the results:
    y_j = y_{j-1} - eta_l g_i(y_{j-1}) from y_0 = x^r; x^{r+1} = x^r - eta_g (x^r - sum_i p_i y_i).

    The symbols of this and all other algorithms: x^r is the server's model at the start of round r. y_j is a client's
    model after j of its J (or J_i) local steps, and y_i or y_J its final model in the round. g_i(y) is client i's
    gradient at y on a mini-batch, and G_i(y) its gradient at y on all its samples. eta_l and eta_g are the learning
    rates of clients and server. p_i is the aggregation weight of client i, and xbar = sum_i p_i y_i. Where a paper has
    a uniform mean over the clients of a round, the formulas say mean_i or mean_S. This is a mean with the weights p_i
    too: mean_i y_i is sum_i p_i y_i. S is the cohort (the clients that take part in the round), N the number of clients
    that hold samples, and gap_i the number of rounds since client i last took part.
    """

    asynchronous = True
    allows_aggregation = True
    allows_private = True
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
