"""A user's own algorithms, in a module of their own: what the README shows, and one with client state and extras."""

from __future__ import annotations

import torch

from fedray.algorithms import Result, Upload, parameter
from fedray.algorithms.fedavg import FedAvg


class Drift(FedAvg):
    """Keeps each client's last update and pulls against it, decayed by the rounds it was away; ragged and stateful."""

    client_state = ("d",)
    weighting = "uniform"

    class Hyper(FedAvg.Hyper):
        strength: float = parameter(0.1, "weight of the pull", ge=0)

    def step(self, client, carry, batch):
        correction = self.hyper.strength * client.state["d"] / client.gap.clamp(min=1)
        return client.optimizer.descend(carry, "y", client.objective.gradient(carry["y"], batch) - correction)

    def end(self, client, carry):
        d = client.shared["x"] - carry["y"]
        g = client.objective.full_gradient(client.start("x"))
        norm = g.norm(dim=1, keepdim=True)
        return Result(
            uploads={
                "y": Upload.weighted_mean(carry["y"]),
                "u": Upload.uniform_mean(d),
                "d": Upload.mean_by(1 + norm, d),
                "g": Upload.sum(g),
            },
            state={"d": d},
            scalars={"norm": norm},
        )

    def server_update(self, server, phase, sums, scalars):
        server.client_scalars["norm"] = scalars["norm"]
        if server.weighting == "uniform":
            torch.testing.assert_close(sums["u"], server["x"] - sums["y"], rtol=1e-3, atol=1e-6)
        server.move(sums["y"] - 0.01 * self.hyper.strength * (sums["d"] + sums["g"] / server.N))


class Contrast(FedAvg):
    """A loss of its own with frozen models: pulls features towards those of the global model."""

    class Hyper(FedAvg.Hyper):
        mu: float = parameter(0.5, "weight of the feature term", ge=0)

    def step(self, client, carry, batch):
        y, x = carry["y"], client.start("x")
        frozen = client.objective.forward(x, batch.x).features

        def loss(outputs, task, z):
            return task + self.hyper.mu * (1 - torch.cosine_similarity(outputs.features, z, dim=1))

        return client.optimizer.descend(carry, "y", client.objective.gradient(y, batch, loss, [frozen]))
