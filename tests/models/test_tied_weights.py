"""Models whose layers share parameters: their weights in files, and their layers by any of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from fedray import UserError
from fedray.config import load
from fedray.config.model import PeftConfig
from fedray.core.private import private_names
from fedray.core.vectors import Layout
from fedray.data.sources.source import Source
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.models.adapting import adapt

rng = np.random.default_rng(0)
X, Y = rng.integers(0, 9, (40, 5)), rng.integers(0, 9, (40, 5))


class Words(nn.Module):
    """The next word after each word; the last layer has the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.score = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.score.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.score(torch.tanh(self.mix(self.words(x))))


def loaded(path: Path) -> nn.Module:
    keys = {"algorithm.name": "fedavg", "data.clients": 2, "model.weights": str(path), "task.kind": "tokens"}
    experiment, _ = resolve(load(keys), CustomObjects(Source("own", X, Y, X[:4], Y[:4], 9, task="tokens"), Words()))
    return experiment.build_model()


def all_names(model: nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path.with_suffix(".pt"))


def one_name(model: nn.Module, path: Path) -> None:
    save_model(model, str(path))


def other_name(model: nn.Module, path: Path) -> None:
    state = model.state_dict()
    del state["words.weight"]
    save_file({name: tensor.clone() for name, tensor in state.items()}, path)


@pytest.mark.parametrize("save", [all_names, one_name, other_name])
def test_any_name_will_do(tmp_path, save: Any):
    model = Words()
    save(model, tmp_path / "model.safetensors")
    (path,) = tmp_path.iterdir()
    found = loaded(path)
    for tensor, expected in zip(found.parameters(), model.parameters(), strict=True):
        assert torch.equal(tensor, expected)
    assert found.score.weight is found.words.weight


def test_two_names_with_other_values_are_refused(tmp_path):
    state = {name: tensor.clone() for name, tensor in Words().state_dict().items()}
    state["score.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"(words|score).weight and (words|score).weight differ in .*, but are one tensor in the model"
    ):
        loaded(tmp_path / "model.safetensors")


def test_a_missing_tensor_is_named(tmp_path):
    state = {name: tensor.clone() for name, tensor in Words().state_dict().items() if "weight" not in name}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has no tensor 'words.weight'"):
        loaded(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["score"], {"words.weight"}),
        (["score.*"], {"words.weight"}),
        (["words"], {"words.weight"}),
        (["head"], {"words.weight"}),
        (["base"], {"mix.weight", "mix.bias"}),
        (["head", "base"], {"words.weight", "mix.weight", "mix.bias"}),
    ],
)
def test_layers_are_named_by_any_name_of_their_weights(patterns, names):
    model = Words()
    assert private_names(model, Layout(model), patterns) == names


def test_matrices_beside_a_model_leave_shared_weights_as_they_are():
    """A head is trained too, but not the embedding of a language model, whose weights it may have."""
    pytest.importorskip("peft")
    tied, untied, twice = Words(), Words(), Words()
    for model in (untied, twice):
        model.score.weight = nn.Parameter(model.score.weight.detach().clone())
    # a layer with two names shares nothing with another
    twice.layers = nn.ModuleList([twice.mix, twice.score])
    found = []
    for model in (tied, untied, twice):
        adapt(model, PeftConfig(kind="lora", r=2), None)
        found.append({name for name, each in model.named_parameters() if each.requires_grad and "lora" not in name})
    assert found == [set(), {"score.weight"}, {"score.weight"}]
