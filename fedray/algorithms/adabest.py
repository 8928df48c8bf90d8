"""AdaBest: drift estimates that decay while a client is away.

F. Varno, M. Saghayi, L. Rafiee Sevyeri, S. Gupta, S. Matwin, M. Havaei: AdaBest: Minimizing Client Drift in Federated
Learning via Adaptive Bias Estimation. ECCV 2022 (arXiv 2204.13170).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fedray.algorithms import base
from fedray.algorithms.base import Carry, Result, Upload, Work, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model


class AdaBest(FedAvg):
    """FedAvg whose clients subtract from gradients an estimate h_i of their drift. h_i decays while a client is away:
    y_j = y_{j-1} - eta_l (g_i(y_{j-1}) - h_i); h_i <- h_i / gap_i + mu (x^r - y_J);
    h = beta (xbar_prev - xbar); x^{r+1} = xbar - h; xbar_prev <- xbar, from xbar_prev = x^1.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_j a client's model after j local steps and y_J its final
    one, g_i its mini-batch gradient, gap_i the number of rounds since it last took part, xbar the weighted mean of the
    final models, and eta_l the clients' learning rate. mu is the weight of the client's latest drift in h_i. h is the
    drift of the average between two rounds, with the weight beta, and xbar_prev the average of the previous round.
    ``mu_scaling: fedsim`` divides mu by the number of mini-batches in an epoch, as the authors' code does.
    """

    allows_aggregation = True
    paper = "Varno et al., ECCV 2022"
    assumes_plain_sgd = True
    client_state = ("h",)
    work = Work(per_step=2)
    weighting = "uniform"
    uses_server_lr = False

    class Hyper(base.Hyper):
        mu: float = base.parameter(0.1, "weight of the drift estimate (mu)", ge=0)
        beta: float = base.parameter(0.85, "server momentum (beta)", ge=0, lt=1)
        mu_scaling: Literal["paper", "fedsim"] = base.parameter("paper", "what mu is a multiple of")

    def init_server(self, server: ServerState) -> None:
        server["xbar"] = server["x"].clone()

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        gradient = client.objective.gradient(carry["y"], batch) - client.state["h"]
        return client.optimizer.descend(carry, "y", gradient)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        mu = self.hyper.mu / client.data.epoch_steps() if self.hyper.mu_scaling == "fedsim" else self.hyper.mu
        h = client.state["h"] / client.gap.clamp(min=1) + mu * (client.shared["x"] - carry["y"])
        return Result(uploads={"y": Upload.weighted_mean(carry["y"])}, state={"h": h})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server["x"] = sums["y"] - self.hyper.beta * (server["xbar"] - sums["y"])
        server["xbar"] = sums["y"]

    def further_models(self, server: ServerState) -> Mapping[str, Model]:
        """Returns ``{"averaged": xbar}``, the average of the clients' final models, so that it is evaluated too, in the
        column ``averaged_accuracy``.

        The authors' code offers both models, x and xbar, for deployment.
        """
        return {"averaged": server["xbar"]}
