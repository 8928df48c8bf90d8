"""The larger models: their sizes as the papers print them, FLOPs by hand, other norms, and weights from files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import get_model, get_model_weights

from fedray import UserError, simulate
from fedray.config import load
from fedray.data.sources.source import Source
from fedray.data.sources.user_data import user_source
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.experiment.weights import load_weights
from fedray.models import build, find_model
from fedray.models.flops import forward_flops
from fedray.models.norms import replace_norms

COLOUR, TEXT = (3, 32, 32), (20,)

PRINTED = {
    "alexnet": (COLOUR, 10, 2_729_290),
    "firenet": ((3, 64, 64), 2, 646_818),
    "ghbm_cnn": (COLOUR, 10, 797_962),
    "lenet5": ((1, 28, 28), 10, 61_706),
    "mobilenet_v2": ((3, 64, 64), 2028, 4_821_740),
    "resnet18": ((3, 64, 64), 10, 11_173_962),
    "resnet20": (COLOUR, 100, 275_572),
    "resnet50": (COLOUR, 10, 23_520_842),
    "shakespeare_lstm": (TEXT, 80, 133_520),
    "stackoverflow_lstm": (TEXT, 10_004, 4_050_748 + 4 * 670),
    "vgg16": (COLOUR, 10, 134_301_514),
    "vit_b_16": ((3, 224, 224), 1000, 86_567_656),
}
"""Inputs, classes and parameters as the papers or torchvision print them, or as the layers that they print give.

Reddi et al. have 4,050,748 for StackOverflow, with one bias for each of an LSTM's gates where torch has two."""


def made(name: str, shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    return build(find_model(name), name, shape, classes, options)


@pytest.mark.parametrize("name", PRINTED)
def test_parameters(name):
    shape, classes, parameters = PRINTED[name]
    module = made(name, shape, classes)
    assert sum(p.numel() for p in module.parameters()) == parameters


@pytest.mark.parametrize(("shape", "side"), [((561,), 24), ((9, 128), 34)])
def test_lenet_of_signals(shape, side):
    """What is no image is laid out in a square of the smallest side, and is the same as that image."""
    signals, images = made("lenet5", shape, 6), made("lenet5", (1, side, side), 6)
    images.load_state_dict(signals.state_dict())
    x = torch.randn(3, *shape)
    square = torch.zeros(3, side * side)
    square[:, : x[0].numel()] = x.flatten(1)
    assert torch.equal(signals(x), images(square.view(3, 1, side, side)))


def conv(side: int, kernel: int, before: int, after: int) -> int:
    return side * side * kernel * kernel * before * after


BY_HAND = {
    "alexnet": (COLOUR, 10, conv(30, 7, 3, 64) + conv(14, 5, 64, 192) + conv(6, 3, 192, 384) + conv(6, 3, 384, 256)
                + conv(6, 3, 256, 256) + 256 * 1024 + 1024 * 10),
    "firenet": ((3, 64, 64), 2, conv(62, 3, 3, 16) + conv(29, 3, 16, 32) + conv(12, 3, 32, 64) + 2304 * 256 + 256 * 128
                + 128 * 2),
    "shakespeare_lstm": (TEXT, 80, 20 * 4 * 100 * (8 + 100 + 100 + 100) + 100 * 80),
    "stackoverflow_lstm": (TEXT, 10_004, 20 * (4 * 670 * (96 + 670) + 670 * 96 + 96 * 10_004)),
}  # fmt: skip
"""Multiply-adds of a sample's forward pass."""


@pytest.mark.parametrize("name", BY_HAND)
def test_flops_by_hand(name):
    shape, classes, products = BY_HAND[name]
    kind = torch.long if shape == TEXT else torch.float32
    assert forward_flops(made(name, shape, classes), torch.zeros(2, *shape, dtype=kind)) == 2 * products


def test_fedtrips_figures_of_alexnet():
    """It prints 2.72 million parameters, 10.42 MiB and 145.93 million multiply-adds."""
    assert BY_HAND["alexnet"][2] == 145_922_816
    assert abs(BY_HAND["alexnet"][2] / 145.93e6 - 1) < 1e-4
    assert abs(PRINTED["alexnet"][2] / 2.72e6 - 1) < 0.005
    assert abs(4 * PRINTED["alexnet"][2] / 2**20 - 10.42) < 0.02


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2", "vit_b_16", "vgg16"])
def test_flops_that_torchvision_prints(name):
    printed = get_model_weights(name).DEFAULT.value.meta["_ops"]
    options = {"stem": "imagenet"} if name.startswith("resnet") else {}
    module = made(name, (3, 224, 224), 1000, **options)
    assert forward_flops(module.eval(), torch.zeros(1, 3, 224, 224)) == pytest.approx(2e9 * printed, rel=0.02)


def test_they_are_torchvisions(tmp_path):
    """With its stem for ImageNet, ResNet-18 takes torchvision's weights and gives the same outputs."""
    torch.manual_seed(0)
    original = get_model("resnet18", weights=None, num_classes=7)
    torch.save(original.state_dict(), tmp_path / "weights.pth")
    module = made("resnet18", (3, 64, 64), 7, stem="imagenet")
    assert load_weights(module, tmp_path / "weights.pth", 7) == ([], [])
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(module.eval()(x), original.eval()(x))
    again = made("torchvision:resnet18", (3, 64, 64), 7)
    assert again.state_dict().keys() == original.state_dict().keys()


@pytest.mark.parametrize("name", ["squeezenet1_1", "googlenet", "inception_v3", "shufflenet_v2_x0_5"])
def test_any_classifier_of_torchvision(name):
    module = made(f"torchvision:{name}", (1, 80, 80), 5)
    assert module.train()(torch.zeros(2, 1, 80, 80)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("torchvision:resnet81", COLOUR, {}, "torchvision has no such classifier (did you mean 'resnet18'"),
        ("resnet18", COLOUR, {"stem": "tiny"}, "stem must be small or imagenet, not 'tiny'"),
        ("vgg16", (3, 28, 28), {}, "at least 32 x 32"),
        ("vit_b_16", (3, 32, 48), {}, "square images, not 32 x 48"),
        ("torchvision:resnet18", COLOUR, {"depth": 3}, "depth"),
        ("shakespeare_lstm", COLOUR, {}, "texts as whole numbers [length]"),
    ],
)
def test_what_they_refuse(name, shape, options, message):
    with pytest.raises(UserError) as error:
        made(name, shape, 10, **options)
    assert message in str(error.value)


def kinds(module: nn.Module) -> set[str]:
    return {type(layer).__name__ for layer in module.modules() if "Norm" in type(layer).__name__}


def test_other_norms():
    module = made("resnet18", COLOUR, 10)
    before = {name: value.clone() for name, value in module.named_parameters()}
    replace_norms(module, "group", 2, "resnet18")
    assert kinds(module) == {"GroupNorm"}
    assert not dict(module.named_buffers())
    assert {layer.num_groups for layer in module.modules() if isinstance(layer, nn.GroupNorm)} == {2}
    for name, value in module.named_parameters():
        assert torch.equal(value, before[name]), "all other weights are those that were drawn"
    replace_norms(module, "batch", 2, "resnet18")
    assert kinds(module) == {"BatchNorm2d"}
    replace_norms(module, "none", 2, "resnet18")
    assert kinds(module) == set()
    assert module(torch.zeros(2, *COLOUR)).shape == (2, 10)


def test_a_norm_in_two_places_stays_one_layer():
    shared = nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared)
    replace_norms(module, "group", 2, "mine")
    assert module[1] is module[3]
    assert isinstance(module[1], nn.GroupNorm)
    replace_norms(module, "none", 2, "mine")
    assert not [layer for layer in module.modules() if isinstance(layer, (nn.BatchNorm1d, nn.GroupNorm))]


def test_norms_of_a_run(tmp_path):
    keys = {**small(tmp_path), "model.name": "resnet20", "model.norm": "none", "run.name": "none"}
    assert "norm1.weight" not in str(simulate(keys, **data()).summary)
    experiment, _ = resolve(load({**keys, "model.norm": "batch"}), CustomObjects(source=images(16)))
    assert kinds(experiment.build_model()) == {"BatchNorm2d"}
    for changed, message in (
        ({"model.norm_groups": 4}, "model.norm_groups=4 is for model.norm=group"),
        ({"model.name": "lenet5"}, "model lenet5 has neither BatchNorm nor GroupNorm"),
        ({"model.norm": "group", "model.norm_groups": 3}, "norm has 16 channels, which 3 does not divide"),
    ):
        with pytest.raises(UserError, match=message):
            simulate({**keys, **changed}, **data())


def small(folder: Path) -> dict[str, Any]:
    return {
        "run.output": str(folder), "run.rounds": 2, "algorithm.name": "fedavg", "train.local_steps": 1,
        "train.batch_size": 4, "train.lr": 0.001, "engine.kind": "local", "run.eval_every": 2,
    }  # fmt: skip


def data(shape: tuple[int, ...] = (3, 16, 16), classes: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, *shape), dtype=np.uint8), rng.integers(0, classes, 40)
    return {"data": (x[:32], y[:32], np.arange(32) % 2), "test": (x[32:], y[32:])}


def images(side: int = 32) -> Source:
    given = data((3, side, side))
    (x, y, client), (x_test, y_test) = given["data"], given["test"]
    return user_source((x, y, client), (x_test, y_test))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("alexnet", 32), ("firenet", 64), ("mobilenet_v2", 32), ("torchvision:shufflenet_v2_x0_5", 32),
        *(pytest.param(name, 32, marks=pytest.mark.slow) for name in ("resnet18", "resnet50", "vgg16", "vit_b_16")),
    ],
)  # fmt: skip
def test_they_learn_something(name, size, tmp_path):
    settings = {**small(tmp_path), "model.name": name, "run.rounds": 3, "run.eval_every": 1}
    result = simulate(settings, **data((3, size, size)))
    assert result.summary["status"] == "completed"
    assert result.metrics["test_loss"].nunique() == 3


@pytest.mark.parametrize(("name", "per_token"), [("shakespeare_lstm", False), ("stackoverflow_lstm", True)])
def test_texts(name, per_token, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (40, 6))
    y = rng.integers(0, 9, (40, 6) if per_token else 40)
    settings = {**small(tmp_path), "model.name": name, "task.kind": "tokens" if per_token else "classification"}
    given = {"data": (x[:32], y[:32], np.arange(32) % 2), "test": (x[32:], y[32:])}
    assert simulate(settings, **given).metrics["train_loss"].notna().all()


class TestWeights:
    """Weights of torchvision's file, whose classifier has 1,000 outputs."""

    def path(self, folder: Path) -> Path:
        torch.manual_seed(0)
        torch.save(get_model("shufflenet_v2_x0_5", weights=None, num_classes=1000).state_dict(), folder / "w.pth")
        return folder / "w.pth"

    def test_the_classifier_is_replaced_and_said(self, tmp_path):
        path = self.path(tmp_path)
        keys = {**small(tmp_path), "model.name": "torchvision:shufflenet_v2_x0_5", "model.weights": str(path)}
        experiment, _ = resolve(load(keys), CustomObjects(source=images()))
        (line,) = [line for line in experiment.notes if "model.weights" in line]
        assert line.startswith("warning: model.weights: fc.weight, fc.bias begin as model.init says, because ")
        assert line.endswith("has none for 4 classes or for this head")
        tensors, module = torch.load(path), experiment.build_model().state_dict()
        assert all(torch.equal(module[name], tensors[name]) for name in tensors if not name.startswith("fc."))
        assert module["fc.weight"].shape[0] == 4
        assert torch.equal(experiment.build_model().state_dict()["fc.weight"], module["fc.weight"])

    def test_another_model_is_refused_by_its_first_tensor(self, tmp_path):
        keys = {**small(tmp_path), "model.name": "torchvision:shufflenet_v2_x1_0"}
        with pytest.raises(UserError, match=r"conv5.0.weight is|stage2.0.branch1.2.weight is \[24, 24, 1, 1\] in"):
            resolve(load({**keys, "model.weights": str(self.path(tmp_path))}), CustomObjects(source=images()))

    def test_a_larger_model_is_refused_by_its_first_further_tensor(self, tmp_path):
        torch.save(get_model("resnet34", weights=None).state_dict(), tmp_path / "resnet34.pth")
        keys = {
            **small(tmp_path),
            "model.name": "torchvision:resnet18",
            "model.weights": str(tmp_path / "resnet34.pth"),
        }
        with pytest.raises(UserError, match=r"has a tensor 'layer1.2.conv1.weight', which the model does not have"):
            resolve(load(keys), CustomObjects(source=images()))

    @pytest.mark.parametrize(("norm", "first"), [("none", "conv1.1.weight"), ("group", "conv1.1.running_mean")])
    def test_tensors_of_replaced_norms_are_told(self, tmp_path, norm, first):
        keys = {**small(tmp_path), "model.name": "torchvision:shufflenet_v2_x0_5", "model.norm": norm}
        experiment, _ = resolve(
            load({**keys, "model.weights": str(self.path(tmp_path))}), CustomObjects(source=images())
        )
        (note,) = [note for note in experiment.notes if "replaced their layers" in note]
        assert note.endswith(f"the first is {first}")
        found = experiment.build_model().state_dict()
        assert torch.equal(found["conv5.0.weight"], torch.load(self.path(tmp_path))["conv5.0.weight"])

    def test_weights_go_before_zeros(self, tmp_path):
        """The file's weights are loaded into a model of zeros, of which a classifier that is not in the file stays."""
        path = self.path(tmp_path)
        keys = {**small(tmp_path), "model.name": "torchvision:shufflenet_v2_x0_5", "model.init": "zeros"}
        experiment, _ = resolve(load({**keys, "model.weights": str(path)}), CustomObjects(source=images()))
        found = experiment.build_model().state_dict()
        assert torch.equal(found["conv5.0.weight"], torch.load(path)["conv5.0.weight"])
        assert not found["fc.weight"].any()


def test_pretrained_mobilenet():
    """The published file of torchvision, where it is there: all weights but the classifier's are its."""
    path = Path(os.environ.get("FEDRAY_DATA", "")) / "weights" / "mobilenet_v2-b0353104.pth"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    assert load_weights(made("mobilenet_v2", (3, 64, 64), 62), path, 62) == (
        ["classifier.1.weight", "classifier.1.bias"], [],
    )  # fmt: skip
    assert load_weights(made("mobilenet_v2", (3, 64, 64), 1000), path, 1000) == ([], [])
