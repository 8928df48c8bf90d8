"""The bound of clients' drift, and the numbers that go into it."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedray.testing.contracts import small_source


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "analysis")
    return importlib.import_module("client_drift")


def test_gradients_and_smoothness_are_those_of_autograd(program):
    rng = np.random.default_rng(0)
    x, y, model = rng.normal(size=(30, 5)), rng.integers(0, 3, 30), rng.normal(size=(3, 5))
    weights = torch.tensor(model, requires_grad=True)
    F.cross_entropy(torch.tensor(x) @ weights.T, torch.tensor(y)).backward()
    assert program.gradient(model, x, y) == pytest.approx(weights.grad.numpy())
    other = rng.normal(size=(3, 5))
    change = np.linalg.norm(program.gradient(model, x, y) - program.gradient(other, x, y))
    assert change <= program.smoothness(x) * np.linalg.norm(model - other)


def test_one_step_does_not_drift(program):
    assert program.bound(2.0, 30.0, 1) == pytest.approx(0)
    assert 0 < program.bound(2.0, 30.0, 5) < program.bound(2.0, 30.0, 10)


def test_a_measured_distance_is_below_the_bound(program, monkeypatch):
    monkeypatch.setattr(program, "STEPS", 20)
    monkeypatch.setattr(program, "PUBLIC", 30)
    row = program.measure("fedavg", "3 classes", 5, small_source())
    assert 0 < row["mean distance"] <= row["largest distance"] <= row["bound"]
    assert 0 < row["delta"] < row["rho"] * 2
