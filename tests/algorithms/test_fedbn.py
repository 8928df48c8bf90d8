"""FedBN on a model with norms: against its reference in float64, for some clients of many, and in stacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pairs import pairwise
from reference_runs import CLASSES, EVERYTHING, FEATURES, PARTICIPATION, PLAIN, Data, cohorts_of, expect, make_data
from reference_runs import run as reference_run
from references_momentum import Logistic
from references_norms import fedbn
from safetensors.torch import load_file
from torch import Tensor, nn

SIZES = (3, 11, 7, 4, 20)
"""Of a batch of one sample there is nothing to normalise."""


class Norms(nn.Module):
    """A model with a norm that has statistics, unless it has to be stacked, and one without."""

    def __init__(self, stacks: bool) -> None:
        super().__init__()
        self.first, self.batch = nn.Linear(FEATURES, 6), nn.Identity() if stacks else nn.BatchNorm1d(6)
        self.layer, self.last = nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.layer(self.batch(self.first(x)).relu()))


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data") / "toy.npz", sizes=SIZES)


@pytest.mark.parametrize(
    ("train", "participation", "vectorize"),
    pairwise((PLAIN, replace(EVERYTHING, momentum=0.5, server_lr=0.6)), [*PARTICIPATION], (False, True)),
)
def test_against_reference(clients: Data, tmp_path, train, participation, vectorize) -> None:
    """With several local steps, and with momentum, decay and clipping, also of the norms."""
    torch.manual_seed(3)
    module = Norms(stacks=vectorize)
    start = {name: value.clone() for name, value in module.state_dict().items() if value.is_floating_point()}
    keys = PARTICIPATION[participation] | {"engine.vectorize": vectorize, "engine.chunk": 2 if vectorize else None}
    keys |= {"run.personal_models_of": "all"}
    made = reference_run(clients, tmp_path, "fedbn", train, module, **keys)
    problem = Logistic(clients.problem.x, clients.problem.y, CLASSES)
    rounds = fedbn(problem, cohorts_of(made), train, start)
    same(load_file(made.folder / "model.safetensors"), rounds[-1].model)
    for client in range(len(SIZES)):
        same(load_file(made.folder / "personal" / f"client-{client}.safetensors"), rounds[-1].personal[client])
    expect(made.metrics["train_loss"], [np.mean(list(each.loss.values())) for each in rounds], absolute=1e-5)
    # the norms have gone their own ways
    norms = torch.stack([rounds[-1].personal[client]["layer.weight"] for client in range(len(SIZES))])
    assert norms.std(dim=0).max() > 0.01


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-5)
