"""Whether gradients are replayed, and what the user reads about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source


def decided(tmp_path: Path, model: Any = None, **changed: Any) -> tuple[bool, list[str]]:
    """Returns whether the gradients of a small run are replayed, and what the user reads about that."""
    keys = {key: value for key, value in SETTINGS.items() if model is None or not key.startswith("model.")}
    keys |= {"algorithm.name": "fedavg", "run.output": str(tmp_path), **changed}
    experiment, _ = resolve(load(keys), CustomObjects(source=small_source(), model=model))
    return experiment.replay, [line for line in experiment.notes if "replay" in line]


class Ours(nn.Sequential):
    """A class of the user's which adds a forward pass to layers of torch."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(nn.Flatten(), nn.Linear(12, width), nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OursDropping(Ours):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.cpu
def test_the_user_is_told_what_is_not_replayed_although_it_would_be_faster(tmp_path):
    assert decided(tmp_path) == (True, [])
    assert decided(tmp_path, **{"engine.replay": False}) == (False, [])
    assert decided(tmp_path, Ours, **{"engine.replay": True}) == (True, [])
    replayed, (line,) = decided(tmp_path, Ours)
    assert not replayed
    assert line.startswith("engine.replay=auto: gradients are not replayed, because Ours has user-defined code; true")


def test_nobody_is_told_of_a_model_whose_python_code_takes_no_time(tmp_path):
    assert decided(tmp_path, lambda: Ours(2 * 10**6), **{"train.batch_size": 32}) == (False, [])


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("model", "changed", "reason"),
    [
        (OursDropping, {}, "the model draws random numbers"),
        (None, {"train.precision": "bf16"}, "train.precision=bf16 is not float32"),
        (None, {"algorithm.name": "moon"}, "the loss of moon is the algorithm's own"),
    ],
)
def test_the_user_is_told_if_nothing_is_replayed_that_was_to_be(tmp_path, model, changed, reason):
    wanted = f"warning: engine.replay=true: gradients are not replayed, because {reason}"
    assert decided(tmp_path, model, **changed, **{"engine.replay": True}) == (False, [wanted])
    assert decided(tmp_path, model, **changed) == (False, [])


@pytest.mark.cpu
def test_nothing_is_replayed_where_every_module_has_a_hook(tmp_path):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        replayed, _ = decided(tmp_path)
        assert not replayed
        experiment, _ = resolve(load({**SETTINGS, "algorithm.name": "fedavg"}), CustomObjects(source=small_source()))
        assert [line for line in experiment.notes if "hooks that torch calls for every module" in line]
    finally:
        handle.remove()
    assert decided(tmp_path)[0]
