"""Options of the clients' SGD against torch.optim.SGD: Nesterov's momentum, weight decay without norms and biases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedray import UserError, simulate
from fedray.config import load
from fedray.core.network import Network

rng = np.random.default_rng(2)
X, Y = rng.normal(size=(40, 6)).astype(np.float32), np.arange(40) % 3


class Normed(nn.Module):
    """A model with a normalisation layer of each kind, whose weights have other names than usual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.group = nn.Linear(6, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8)
        self.batch, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.batch(self.group(self.layer(self.first(x))))))


def settings(folder: Any, **keys: Any) -> dict[str, Any]:
    return {
        "run.output": str(folder), "run.rounds": 1, "algorithm.name": "fedavg", "train.local_steps": 5, "train.lr": 0.2,
        "train.batch_size": "full", "engine.kind": "local", "data.clients": 1, "data.partition.kind": "iid", **keys,
    }  # fmt: skip


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Returns the parameters after five steps of torch's optimizer on the whole data set."""
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def same(folder: Any, keys: dict[str, Any], model: nn.Module, expected: dict[str, np.ndarray]) -> None:
    found = simulate(settings(folder, **keys), data=(X, Y), test=(X, Y), model=model).model()
    for name, parameter in found.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], atol=2e-6, err_msg=name)


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_nesterov(vectorize, nesterov, tmp_path):
    torch.manual_seed(3)
    model, other = nn.Linear(6, 3), nn.Linear(6, 3)
    other.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.8, weight_decay=0.1, nesterov=nesterov)
    keys = {"train.momentum": 0.8, "train.weight_decay": 0.1, "train.nesterov": nesterov}
    same(tmp_path, {**keys, "engine.vectorize": vectorize}, model, trained(other, optimizer))


@pytest.mark.parametrize("all_of_them", [False, True])
def test_weight_decay_of_some_parameters(all_of_them, tmp_path):
    torch.manual_seed(3)
    model, other = Normed(), Normed()
    other.load_state_dict(model.state_dict())
    named = dict(other.named_parameters())
    weights = ("first.weight", "last.weight")
    groups = [
        {"params": [named[name] for name in weights], "weight_decay": 0.3},
        {"params": [p for name, p in named.items() if name not in weights], "weight_decay": 0.3 * all_of_them},
    ]
    keys = {"train.weight_decay": 0.3, "train.decay_norms_and_biases": all_of_them}
    same(tmp_path, keys, model, trained(other, torch.optim.SGD(groups, lr=0.2)))


def test_which_parameters_decay():
    network = Network(nn.Sequential(nn.Embedding(4, 3), nn.LSTM(3, 2), nn.RMSNorm(2), nn.Linear(2, 2)))
    decayed = {slot.name for slot in network.layout.slots if network.decayed[slot.start] == 1}
    assert decayed == {"0.weight", "1.weight_ih_l0", "1.weight_hh_l0", "3.weight"}
    assert network.decayed.sum() == 12 + 8 * 3 + 8 * 2 + 4


def test_nesterov_needs_momentum():
    with pytest.raises(UserError, match=r"train.nesterov=true needs train.momentum above 0"):
        load({"train.nesterov": True})
