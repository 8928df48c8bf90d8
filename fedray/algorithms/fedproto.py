"""FedProto: clients share no models, but the mean representations of their classes.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang: FedProto: Federated Prototype Learning across Heterogeneous
Clients. AAAI 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedray.algorithms import base
from fedray.algorithms.base import Algorithm, Broadcast, Carry, Result, Traffic, Upload, Work, in_place
from fedray.algorithms.server_state import ServerState
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.gradients.passes import Outputs
from fedray.models.inspection import ModelFacts


def a_row_for_each_class(facts: ModelFacts) -> float:
    """Returns how many numbers the features of a sample and one more are for each class."""
    return facts.outputs * (facts.features + 1)


class FedProto(Algorithm):
    """Every client trains a model of its own, whose representations of a class are drawn to those of the others: the
    loss is f_i(y) + lambda ||z - z_c||^2, with z the representation of a sample, c its class and z_c the prototype of
    this class. Then client i sends the sum s_ic of the representations of its samples of each class c, and their number
    n_ic; z_c = sum_i s_ic / sum_i n_ic.

    The sums are over the cohort. z is the input of the last layer. A class that nobody in the cohort has keeps its
    prototype, and one that never had any adds nothing to the loss. Bytes count prototypes in the first round too. All
    clients begin with the same initial model, which is also the global model that is evaluated; look at the personal
    models.
    """

    paper = "Tan et al., AAAI 2022"
    needs_head = "features"
    needs_classes = True
    any_optimizer = True
    uses_server_lr = False
    own_weights = True
    sends_numbers = True
    private = ("*",)
    traffic = Traffic(models_down=0, models_up=0, numbers_down=a_row_for_each_class, numbers_up=a_row_for_each_class)
    work = Work(full_losses=1)

    class Hyper(base.Hyper):
        lam: float = base.parameter(1.0, "pull to the prototypes of the classes (lambda)", ge=0)

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        return Broadcast({name: server[name] for name in ("x", "prototypes") if name in server.vectors})

    def begin(self, client: ClientPhase) -> Carry:
        return Carry({"y": client.start("x")})

    @in_place
    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        own = []
        if "prototypes" in client.shared:
            # not by [batch.y], which a GPU's recorded steps do not know
            of_samples = client.shared["prototypes"].index_select(0, batch.y.flatten())
            own = [of_samples.view(*batch.y.shape, -1)]
        gradient = client.objective.gradient(carry["y"], batch, self.loss if own else None, own)
        return client.optimizer.descend(carry, "y", gradient)

    def loss(self, outputs: Outputs, task: Tensor, own: Tensor) -> Tensor:
        """Returns the loss of each sample of a client's mini-batch, ``[b]``. ``own [b, d + 1]`` has the prototypes of
        the samples' classes, and in its last column 1, or 0 for a class that has none yet."""
        lam: float = self.hyper.lam
        return task + lam * own[:, -1] * (outputs.features - own[:, :-1]).square().sum(dim=1)

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        return Result({"sums": Upload.sum(client.objective.class_sums(carry["y"]))})

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        s, n = sums["sums"], sums["sums"][:, -1:]
        before: Any = server.vectors.get("prototypes", torch.zeros_like(s))
        server["prototypes"] = torch.where(n > 0, s / n, before)
