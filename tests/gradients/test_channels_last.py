"""The channels-last layout of convolutions: when it is chosen, and that it changes nothing but the last digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedray import RunResult, UserError, evaluate, simulate
from fedray.config import load
from fedray.data.sources.source import Source
from fedray.experiment.custom import CustomObjects
from fedray.experiment.experiment import Experiment
from fedray.experiment.placement import Surroundings
from fedray.experiment.resolve import resolve
from fedray.testing.pickling import pickling_workers

pytestmark = pytest.mark.cpu
"""These are decisions for CPUs."""

KEYS: dict[str, Any] = {
    "data.clients": 6,
    "data.partition.kind": "iid",
    "train.cohort_size": 4,
    "train.local_steps": 3,
    "train.batch_size": 8,
    "train.lr": 0.1,
    "run.rounds": 4,
    "engine.kind": "local",
    "engine.compile": False,
    "engine.vectorize": False,
}


class Wide(nn.Module):
    """A network with dropout and running statistics."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, channels: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Conv2d(input_shape[0], channels, 3)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, bias=False)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(channels * (input_shape[1] - 4) * (input_shape[2] - 4), classes)

    def features(self, x: Tensor) -> Tensor:
        return self.drop(self.second(self.norm(self.first(x)).relu()).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x).flatten(1))


class WithView(Wide):
    """It reads the memory of a convolution's outputs as if they were contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.features(x).view(len(x), -1))


class Careless(Wide):
    """It reads the memory of a convolution's outputs in whatever order they are. Its last layer hides this at first."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x)
        return self.last(torch.as_strided(found, (len(x), found[0].numel()), (found[0].numel(), 1)))


class InstanceNormed(Wide):
    """torch 2.15 finds a wrong gradient of this norm for a single sample, if the gradient that comes in has channels
    last."""

    def features(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.instance_norm(self.first(x).relu())).relu()


class OwnOperation(torch.autograd.Function):
    """A user's operation, which reads the memory of a gradient as if it were contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view(-1).view(gradient.shape)


class WithOwnOperation(Wide):
    def features(self, x: Tensor) -> Tensor:
        return self.second(OwnOperation.apply(self.first(x)).relu())


class Hooked(Wide):
    """Its hook reads the memory of a weight's gradient as if it were contiguous."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.second.weight.register_hook(lambda gradient: gradient - gradient.view(-1).mean())


class WithVolume(Wide):
    """It has a parameter of five dimensions, and a method `to` that takes no memory format."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(input_shape, classes)
        self.volume = nn.Conv3d(1, 1, 3, padding=1)

    def to(self, device: Any = None, dtype: Any = None) -> WithVolume:
        return super().to(device=device, dtype=dtype)

    def features(self, x: Tensor) -> Tensor:
        return self.volume(self.second(self.first(x))[:, None])[:, 0]


class AlwaysDrawing(Wide):
    """It draws random numbers in evaluation too."""

    def features(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().features(x), 0.5)


def source(side: int = 7) -> Source:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 2, side, side)).astype(np.float32), rng.integers(0, 3, 120)
    return Source("images", x[:90], y[:90], x[90:], y[90:], 3)


def experiment(model: Any, **changes: Any) -> Experiment:
    return resolve(load({**KEYS, **changes}), CustomObjects(source=source(16 if model is None else 7), model=model))[0]


def is_converted(module: nn.Module) -> bool:
    return module.second.weight.is_contiguous(memory_format=torch.channels_last)


def run(folder: Any, **changes: Any) -> RunResult:
    return simulate({**KEYS, "run.output": str(folder), **changes}, data=source(), model=Wide)


def vector(result: RunResult) -> np.ndarray:
    return np.concatenate([each.detach().double().numpy().ravel() for each in result.model().state_dict().values()])


def test_results_agree_but_for_rounding(tmp_path):
    # dropout would draw other numbers in another layout
    own = {"model.dropout": 0, "algorithm.name": "scaffold"}
    true, false = (run(tmp_path / str(asked), **own, **{"engine.channels_last": asked}) for asked in (True, False))
    # whatever the training's layout, the user's copy has torch's
    assert not is_converted(true.model())
    assert not is_converted(false.model())
    a, b = vector(true), vector(false)
    assert 0 < np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)


@pytest.mark.parametrize("model", [Wide, WithVolume])
def test_a_user_gets_models_in_the_layout_of_torch(tmp_path, model):
    """Otherwise parameters_to_vector raises."""
    found = []
    callback = lambda report: found.append(report.model())  # noqa: E731
    result = simulate({**KEYS, "run.output": str(tmp_path)}, data=source(), model=model, callbacks=[callback])
    assert all(torch.nn.utils.parameters_to_vector(each.parameters()).isfinite().all() for each in found)
    last = torch.nn.utils.parameters_to_vector(result.model().parameters())
    assert torch.equal(last, torch.nn.utils.parameters_to_vector(found[-1].parameters()))


def test_the_bits_are_those_of_any_engine(tmp_path):
    shas = {run(tmp_path / "local").summary["model_sha256"]}
    for actors in (1, 2):
        with pickling_workers(actors):
            shas.add(run(tmp_path / str(actors)).summary["model_sha256"])
    stopped = {**KEYS, "run.output": str(tmp_path / "stopped"), "run.checkpoint_every": 1}
    simulate(stopped, data=source(), model=Wide, callbacks=[lambda report: report.round == 2])
    shas.add(simulate(stopped, data=source(), model=Wide).summary["model_sha256"])
    assert len(shas) == 1


@pytest.mark.parametrize(
    ("model", "changes", "chosen"),
    [
        (Wide, {}, True),
        (Wide, {"model.channels": 15}, False),
        (Wide, {"model.channels": 15, "engine.channels_last": True}, True),
        (Wide, {"engine.channels_last": False}, False),
        (None, {"model.name": "mlp"}, False),
        # it chooses its layout itself
        (None, {"model.name": "ghbm_cnn"}, False),
        (None, {"model.name": "resnet18"}, True),
        (WithVolume, {}, True),
        (AlwaysDrawing, {}, True),
    ],
)
def test_wide_convolutions_are_converted(model, changes, chosen):
    found = experiment(model, **changes)
    assert found.config.engine.channels_last is chosen
    if model is not None:
        # so are the initial weights of single clients
        assert [is_converted(found.build_model(client)) for client in (None, 3)] == [chosen, chosen]


def test_stacks_are_not_converted():
    model = nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))
    for vectorize in (True, False):
        assert experiment(model, **{"engine.vectorize": vectorize}).config.engine.channels_last is not vectorize


def test_weights_of_one_channel_are_converted():
    """Both layouts of such a weight count as contiguous."""
    model = nn.Sequential(nn.Conv2d(2, 32, 3, groups=2), nn.Flatten(), nn.Linear(800, 3))
    assert experiment(model).config.engine.channels_last is True
    # now it has chosen the layout itself
    model.to(memory_format=torch.channels_last)
    assert experiment(model).config.engine.channels_last is False


@pytest.mark.parametrize(
    ("channels", "changes", "chosen"),
    [
        (16, {}, True),
        (15, {}, False),
        (16, {"engine.channels_last": False}, False),
        (16, {"train.precision": "tf32"}, True),
        (16, {"engine.vectorize": True}, False),
    ],
)
def test_a_gpu_gets_them_where_a_cpu_does(channels, changes, chosen):
    model = nn.Sequential(nn.Conv2d(2, channels, 3), nn.ReLU(), nn.Flatten(), nn.Linear(25 * channels, 3))
    settings = load({**KEYS, "engine.kind": "ray", **changes})
    found, _ = resolve(settings, CustomObjects(source=source(), model=model), Surroundings(lambda folder: "cuda"))
    assert found.config.engine.channels_last is chosen


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (WithView, "view size is not compatible"),
        (WithOwnOperation, "view size is not compatible"),
        (Hooked, "view size is not compatible"),
        (Careless, "off by"),
        (InstanceNormed, "off by"),
    ],
)
def test_models_that_depend_on_the_layout_are_left_alone(model, reason):
    found = experiment(model)
    assert found.config.engine.channels_last is False
    assert not is_converted(found.build_model())
    (line,) = [note for note in found.notes if "channels_last" in note]
    assert reason in line
    with pytest.raises(UserError, match=f"^engine.channels_last=true: .*{reason}"):
        experiment(model, **{"engine.channels_last": True})


@pytest.mark.parametrize("kind", ["loss", "metrics"])
@pytest.mark.parametrize("read", [Tensor.flatten, lambda errors, start: errors.view(len(errors), -1)])
def test_a_loss_or_metric_that_depends_on_the_layout(kind, read):
    def error(outputs: Tensor, targets: Tensor) -> Tensor:
        return read((outputs - targets).square(), 1).mean(1)

    x, y = source().x_train, np.random.default_rng(1).normal(size=(90, 3, 7, 7)).astype(np.float32)
    images = Source("pairs", x, y, x[:20], y[:20], 3, task="regression")
    model = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.Conv2d(16, 3, 1))
    own = {"loss": error} if kind == "loss" else {"metrics": {"error": error}}
    found, _ = resolve(load({**KEYS, "algorithm.name": "fedavg"}), CustomObjects(source=images, model=model, **own))
    assert found.config.engine.channels_last is (read is Tensor.flatten)


def test_a_run_that_an_older_fedray_began(tmp_path):
    """It converted nothing, and the run goes on so."""
    keys = {**KEYS, "run.output": str(tmp_path), "run.name": "run"}
    begun = simulate(
        {**keys, "engine.channels_last": False},
        data=source(), model=Wide, callbacks=[lambda report: report.round == 2],
    )  # fmt: skip
    recorded = begun.folder / "config.yaml"
    recorded.write_text(recorded.read_text().replace("  channels_last: false\n", ""))
    assert "channels_last" not in recorded.read_text()
    ended = simulate(keys, data=source(), model=Wide)
    assert "channels_last: false" in recorded.read_text()
    unbroken = simulate({**keys, "run.name": "unbroken", "engine.channels_last": False}, data=source(), model=Wide)
    assert ended.summary["model_sha256"] == unbroken.summary["model_sha256"]
    with pytest.raises(UserError, match=r"engine\.channels_last differs"):
        simulate({**keys, "engine.channels_last": True}, data=source(), model=Wide)


@pytest.mark.parametrize("chosen", [True, False])
def test_an_evaluation_has_the_layout_of_the_run(chosen, tmp_path):
    done = run(tmp_path, **{"engine.channels_last": chosen, "run.name": "run"})
    found = evaluate(done.folder, data=source(), model=Wide)
    assert found.metrics["loss"] == done.metrics["test_loss"].iloc[-1]
