"""Clients, phases and rounds in which no gradient is taken have no loss, which is not a loss that is no number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedray import simulate
from fedray.algorithms import Broadcast, Result, parameter
from fedray.algorithms.fedavg import FedAvg
from fedray.testing import AlgorithmContract
from fedray.testing.contracts import SETTINGS, small_source


class Selection(FedAvg):
    """Power of choice: in the first phase clients say how large their loss is, and the ``k`` largest train then.

    With ``every`` clients train in each ``every``-th round only. ``order`` exchanges the phases.
    """

    phases = ("score", "train")

    class Hyper(FedAvg.Hyper):
        k: int = parameter(2, "how many clients train")
        every: int = parameter(1, "train in each so many rounds")
        last: bool = parameter(False, "score after the training instead")
        nan: bool = parameter(False, "losses of client 0 are no numbers")

    def __init__(self, hyper=None):
        super().__init__(hyper)
        if self.hyper.last:
            self.phases = ("train", "score")

    def broadcast(self, server, phase):
        if phase == "score":
            return Broadcast({"x": server["x"]})
        losses, k = server.column("loss"), self.hyper.k if server.round % self.hyper.every == 0 else 0
        best = sorted(server.cohort.ids, key=lambda client: -losses.get(client, 0))[:k]
        return Broadcast({"x": server["x"]}, {"chosen": [float(client in best) for client in server.cohort.ids]})

    def score(self, client):
        x = client.start("x")
        batch = next(iter(client.data.batches()))
        logits = client.objective.class_logits(x, batch.x)
        losses = torch.nn.functional.cross_entropy(logits.movedim(-1, 1), batch.y, reduction="none")
        return Result(scalars={"loss": losses.mean(1, keepdim=True)})

    def train(self, client):
        if not client.scalars["chosen"].any():
            return self.end(client, self.begin(client))
        if self.hyper.nan:
            carry = self.local_steps(client, self.begin(client))
            client.objective._losses[0] = client.objective._losses[0] * math.nan
            return self.end(client, carry)
        return super().train(client)

    def server_update(self, server, phase, sums, scalars):
        if phase == "score":
            server.column("loss").update(zip(server.cohort.ids, scalars["loss"], strict=True))
        else:
            super().server_update(server, phase, sums, scalars)


def run(folder, **keys):
    hyper = {f"algorithm.{key}": value for key, value in keys.items()}
    config = {**SETTINGS, "run.rounds": 4, "algorithm.name": f"{__file__}:Selection", "run.output": str(folder)}
    return simulate({**config, **hyper}, data=small_source())


@pytest.mark.parametrize("last", [False, True])
def test_the_loss_of_a_round_is_that_of_the_clients_that_train(tmp_path, last):
    result = run(tmp_path, last=last)
    assert (result.summary["status"], result.summary["rounds"]) == ("completed", 4)
    trained = result.clients.groupby("round")["loss"].agg(["count", "mean"])
    assert trained["count"].tolist() == [2] * 4
    np.testing.assert_allclose(result.metrics["train_loss"], trained["mean"], rtol=1e-12)


def test_a_round_in_which_nobody_trains_has_no_loss(tmp_path):
    result = run(tmp_path, every=2)
    assert (result.summary["status"], result.summary["rounds"]) == ("completed", 4)
    assert result.metrics["train_loss"].isna().tolist() == [True, False, True, False]
    assert result.metrics["test_loss"].notna().all()


def test_a_loss_that_is_no_number_still_ends_the_run(tmp_path):
    result = run(tmp_path, nan=True)
    assert (result.summary["status"], result.summary["rounds"]) == ("diverged", 1)


class TestSelection(AlgorithmContract):
    algorithm = f"{__file__}:Selection"
    zero = {"k": 5}

    # it has no meaning here: whoever is chosen is chosen for a whole stack
    test_vectorized_agrees = None


class Sparing(FedAvg):
    """Takes a gradient in each second local step only."""

    def step(self, client, carry, batch):
        return super().step(client, carry, batch) if batch.step % 2 else carry


def test_the_loss_of_a_client_is_the_mean_over_its_gradients(tmp_path):
    config = {**SETTINGS, "run.rounds": 1, "run.output": str(tmp_path), "train.lr": 1e-9, "data.clients": 2}
    config |= {"train.cohort_size": 2, "data.partition.kind": "iid"}
    all_steps, some = (
        simulate({**config, "algorithm.name": name, "run.name": key}, data=small_source())
        for name, key in (("fedavg", "all"), (f"{__file__}:Sparing", "some"))
    )
    # half as many losses of the same model
    np.testing.assert_allclose(some.clients["loss"], all_steps.clients["loss"], rtol=0.1)
