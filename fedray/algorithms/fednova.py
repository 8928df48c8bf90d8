"""FedNova: clients that make more local steps do not count more.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization. NeurIPS 2020, Equation 6 and Section 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedray.algorithms.base import Carry, Result, Upload
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase


class FedNova(FedAvg):
    """FedAvg of updates that are divided by the number of steps which they are worth, |a_i|:
    d_i = (x^r - y_i) / |a_i|; tau_eff = sum_i p_i |a_i|; x^{r+1} = x^r - eta_g tau_eff sum_i p_i d_i.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_i a client's final model, p_i its aggregation weight.
    |a_i| is the sum of the factors with which the client's gradients enter its update, in units of eta_l: J_i, its
    number of local steps, without momentum; A_i = (J_i - rho (1 - rho^J_i) / (1 - rho)) / (1 - rho) with the momentum
    rho of ``train.momentum``, and J_i + rho A_i if it is Nesterov's.
    """

    allows_private = True
    paper = "Wang et al., NeurIPS 2020"
    any_optimizer = False

    def worth(self, client: ClientPhase) -> Tensor:
        """Returns |a_i| of each client, ``[C, 1]``."""
        rho, steps = client.optimizer.training.momentum, client.J.double()
        a = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return (steps + rho * a if client.optimizer.training.nesterov else a).float()

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        a = self.worth(client)
        return Result({"y": Upload.mean_by(client.p / a, carry["y"])}, scalars={"a": a})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        p, worth = server.cohort.weights, scalars["a"]
        tau_eff = math.fsum(weight * a for weight, a in zip(p, worth, strict=True))
        # sum_i p_i d_i is the way from x to the mean by p_i / |a_i|, times the sum of these
        way = tau_eff * math.fsum(weight / a for weight, a in zip(p, worth, strict=True))
        server["x"] = server["x"].lerp(sums["y"], server.server_lr * way)
