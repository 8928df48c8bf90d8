"""Models, losses and metrics of users that can't be taken as they are: each is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import Normed
from torch import Tensor, nn

from fedray import UserError, simulate
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.result import RunResult

FEATURES, CLASSES = 12, 4


def trained(folder: Path, model: Any, **objects: Any) -> RunResult:
    keys = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
    keys |= {"algorithm.name": "fedavg", "run.rounds": 2, "run.output": str(folder)}
    return simulate(keys, data=small_source(), model=model, **objects)


class Unmade(nn.Module):
    """Lacks what nn.Module's __init__ sets."""

    def __init__(self) -> None:
        self.factor = 2

    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0]


class WithUnmade(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.unmade = Unmade()


@pytest.mark.parametrize("as_class", [False, True])
@pytest.mark.parametrize("make", [Unmade, WithUnmade])
def test_a_module_without_the_init_of_modules_is_one_line(make, as_class, tmp_path):
    with pytest.raises(UserError) as caught:
        trained(tmp_path, make if as_class else make())
    assert str(caught.value).endswith(
        "the __init__ of Unmade must begin with super().__init__(), as nn.Module needs it"
    )


@pytest.mark.parametrize("call", [{"loss": Unmade()}, {"metrics": {"own": Unmade()}}])
def test_a_loss_or_metric_without_it_is_one_line(call, tmp_path):
    with pytest.raises(UserError, match=r"(the loss|metric 'own'): the __init__ of Unmade must begin with super"):
        trained(tmp_path, Normed, **call)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "which"),
    [
        (lambda: torch.jit.script(Normed()), "it is"),
        (lambda: torch.jit.trace(Normed().eval(), torch.zeros(2, FEATURES)), "it is"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(FEATURES, CLASSES))), "its layer 0 is"),
    ],
)
def test_torchscript_is_refused_in_one_line(make, which, tmp_path):
    for model in (make(), make):
        with pytest.raises(UserError, match=rf": {which} a TorchScript module .* hand over the plain nn.Module"):
            trained(tmp_path, model)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_model_whose_arguments_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(UserError, match="must be a module, or a class or function that makes one, not Script"):
        trained(tmp_path, torch.jit.script(F.relu))


def drawing(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none") * torch.rand(len(targets))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def test_a_loss_that_draws_random_numbers_is_seeded(tmp_path):
    runs = [trained(tmp_path / str(number), layers, loss=drawing) for number in range(2)]
    assert_same(*runs)


class Counting:
    """A loss that weights its calls one after the other."""

    calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, targets, reduction="none") * (1 + self.calls % 7)


def test_a_loss_that_keeps_something_is_refused(tmp_path):
    with pytest.raises(UserError, match="the loss does not compute the same from the same numbers after another"):
        trained(tmp_path, layers, loss=Counting())


def own_weights() -> nn.Module:
    module = layers()
    with torch.no_grad():
        module[0].weight.copy_(torch.from_numpy(np.random.default_rng().normal(size=(8, FEATURES))))
    module[0].weight.requires_grad_(False)
    return module


ONE = layers()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (own_weights, r"makes another 0\.weight each time: it must draw from the global generators"),
        (lambda: ONE, "returns the same module each time"),
    ],
)
def test_a_function_that_does_not_make_the_same_model_is_refused(model, message, tmp_path):
    with pytest.raises(UserError, match=message):
        trained(tmp_path, model)


class Scratch(nn.Module):
    """Has memory that is written before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("cache", torch.full((3,), float(np.random.default_rng().normal())), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_memory_that_is_not_saved_may_hold_anything(tmp_path):
    assert trained(tmp_path, Scratch).status == "completed"
