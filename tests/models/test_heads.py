"""Projection heads on users' own models, and what MOON and FedSiam-DA make of models with buffers and frozen layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedray import UserError, simulate
from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.gradients.network import Network
from fedray.models.heads import Head, ProjectionHead
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tracking.result import RunResult

FEATURES, CLASSES = 12, 4
BOTH = pytest.mark.parametrize("algorithm", ["moon", "fedsiam_da"])


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Scaled(Plain):
    """Divides by a buffer, which no zero may stand in for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("std", torch.full((FEATURES,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.std)


class Backwards(Plain):
    """The classifier is registered first, and called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        last, first = self.last, self.first
        del self.last, self.first
        self.last, self.first = last, first

    def forward(self, x: Tensor) -> Tensor:
        return self.last(input=torch.tanh(self.first(input=x)))


class Aliased(nn.Module):
    """The classifier has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)])
        self.last = self.layers[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layers[0](x)))


class Auxiliary(Plain):
    """A Linear that is never called comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 3)


class Tokens(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))[:, None].expand(-1, 3, -1)).mean(1)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, CLASSES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None]).flatten(1)


class Namesake(nn.Module):
    """Layers of the user's that are called as those of our heads are."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.predictor(x))


def config(folder: Path, algorithm: str, **keys: Any) -> dict[str, Any]:
    own = {"algorithm.name": algorithm, "run.output": str(folder), "model.proj_dim": 6, "run.rounds": 3}
    return {k: v for k, v in {**SETTINGS, **own, **keys}.items() if k != "model.hidden"}


def run(folder: Path, algorithm: str, model: Any, **keys: Any) -> RunResult:
    return simulate(config(folder, algorithm, **keys), data=small_source(), model=model)


def vector(result: RunResult) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in result.model().parameters()])


@BOTH
@pytest.mark.parametrize("model", [Plain, Normed, Scaled, Backwards, Aliased, Auxiliary, Namesake])
def test_the_classifier_that_is_called_is_replaced(algorithm, model, tmp_path):
    result = run(tmp_path, algorithm, model)
    assert result.summary["status"] == "completed"
    replaced = result.model()
    assert type(replaced).__name__ == model.__name__
    assert sum(isinstance(m, ProjectionHead) for m in replaced.modules()) == 1
    outputs = Network(replaced).outputs(torch.randn(5, FEATURES), predict=True)
    assert outputs.features.shape == (5, 6)
    assert (outputs.prediction is not None) == (algorithm == "fedsiam_da")


def test_every_name_of_a_classifier_is_that_of_the_head(tmp_path):
    module = run(tmp_path, "moon", Aliased).model()
    assert module.layers[1] is module.last


@pytest.mark.parametrize("model", [Namesake, Backwards, Convolutional, lambda: nn.Linear(FEATURES, CLASSES)])
@pytest.mark.parametrize("algorithm", ["fedavg", "pfedmo", "stateful:Drift"])
def test_without_a_head_any_model_will_do(algorithm, model, tmp_path):
    assert run(tmp_path, algorithm, model, **{"engine.vectorize": "auto"}).summary["status"] == "completed"


@BOTH
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Tokens, r"has no representation \[b, d\]: its last Linear takes inputs \[b, 3, 8\]"),
        (Convolutional, "calls no Linear layer"),
        (lambda: nn.Linear(FEATURES, CLASSES), "calls no Linear layer|its classifier is its only layer"),
        (lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES)), "its classifier is its only layer"),
    ],
    ids=["tokens", "convolution", "linear", "sequential"],
)
def test_models_without_a_representation(algorithm, model, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, algorithm, model)


def test_a_head_that_is_too_large(tmp_path):
    with pytest.raises(UserError, match="the head can't be made"):
        run(tmp_path, "moon", Plain, **{"model.proj_dim": 10**13})


@pytest.mark.parametrize("model", [Plain, Normed])
def test_moon_compares_with_the_global_model_as_it_was_received(model, tmp_path):
    """Under `first: global` both of them are the same model in round 1, buffers included, so that mu can't matter."""
    keys = {"run.rounds": 1, "algorithm.first": "global", "train.local_epochs": 3}
    with_mu = vector(run(tmp_path / "5", "moon", model, **keys, **{"algorithm.mu": 5}))
    without = vector(run(tmp_path / "0", "moon", model, **keys, **{"algorithm.mu": 0}))
    assert np.linalg.norm(with_mu - without) < 1e-6 * np.linalg.norm(without)


@BOTH
def test_what_stands_in_for_models_that_are_not_there_does_not_matter(algorithm, tmp_path):
    """Nor does it with several models to keep."""
    keys = {"algorithm.buffer": 3, "algorithm.first": "init"} if algorithm == "moon" else {}
    assert run(tmp_path, algorithm, Scaled, **keys).summary["status"] == "completed"


@BOTH
def test_frozen_layers_are_neither_trained_nor_kept_by_clients(algorithm, tmp_path):
    module = Normed()
    module.first.requires_grad_(False)
    before = module.first.weight.clone()
    result = run(tmp_path, algorithm, module, **{"run.checkpoint_every": 1})
    assert torch.equal(result.model().first.weight, before)
    assert torch.equal(load_file(result.folder / "model.safetensors")["first.weight"], before)
    files = (result.folder / "checkpoints" / "shared").glob("client-*-3-*")
    head = {"moon": 0, "fedsiam_da": 2 * (6 * 6 + 6) + 2 * 6 + 2 * 6 + 1}[algorithm]
    kept = 16 + 16 + 8 * 8 + 8 + 8 * 6 + 6 + 6 * 4 + 4 + head + 1
    widths = {v.shape[0] for file in files for k, v in load_file(file).items() if "last" in k}
    assert len(widths) == 1
    # parameters and buffers are each padded to whole rows
    assert kept <= widths.pop() <= kept + 30


def test_features_are_float32_in_mixed_precision():
    network = Network(Plain(), precision="bf16")
    outputs = network.outputs(torch.randn(5, FEATURES))
    assert (outputs.logits.dtype, outputs.features.dtype) == (torch.float32, torch.float32)


@BOTH
def test_weights_of_a_backbone_leave_the_head_as_it_was_drawn(algorithm, tmp_path):
    given = Plain()
    save_file({k: v for k, v in given.state_dict().items() if k.startswith("first")}, tmp_path / "backbone.safetensors")
    keys = {"model.weights": str(tmp_path / "backbone.safetensors")}
    own = CustomObjects(source=small_source(), model=Plain)
    experiment, _ = resolve(load(config(tmp_path, algorithm, **keys)), own)
    module = experiment.build_model()
    assert torch.equal(module.first.weight, given.first.weight)
    drawn = resolve(load(config(tmp_path, algorithm)), own)[0].build_model()
    assert torch.equal(module.last.hidden.weight, drawn.last.hidden.weight)
    # the layer that the head replaces is in the file, but not in the model
    save_file(given.state_dict(), tmp_path / "backbone.safetensors")
    experiment, _ = resolve(load(config(tmp_path, algorithm, **keys)), own)
    assert torch.equal(experiment.build_model().first.weight, given.first.weight)
    assert any("2 tensors" in note and note.endswith("the first is last.bias") for note in experiment.notes)
    save_file({"other": torch.zeros(1)}, tmp_path / "backbone.safetensors")
    with pytest.raises(UserError, match=r"has no tensor 'first.weight'"):
        resolve(load(config(tmp_path, algorithm, **keys)), own)[0].build_model()


def test_clients_without_samples_do_not_count(tmp_path):
    """GHBM's default window is 1 where everybody who has samples takes part, and FedHBM's warning is given."""
    keys = {
        "data.clients": 40,
        "data.partition.alpha": 0.05,
        "data.partition.min_samples": 0,
        "train.cohort_size": None,
    }
    experiment, data = resolve(
        load(config(tmp_path, "fedhbm", **keys)), CustomObjects(source=small_source(), model=Plain)
    )
    assert data.active < 40
    assert any("the cohort is everybody" in note for note in experiment.notes)
    windows = [
        run(tmp_path / str(tau), "ghbm", Plain, **keys, **({"algorithm.tau": tau} if tau else {})) for tau in (None, 1)
    ]
    assert windows[0].summary["model_sha256"] == windows[1].summary["model_sha256"]


def test_heads_draw_as_the_seed_says(tmp_path):
    def weights(seed: int) -> Tensor:
        own = CustomObjects(source=small_source(), model=Plain)
        return resolve(load(config(tmp_path, "moon", **{"run.seed": seed})), own)[0].build_model().last.hidden.weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert F.cosine_similarity(weights(1).flatten(), weights(2).flatten(), dim=0) < 0.5


class Narrow(Head):
    """One linear layer in the place of MOON's three."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.projection, self.classifier = nn.Linear(features, width), nn.Linear(width, classes)

    def forward(self, input: Tensor) -> Tensor:
        return self.classifier(self.projection(input))


OWN = f"{__name__}:Narrow"


def test_a_head_of_ones_own_gives_the_representation(tmp_path):
    experiment, _ = resolve(
        load({**SETTINGS, "algorithm.name": "moon", "model.head": OWN}), CustomObjects(small_source())
    )
    module = experiment.build_model()
    assert sum(isinstance(each, Narrow) for each in module.modules()) == 1
    assert experiment.config.model.head == OWN
    assert experiment.inputs["code of the head"]
    config = {**SETTINGS, "algorithm.name": "moon", "model.head": OWN, "run.output": str(tmp_path), "run.rounds": 2}
    result = simulate(config, data=small_source())
    assert result.summary["status"] == "completed"


def test_a_linear_head_leaves_the_representation_to_the_model(tmp_path):
    result = run(tmp_path, "moon", Namesake, **{"model.head": "linear"})
    outputs = Network(result.model()).outputs(torch.randn(5, FEATURES), predict=True)
    assert outputs.features.shape == (5, 8)
    assert sum(p.numel() for p in result.model().parameters()) == sum(p.numel() for p in Namesake().parameters())


@pytest.mark.parametrize(
    ("algorithm", "head", "message"),
    [
        ("fedsiam_da", OWN, "needs a head with a prediction, such as siam"),
        ("moon", "none", "needs a head with a projection, such as moon"),
        ("fedavg", "mooon", r"unknown model.head 'mooon' \(did you mean 'moon'\?\)"),
        ("fedavg", f"{__name__}:Plain", "is not a subclass of fedray.models.Head"),
    ],
)
def test_heads_that_an_algorithm_cant_use_are_refused(algorithm, head, message):
    with pytest.raises(UserError, match=message):
        resolve(load({**SETTINGS, "algorithm.name": algorithm, "model.head": head}), CustomObjects(small_source()))
