"""A transform of the user's own changes mini-batches in training, with other random numbers each time, which repeat."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client_stacks import client_phase, data
from small_modules import made
from torch import Tensor
from torchvision.transforms import v2

import fedray
from fedray import UserError, each_sample, simulate
from fedray.core.local_training import LocalTraining
from fedray.core.seeds import Purpose, global_generators, torch_seed
from fedray.core.transform import SeededTransform
from fedray.gradients.loop import LoopNetwork
from fedray.models.small import Logistic
from fedray.testing.contracts import small_source

SETTINGS = {
    "algorithm.name": "fedavg", "run.rounds": 2, "engine.kind": "local", "train.batch_size": 5, "data.clients": 4,
    "train.local_steps": 4, "model.name": "logistic", "run.checkpoint_every": 1,
}  # fmt: skip


def noise(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape) + random.random() + np.random.rand()  # noqa: NPY002


def by_own_generator(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.default_rng().random(x.shape, dtype=np.float32))


def seldom(x: Tensor) -> Tensor:
    return x.flip(-1) if np.random.default_rng().random() < 0.2 else x


class First:
    """Draws once, when it is first called."""

    noise: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.noise is None:
            self.noise = torch.rand(x.shape[-1])
        return x + self.noise


def run(folder: Path, **given: Any) -> fedray.RunResult:
    settings = SETTINGS | {"run.output": str(folder)} | given.pop("settings", {})
    return simulate(settings, data=small_source(), **given)


def sha(folder: Path, **given: Any) -> str:
    return run(folder, **given).summary["model_sha256"]


def test_each_client_and_step_draws_its_own_numbers_whoever_shares_its_stack():
    shape, sizes = (1, 4, 4), [7, 3, 1]
    samples, network = data(shape, 11), LoopNetwork(made(lambda: Logistic(shape, 4)))
    plain = {"batch_size": 4, "local_steps": None, "local_epochs": 2}
    changed = LocalTraining(5, **plain, augment=(SeededTransform(noise),))
    together = list(client_phase(network, samples, sizes, changed).data.batches())
    untouched = list(client_phase(network, samples, sizes, LocalTraining(5, **plain)).data.batches())
    seen = set()
    for row in range(3):
        alone = list(client_phase(network, samples, sizes, changed, rows=[row]).data.batches())
        for j in range((4, 2, 2)[row]):
            count = 4 if together[j].counts is None else together[j].counts[row]
            with global_generators(torch_seed(5, Purpose.TRANSFORM, 3, 10 + row, j)):
                expected = noise(untouched[j].x[row, :count])
            assert torch.equal(together[j].x[row, :count], expected)
            assert torch.equal(alone[j].x[0, :count], expected)
            seen.add(float((expected - untouched[j].x[row, :count]).flatten()[0]))
    assert len(seen) == 8


def test_stored_bytes_are_changed_before_they_are_scaled():
    x = torch.arange(24, dtype=torch.uint8).view(1, 4, 1, 2, 3)
    changed = SeededTransform(lambda batch: 255 - batch)(x, [3], [0], 0, 0, 0)
    assert torch.equal(changed[0, :3], 255 - x[0, :3])
    assert torch.equal(changed[0, 3:], x[0, 3:])


def test_each_sample_draws_for_each_where_torchvision_draws_once():
    x = torch.arange(64.0).expand(1, 32, 1, 1, 64).contiguous()
    once, each = (
        SeededTransform(change)(x, [32], [0], 0, 0, 0)[0, :, 0, 0, 0]
        for change in (v2.RandomHorizontalFlip(), each_sample(v2.RandomHorizontalFlip()))
    )
    assert len(once.unique()) == 1
    assert 8 < (each == 63).sum() < 24


def test_several_inputs():
    x = (torch.zeros(1, 3, 2), {"age": torch.zeros(1, 3, dtype=torch.int64)})

    def older(given: Any) -> Any:
        return given[0], {"age": given[1]["age"] + 1}

    for transform in (older, each_sample(older)):
        changed = SeededTransform(transform)(x, [2], [0], 0, 0, 0)
        assert changed[1]["age"].tolist() == [[1, 1, 0]]


def test_runs_repeat_and_evaluations_see_the_samples_as_they_are(tmp_path):
    changed, again = (sha(tmp_path / name, transform=noise) for name in "ab")
    assert changed == again != sha(tmp_path / "plain")
    constant = run(tmp_path / "c", transform=torch.zeros_like, settings={"train.lr": 1e-12}).metrics
    plain = run(tmp_path / "d", settings={"train.lr": 1e-12}).metrics
    assert list(constant["test_loss"]) == list(plain["test_loss"])


def test_a_transform_of_a_file_on_ray_and_after_its_code_has_changed(tmp_path, ray_cluster, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = """
import torch
from torchvision.transforms import v2

def shifted(x):
    return x + {size} * torch.rand(len(x), *[1] * (x.dim() - 1))

change = v2.Compose([v2.Lambda(shifted), v2.Identity()])
"""
    Path("mine.py").write_text(code.format(size=1))
    named = {"data.transform": "mine.py:change"}
    local = sha(tmp_path / "local", settings=named)
    onray = {"engine.kind": "ray", "engine.actors": 2, "engine.cpus_per_actor": 0.5}
    assert sha(tmp_path / "ray", settings=named | onray) == local
    Path("mine.py").write_text(code.format(size=2))
    with pytest.raises(UserError, match=r"code of data.transform=mine.py:change"):
        sha(tmp_path / "local", settings=named | {"run.rounds": 3, "run.resume": True})


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (by_own_generator, r"transform changes the same samples otherwise each time.*must draw from them"),
        (lambda x: x[:, :-1], r"transform was given \[4, 12\] .torch.float32., but returned \[4, 11\]"),
        (lambda x: x.double(), r"but returned \[4, 12\] .torch.float64.: shape and type must stay"),
        (lambda x: (x, x), r"transform was given one array, but returned \(one array, one array\)"),
        (lambda x: None, r"transform was given one array, but returned NoneType"),
        (lambda x: x.nothing, r"transform failed: AttributeError.*\(test_transform.py, line \d+\)"),
        (seldom, r"transform changes the same samples otherwise each time"),
        (First(), r"transform changes the same samples otherwise each time"),
        (lambda x: x * float("nan"), "transform returns NaN"),
        (v2.RandomErasing, r"transform must be a function of a batch of inputs, not a class"),
        (3, r"transform must be a function of a batch of inputs, not int"),
    ],
)
def test_bad_transforms(tmp_path, transform, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, transform=transform)


def test_the_code_of_what_a_transform_consists_of_is_found():
    composed = v2.Compose([v2.Lambda(noise), each_sample(functools.partial(seldom, x=First()))])
    found = SeededTransform(composed).code
    assert noise in found
    assert seldom in found
    assert any(isinstance(each, First) for each in found)


def test_named_transforms_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def change(x):\n    return x\n")
    with pytest.raises(UserError, match=r"data.transform=mine.py:chnge: mine.py has no 'chnge' .did you mean 'change'"):
        run(tmp_path, settings={"data.transform": "mine.py:chnge"})


@pytest.mark.parametrize(
    ("transform", "line"),
    [
        (torch.zeros_like, "warning: transform draws no random numbers here"),
        (v2.RandomErasing(0.5, scale=(0.2, 0.5)), "warning: transform changes all samples of a mini-batch alike"),
        (noise, None),
        (each_sample(v2.RandomErasing(0.5)), None),
    ],
)
def test_what_a_user_should_know_of_a_transform(transform, line):
    with global_generators(0):
        found = SeededTransform(transform).check(torch.rand(16, 1, 8, 8))
    assert [each.startswith(line or "-") for each in found] == ([True] if line else [])
