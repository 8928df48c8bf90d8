"""Models are trained in stacks if their samples know nothing of the padding beside them, and if stacks are faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedray import UserError, simulate
from fedray.config import load
from fedray.core.task import Task
from fedray.data.sources.source import Source
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.gradients.loop import LoopNetwork
from fedray.models.ghbm import ResNet20
from fedray.models.small import MLP, LeNet5
from fedray.models.stacking import stacking_obstacle
from fedray.testing.contracts import assert_same
from fedray.tracking.result import RunResult

FEATURES, CLASSES = 12, 4
SIZES = [4, 7, 13, 5, 9, 16, 6, 11]
"""Samples of each client: with batches of 16 every stack has padding in it."""

RUN: dict[str, Any] = {
    "algorithm.name": "fedavg",
    "data.partition.kind": "natural",
    "train.batch_size": 16,
    "train.local_steps": 6,
    "train.lr": 0.1,
    "run.rounds": 1,
    "run.checkpoint_every": 0,
    "engine.kind": "local",
    "engine.chunk": 8,
}


class Base(nn.Module):
    """Two layers, and something between them that each of the tests fills in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES)
        self.layer: nn.Module = nn.Identity()

    def between(self, z: Tensor) -> Tensor:
        return self.layer(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.between(self.first(x))))


class Centred(Base):
    """Subtracts the mean of the batch."""

    def between(self, z: Tensor) -> Tensor:
        return z - z.mean(0)


class BatchNormed(Base):
    """Normalises by the batch, and keeps no statistics of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(7, track_running_stats=False)


class Attending(Base):
    """Each sample is mixed with those that resemble it."""

    def between(self, z: Tensor) -> Tensor:
        return torch.softmax(z @ z.T, dim=1) @ z


class Shared(Base):
    """Divides by the number of samples: what they are does not matter, but padding counts."""

    def between(self, z: Tensor) -> Tensor:
        return z / len(z)


class Large(Base):
    """Subtracts the mean of the batch, where that is large."""

    def between(self, z: Tensor) -> Tensor:
        return z - z.mean(0) if len(z) >= 8 else z


class Ghost(Base):
    """Normalises each group of four samples by itself (ghost batch normalisation), without running statistics."""

    def between(self, z: Tensor) -> Tensor:
        return torch.cat([each - each.mean(0) for each in z.split(4)])


class Gated(Base):
    """Leaves out all but the eight strongest samples of a batch, as a layer of limited capacity does."""

    def between(self, z: Tensor) -> Tensor:
        strength = z.square().sum(1)
        limit = strength.topk(min(8, len(z))).values[-1]
        return z * (strength >= limit)[:, None]


class Zeros(Centred):
    """At its initial parameters, all zero, its gradients are zero but for the last layer's bias."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class Tokens(nn.Module):
    """Inputs are whole numbers below 9, which other inputs than those of the data need not be."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(9, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x.long()).mean(1))


class Dropping(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dropout()


class Tracking(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(7)


MIXING = [Centred, BatchNormed, Attending, Shared, Large, Ghost, Gated, Zeros]


def data(tokens: bool = False) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    # clients are unlike each other, and so are their samples
    x = rng.normal(size=(len(client), FEATURES)) + client[:, None] / 4
    if tokens:
        x = rng.integers(0, 9, x.shape)
    x, y = x.astype(np.float32), rng.integers(0, CLASSES, len(client))
    return (x, y, client), (x[:20], y[:20])


def run(folder: Path, model: type[nn.Module], vectorize: bool | str) -> RunResult:
    train, test = data(model is Tokens)
    config = {**RUN, "engine.vectorize": vectorize, "run.output": str(folder)}
    return simulate(config, data=train, test=test, model=model)


def stacked(result: RunResult) -> bool:
    return load(result.folder / "config.yaml").engine.vectorize is True


@pytest.mark.parametrize("model", MIXING)
def test_a_model_that_mixes_samples_is_trained_one_client_after_another(model, tmp_path):
    auto = run(tmp_path / "auto", model, "auto")
    assert not stacked(auto)
    assert_same(auto, run(tmp_path / "loop", model, False))
    with pytest.raises(UserError, match=r"engine\.vectorize=true: .*padd.*; use auto$"):
        run(tmp_path / "stack", model, True)


def test_a_loss_that_mixes_samples_is_found_too(tmp_path):
    """Each sample's logits are compared with those of the whole batch."""

    def contrastive(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits - logits.mean(0), targets, reduction="none")

    train, test = data()
    with pytest.raises(UserError, match="padding"):
        simulate({**RUN, "engine.vectorize": True, "run.output": str(tmp_path)}, data=train, test=test, model=Base,
                 loss=contrastive)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "reason"), [(Dropping, "random"), (Tracking, "buffers")], ids=["dropout", "running statistics"]
)
def test_other_reasons_are_given(model, reason, tmp_path):
    assert not stacked(run(tmp_path / "auto", model, "auto"))
    with pytest.raises(UserError, match=rf"engine\.vectorize=true: .*{reason}.*; use auto$") as raised:
        run(tmp_path / "stack", model, True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("model", [Base, Tokens])
def test_others_are_trained_in_stacks(model, tmp_path):
    auto, loop = run(tmp_path / "auto", model, "auto"), run(tmp_path / "loop", model, False)
    assert stacked(auto)
    vectors = [nn.utils.parameters_to_vector(result.model().parameters()).detach() for result in (auto, loop)]
    assert (vectors[0] - vectors[1]).norm() < 1e-5 * vectors[1].norm()


def test_a_line_says_why_a_small_model_is_not_stacked(tmp_path):
    x, y = np.zeros((80, 12), np.float32), np.arange(80) % 4
    keys = {"engine.kind": "local", "algorithm.name": "fedavg", "data.clients": 20, "data.public_samples": 0}
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    experiment, _ = resolve(load(keys), CustomObjects(Source("own", x, y, x[:4], y[:4], 4), model))
    (line,) = [line for line in experiment.notes if "engine.vectorize" in line]
    assert line == (
        "engine.vectorize=auto: clients are trained one after another, which is slower, because its forward pass "
        "changes buffers, such as BatchNorm's running statistics"
    )


@pytest.mark.parametrize("model", [MLP, LeNet5, ResNet20])
def test_shipped_models_can_be_stacked(model):
    rng = np.random.default_rng(0)
    shape = (3, 16, 16) if model is ResNet20 else (1, 28, 28)
    x, y = rng.normal(size=(40, *shape)).astype(np.float32), rng.integers(0, 10, 40)
    config = load({"engine.kind": "local", "engine.vectorize": True, "algorithm.name": "fedavg", "data.clients": 4})
    experiment, _ = resolve(config, CustomObjects(Source("own", x, y, x[:4], y[:4], 10), model))
    assert experiment.vectorize


def test_the_check_draws_from_no_global_generator(tmp_path):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    run(tmp_path, Base, "auto")
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("model", "batch", "cohort", "chunk", "expected"),
    [
        ("logistic", 10, 200, "auto", (True, 64)),
        # two stacks at least, so that two actors have work
        ("logistic", 10, 100, "auto", (True, 50)),
        ("logistic", 64, 64, "auto", (True, 32)),
        ("logistic", 10, 63, "auto", (True, 32)),
        ("logistic", 10, 15, "auto", (True, 8)),
        ("logistic", 10, 9, "auto", (False, None)),
        ("logistic", 10, 8, "auto", (False, None)),
        ("logistic", 10, 100, 4, (False, 4)),
        ("mlp", 64, 128, "auto", (True, 64)),
        ("mlp", 64, 100, "auto", (False, None)),
        ("mlp", 64, 40, "auto", (False, None)),
        ("mlp", 64, 40, 32, (False, 32)),
        ("mlp", 10, 40, 32, (True, 32)),
        ("lenet5", 10, 100, "auto", (True, 50)),
        ("lenet5", 20, 100, "auto", (False, None)),
    ],
)
def test_what_a_cpu_trains_in_stacks(model, batch, cohort, chunk, expected):
    """Model, batch and cohort alone decide, as measured: stacks are for steps that are dispatch rather than sums."""
    keys = {"algorithm.name": "fedavg", "model.name": model, "train.batch_size": batch, "data.clients": 200}
    keys |= {"train.cohort_size": cohort, "engine.chunk": chunk, "engine.kind": "local", "engine.device": "cpu"}
    experiment, _ = resolve(load(keys))
    assert (experiment.vectorize, experiment.chunk) == expected


@pytest.mark.parametrize(
    ("model", "batch", "cohort", "chunk", "expected"),
    [
        ("logistic", 10, 200, "auto", (True, 200)),
        ("mlp", 64, 200, "auto", (True, 200)),
        ("lenet5", 64, 200, "auto", (True, 57)),
        ("lenet5", 64, 20, "auto", (True, 20)),
        ("lenet5", 64, 3, "auto", (True, 3)),
        ("lenet5", 64, 200, 4, (False, 4)),
        ("lenet5", 64, 200, 100, (True, 100)),
        ("ghbm_cnn", 50, 200, "auto", (False, None)),
        ("resnet20", 50, 200, "auto", (False, None)),
    ],
)
def test_what_a_gpu_trains_in_stacks(model, batch, cohort, chunk, expected):
    """It is decided without a GPU, so that a machine without one decides the same."""
    keys = {"algorithm.name": "fedavg", "model.name": model, "train.batch_size": batch, "data.clients": 200}
    keys |= {"train.cohort_size": cohort, "engine.chunk": chunk, "engine.kind": "ray", "engine.device": "cuda"}
    experiment, _ = resolve(load(keys))
    assert (experiment.vectorize, experiment.chunk) == expected


def test_rounding_is_not_taken_for_other_samples(monkeypatch):
    """Gradients that differ by rounding, as on another processor, where no bit depends on the padding."""
    x, y = torch.randn(40, 12), torch.arange(40) % 4
    found = LoopNetwork.gradients

    def rounded(self, *args, **named):
        gradient = found(self, *args, **named)
        gradient.value.mul_(1.004)
        return gradient

    monkeypatch.setattr(LoopNetwork, "gradients", rounded)
    assert stacking_obstacle(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)), Task(), x, y) is None


class Hinting(nn.Linear):
    """A model in which the mean of the batch counts very little."""

    def forward(self, x):
        return super().forward(x + 1e-6 * x.mean(0))


def test_samples_that_depend_on_others_by_very_little_are_found():
    x, y = torch.randn(40, 12), torch.arange(40) % 4
    assert "depend on the others" in stacking_obstacle(Hinting(12, 4), Task(), x, y)
