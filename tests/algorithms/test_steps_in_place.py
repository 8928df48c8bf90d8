"""A step may overwrite the model of the step before if its algorithm says so, which changes no bit."""

from __future__ import annotations

import pytest
import torch

from fedray import simulate
from fedray.algorithms import in_place
from fedray.algorithms.fedavg import FedAvg
from fedray.client.optimizer import Carry, LocalOptimizer
from fedray.core.local_training import LocalTraining
from fedray.core.vectors import Model
from fedray.testing import AlgorithmContract
from fedray.testing.contracts import SETTINGS, small_source


class Momentum(FedAvg):
    """A rule with heavy-ball momentum y_j - y_{j-1}, which needs the model of the step before."""

    def begin(self, client):
        return Carry({"y": client.start("x"), "before": client.start("x")})

    def step(self, client, carry, batch):
        y = carry["y"]
        gradient = client.objective.gradient(y, batch) - (y - carry["before"])
        return client.optimizer.descend(carry, "y", gradient).update(before=y)


class Mistaken(Momentum):
    @in_place
    def step(self, client, carry, batch):
        return super().step(client, carry, batch)


def test_only_a_step_that_is_declared_overwrites():
    assert FedAvg.step.in_place
    assert not getattr(Momentum.step, "in_place", False)
    start, g = Model(torch.zeros(2, 16), 16), torch.ones(2, 16)
    for overwrites in (False, True):
        optimizer = LocalOptimizer(LocalTraining(seed=0, batch_size=1, local_steps=1), 0.5)
        optimizer.in_place = overwrites
        first = optimizer.descend(Carry({"y": start}), "y", g)
        memory = first["y"].row.data_ptr()
        second = optimizer.descend(first, "y", g)
        assert (second["y"].row.data_ptr() == memory) == overwrites
        assert torch.equal(second["y"].row, torch.full((2, 16), -1.0))
        # neither what local training began with, nor what an algorithm put there itself
        assert not start.row.any()
        assert not second.update(y=start).overwritable
        third = optimizer.descend(second.released(), "y", g)
        assert torch.equal(second["y"].row, torch.full((2, 16), -1.0))
        assert torch.equal(third["y"].row, torch.full((2, 16), -1.5))


@pytest.mark.parametrize("vectorize", [False, True])
def test_clients_of_unequal_steps_stay_where_they_are(tmp_path, monkeypatch, vectorize):
    keys = {**SETTINGS, "algorithm.name": "fedavg", "engine.vectorize": vectorize, "train.momentum": 0.5}
    first = simulate({**keys, "run.output": str(tmp_path / "in place")}, data=small_source())
    monkeypatch.delattr(FedAvg.step, "in_place")
    second = simulate({**keys, "run.output": str(tmp_path / "new")}, data=small_source())
    assert first.clients["steps"].nunique() > 1
    assert first.summary["model_sha256"] == second.summary["model_sha256"]


def test_the_contract_tests_notice_a_step_that_is_wrongly_declared(tmp_path):
    contract = AlgorithmContract()
    contract.algorithm = f"{__file__}:Mistaken"
    with pytest.raises(AssertionError, match="a step that is declared in_place gives other sums"):
        contract.test_client_updates_are_pure(tmp_path)


class Averaging(FedAvg):
    """Goes on after its local steps, and keeps the models on the way."""

    def train(self, client):
        carry = self.local_steps(client, self.begin(client))
        kept = []
        for batch in client.data.batches():
            gradient = client.objective.gradient(carry["y"], batch)
            carry = client.optimizer.descend(carry, "y", gradient)
            kept.append((carry["y"].row, carry["y"].row.clone()))
        assert all(torch.equal(row, as_it_was) for row, as_it_was in kept)
        return self.end(client, carry)


def test_steps_after_the_local_steps_leave_earlier_models_alone(tmp_path):
    config = {**SETTINGS, "algorithm.name": f"{__name__}:Averaging", "run.rounds": 2, "run.output": str(tmp_path)}
    assert simulate(config, data=small_source()).status == "completed"
