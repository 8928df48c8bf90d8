"""The channels-last layout of convolutions: when it is chosen, and that it changes nothing but the last digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedray import RunResult, UserError, simulate
from fedray.config import load
from fedray.data.source import Source
from fedray.experiment import Experiment, Own
from fedray.resolve import resolve

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
    """It reads the memory of a convolution's outputs in whatever order they are."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x)
        return self.last(torch.as_strided(found, (len(x), found[0].numel()), (found[0].numel(), 1)))


def source(side: int = 7) -> Source:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 2, side, side)).astype(np.float32), rng.integers(0, 3, 120)
    return Source("images", x[:90], y[:90], x[90:], y[90:], 3)


def experiment(model: Any, **changes: Any) -> Experiment:
    return resolve(load({**KEYS, **changes}), Own(source=source(16 if model is None else 7), model=model))[0]


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
    assert is_converted(true.model())
    assert not is_converted(false.model())
    a, b = vector(true), vector(false)
    assert 0 < np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b)


@pytest.mark.usefixtures("ray_cluster")
def test_the_bits_are_those_of_any_engine(tmp_path):
    shas = {run(tmp_path / "local").summary["model_sha256"]}
    for actors in (1, 2):
        keys = {"engine.kind": "ray", "engine.actors": actors, "engine.cpus_per_actor": 0.1}
        shas.add(run(tmp_path / str(actors), **keys).summary["model_sha256"])
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


@pytest.mark.parametrize(("model", "reason"), [(WithView, "view size is not compatible"), (Careless, "off by")])
def test_models_that_depend_on_the_layout_are_left_alone(model, reason):
    found = experiment(model)
    assert found.config.engine.channels_last is False
    assert not is_converted(found.build_model())
    (line,) = [note for note in found.notes if "channels_last" in note]
    assert reason in line
    with pytest.raises(UserError, match=f"^engine.channels_last=true: .*{reason}"):
        experiment(model, **{"engine.channels_last": True})


def test_a_run_that_an_older_fedray_began(tmp_path):
    begun = simulate(
        {**KEYS, "run.output": str(tmp_path), "engine.channels_last": False},
        data=source(), model=Wide, callbacks=[lambda report: report.round == 2],
    )  # fmt: skip
    recorded = begun.folder / "config.yaml"
    recorded.write_text(recorded.read_text().replace("  channels_last: false\n", ""))
    assert "channels_last" not in recorded.read_text()
    with pytest.raises(UserError, match=r"engine\.channels_last"):
        run(tmp_path)
    assert run(tmp_path, **{"engine.channels_last": False}).summary["status"] == "completed"
