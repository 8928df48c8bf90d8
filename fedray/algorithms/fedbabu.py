"""FedBABU: the last layer is not trained.

J. Oh, S. Kim, S.-Y. Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022,
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedray.algorithms import base
from fedray.algorithms.base import Carry, in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.errors import UserError


class FedBABU(FedAvg):
    """FedAvg in which the head keeps its random initial values, the same at all clients, so that all learn features for
    the same classifier. With B the parameters of the base: B_j = B_{j-1} - eta_l g_i(y_{j-1})_B; the head stays.

    Symbols as in :class:`FedAvg`: y_j is a client's model after j local steps, and g_i its mini-batch gradient.
    ``frozen`` names the layers that stay (``head``, the last layer, unless set). A personal model is the global one
    after fine-tuning: ``run.finetune_steps``, of the layers in ``run.finetune_layers``.
    """

    asynchronous = True
    allows_aggregation = True
    allows_private = True
    paper = "Oh et al., ICLR 2022"

    class Hyper(base.Hyper):
        frozen: tuple[str, ...] = base.parameter(("head",), "the layers that keep their initial values")

    def init_server(self, server: ServerState) -> None:
        if not (server.parameters_of("*") & ~server.parameters_of(*self.hyper.frozen)).any():
            raise UserError(f"fedbabu: algorithm.frozen={[*self.hyper.frozen]} leaves nothing to train")

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        trained = ~client.parameters_of(*self.hyper.frozen)
        return client.optimizer.descend(carry, "y", client.objective.gradient(carry["y"], batch), only=trained)

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        frozen, y = server.parameters_of(*self.hyper.frozen), sums["y"]
        # also where noise or an attack is added to what clients send
        server.move(y.with_parameters(torch.where(frozen, server["x"].parameters, y.parameters)))
