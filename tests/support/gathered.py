"""A user's own algorithm whose server gets uploads one by one, and one of another shape than a model."""

from __future__ import annotations

import torch

from fedray.algorithms import Result, Traffic, Upload, parameter
from fedray.algorithms.fedavg import FedAvg


class Gathered(FedAvg):
    """Clients keep a share of what they send, which is their last update and the lengths of its parts; the server takes
    the mean of updates near their median, each with a weight that goes by where its client stands in the cohort."""

    client_state = ("e",)
    traffic = Traffic(models_up=0, vectors_up=1, numbers_up=3)

    class Hyper(FedAvg.Hyper):
        keep: float = parameter(0.3, "share of an update that is sent the next time", ge=0, lt=1)

    def end(self, client, carry):
        d = carry["y"] - client.start("x") + client.state["e"]
        parts = torch.stack([d[:, ::3].norm(dim=1), d[:, 1::3].norm(dim=1)], dim=1)
        sent = (1 - self.hyper.keep) * d
        return Result(
            uploads={"d": Upload.gather(sent), "n": Upload.gather(client.n), "parts": Upload.sum(parts)},
            state={"e": d - sent},
        )

    def server_update(self, server, phase, sums, scalars):
        d, n = sums["d"], sums["n"]
        assert n.flatten().tolist() == list(server.cohort.sizes)
        middle = d.sort(dim=0).values[(len(d) - 1) // 2]
        near = 1 / (1 + (d - middle).square().sum(dim=1, keepdim=True).sqrt())
        weights = n * near / torch.arange(1, len(n) + 1)[:, None]
        mean = (weights / weights.sum() * d).sum(dim=0)
        server["x"] = server["x"] + server.server_lr * mean / (1 + 0.01 * sums["parts"].sum() / len(n))
