"""IFCA: several global models, of which each client trains the one that fits its data best.

A. Ghosh, J. Chung, D. Yin, K. Ramchandran: An Efficient Framework for Clustered Federated Learning. NeurIPS 2020,
Algorithm 1 with model averaging.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedray.algorithms import base
from fedray.algorithms.base import Broadcast, Carry, Result, Upload, Work
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.vectors import Model


class IFCA(FedAvg):
    """FedAvg of K models: a client takes the model k_i = argmin_k F_i(x_k^r) with the least loss on all its samples,
    and trains it; x_k^{r+1} = x_k^r + eta_g (sum_{i in S_k} p_i y_i / sum_{i in S_k} p_i - x_k^r), where S_k are the
    clients that took model k. A model that nobody took stays.

    Symbols as in :class:`FedAvg`. The models begin with different random weights. A client's personal model is the one
    that it would take; the global model that is evaluated and saved is x_1, the others are ``model_2`` and so on.
    The column ``cluster`` of clients.parquet has k_i, from 1.
    """

    paper = "Ghosh et al., NeurIPS 2020"
    several_models = True

    class Hyper(base.Hyper):
        models: int = base.parameter(2, "number of models (K)", ge=1)

    def __init__(self, hyper: base.Hyper | None = None) -> None:
        super().__init__(hyper)
        self.names = ("x", *(f"x{number}" for number in range(2, self.hyper.models + 1)))
        self.work = Work(full_losses=self.hyper.models)
        self.traffic = base.Traffic(models_down=self.hyper.models)

    def init_server(self, server: ServerState) -> None:
        for number, name in enumerate(self.names[1:], 1):
            server[name] = server.initial_model(number)

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({name: server[name] for name in self.names})

    def personal_broadcast(self, server: ServerState) -> Broadcast:
        return self.broadcast(server, "train")

    def begin(self, client: ClientPhase) -> Carry:
        models = [client.start(name) for name in self.names]
        k = torch.stack([client.objective.full_loss(model) for model in models]).argmin(dim=0).to(client.p.dtype)
        y = models[0]
        for number, model in enumerate(models):
            y = Model.where(k == number, model, y)
        return Carry({"y": y, "k": k})

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        uploads = {name: Upload.mean_by(client.p * (carry["k"] == k), carry["y"]) for k, name in enumerate(self.names)}
        return Result(uploads, scalars={"k": carry["k"]})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        for number, name in enumerate(self.names):
            if number in scalars["k"]:
                server[name] = server[name].lerp(sums[name], server.server_lr)
        server.client_scalars["cluster"] = [k + 1 for k in scalars["k"]]

    def further_models(self, server: ServerState) -> Mapping[str, Model]:
        return {f"model_{number}": server[name] for number, name in enumerate(self.names[1:], 2)}

    def personal_model(self, client: ClientPhase) -> Model:
        model: Model = self.begin(client)["y"]
        return model
