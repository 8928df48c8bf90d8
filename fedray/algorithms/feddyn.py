"""FedDyn: a dynamic regulariser that aligns the clients with the global optimum.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama: Federated Learning Based on Dynamic
Regularization. ICLR 2021, Algorithm 1.
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


class FedDyn(FedAvg):
    """FedAvg with a regulariser for each client, which is adapted so that clients and server agree on one optimum:
    y_j = y_{j-1} - eta_l (g_i(y_{j-1}) - gstate_i + alpha (y_{j-1} - x^r));
    gstate_i <- gstate_i - alpha (y_J - x^r); h <- h - (alpha/N) sum_S (y_i - x^r); x^{r+1} = mean_S y_i - h/alpha.

    Symbols as in :class:`FedAvg`: x^r is the server's model, y_j a client's model after j local steps, y_J or y_i its
    final one, g_i its mini-batch gradient, S the cohort, and N the number of clients that hold samples. Client i keeps
    gstate_i, and the server keeps h. In the code the client keeps q_i = -gstate_i / alpha instead, and the server q =
    -h / alpha = mean_i q_i. These are sums of y_J - x^r, so nothing is divided by alpha.
    """

    paper = "Acar et al., ICLR 2021"
    sends_updates = False
    only_weighting = True
    assumes_plain_sgd = True
    client_state = ("q",)
    work = Work(per_step=4)
    weighting = "uniform"
    uses_server_lr = False

    class Hyper(base.Hyper):
        alpha: float = base.parameter(0.01, "weight of the regulariser (alpha)", gt=0)
        eval: Literal["server", "avg_selected"] = base.parameter("server", "the evaluated model: x, or mean_S y_i")

    def init_server(self, server: ServerState) -> None:
        server["q"] = server["x"].zeros()
        server["mean"] = server["x"].clone()

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        y, x, q = carry["y"], client.shared["x"], client.state["q"]
        gradient = client.objective.gradient(y, batch) + self.hyper.alpha * (y - x + q)
        return client.optimizer.descend(carry, "y", gradient)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        moved = carry["y"] - client.shared["x"]
        uploads = {"y": Upload.weighted_mean(carry["y"]), "moved": Upload.sum(moved)}
        return Result(uploads, state={"q": client.state["q"] + moved})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        server["q"] = server["q"] + sums["moved"] / server.N
        server["mean"] = sums["y"]
        server["x"] = sums["y"] + server["q"]

    def eval_model(self, server: ServerState) -> Model:
        model: Model = server["mean"] if self.hyper.eval == "avg_selected" else server["x"]
        return model

    def further_models(self, server: ServerState) -> Mapping[str, Model]:
        """Returns the model that is evaluated in addition to :meth:`eval_model`, as a dict with one entry: the server's
        model x under the name "server", or the clients' average mean_S y_i under the name "averaged", whichever
        :meth:`eval_model` does not return.

        The authors' code reports both models.
        """
        return {"server": server["x"]} if self.hyper.eval == "avg_selected" else {"averaged": server["mean"]}
