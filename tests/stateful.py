"""A user's own algorithms, in a module of their own: what the README shows, and one with client state and extras."""

from __future__ import annotations

import torch

import fedray
from fedray.algorithms.fedavg import FedAvg


class Drift(FedAvg):
    """Keeps each client's last update and pulls against it, decayed by the rounds it was away; ragged and stateful."""

    client_state = ("d",)
    weighting = "uniform"

    class Hyper(fedray.Hyper):
        strength: float = fedray.parameter(0.1, "weight of the pull", ge=0)

    def step(self, ctx, carry, batch, j):
        y = carry["y"]
        correction = self.hyper.strength * ctx.state["d"] / ctx.gap.clamp(min=1)
        return {"y": ctx.descend(y, ctx.grad(y, batch) - correction)}

    def end(self, ctx, carry):
        d = ctx.shared["x"] - carry["y"]
        g = ctx.full_grad(ctx.start("x"))
        norm = g.norm(dim=1, keepdim=True)
        return fedray.Result(
            uploads={
                "y": fedray.mean(carry["y"]),
                "u": fedray.uniform(d),
                "d": fedray.weighted(1 + norm, d),
                "g": fedray.total(g),
            },
            state={"d": d},
            scalars={"norm": norm},
        )

    def reduce(self, server, phase, sums, scalars):
        server.client_scalars["norm"] = scalars["norm"]
        if server.weighting == "uniform":
            torch.testing.assert_close(sums["u"], server["x"] - sums["y"], rtol=1e-3, atol=1e-6)
        server.move(sums["y"] - 0.01 * self.hyper.strength * (sums["d"] + sums["g"] / server.N))


class Contrast(FedAvg):
    """A loss of its own with frozen models: pulls features towards those of the global model."""

    class Hyper(fedray.Hyper):
        mu: float = fedray.parameter(0.5, "weight of the feature term", ge=0)

    def step(self, ctx, carry, batch, j):
        y, x = carry["y"], ctx.start("x")
        frozen = ctx.forward(x, batch.x).features

        def loss(outputs, task, z):
            return task + self.hyper.mu * (1 - torch.cosine_similarity(outputs.features, z, dim=1))

        return {"y": ctx.descend(y, ctx.grad(y, batch, loss, [frozen]))}
