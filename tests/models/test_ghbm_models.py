"""GHBM's CNN and ResNet-20 against the same networks in plain torch functions, and one back end against the other."""

from __future__ import annotations

import re
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedray.cli.main import main
from fedray.core.batches import Batch
from fedray.core.seeds import Purpose, torch_rng
from fedray.core.task import Task
from fedray.errors import UserError
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.stack import StackNetwork
from fedray.models import MODELS, build, find_model, options_of
from fedray.models.inspection import inspect_model
from fedray.models.stacking import samples_of_trial, stacking_obstacle

COLOUR, GREY, ODD = (3, 32, 32), (1, 28, 28), (2, 17, 22)
SHAPES = [COLOUR, GREY, ODD]
NAMES = ["ghbm_cnn", "resnet20"]
PARAMETERS = {
    ("ghbm_cnn", 10): 797_962,
    ("ghbm_cnn", 100): 815_332,
    ("resnet20", 10): 269_722,
    ("resnet20", 100): 275_572,
}


def made(name: str, shape: tuple[int, ...] = COLOUR, classes: int = 10, seed: int = 0) -> nn.Module:
    with torch_rng(seed, Purpose.INIT):
        return build(find_model(name), name, shape, classes, {})


def jittered(name: str, shape: tuple[int, ...] = COLOUR, seed: int = 0) -> nn.Module:
    """With norms and biases that are not ones and zeros, which would hide much."""
    module = made(name, shape, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cnn(w: list[Tensor], x: Tensor) -> Tensor:
    for kernel, bias in (w[0:2], w[2:4]):
        x = F.max_pool2d(F.conv2d(x, kernel, bias).clamp(min=0), kernel_size=2, stride=2)
    x = x.reshape(len(x), -1)
    for matrix, bias in (w[4:6], w[6:8]):
        x = (x @ matrix.T + bias).clamp(min=0)
    return x @ w[8].T + w[9]


def resnet(w: list[Tensor], x: Tensor) -> Tensor:
    *rest, matrix, bias = w
    weights = iter(rest)

    def conv_norm(x: Tensor, stride: int = 1) -> Tensor:
        y = F.conv2d(x, next(weights), stride=stride, padding=1)
        halves = []
        for half in y.chunk(2, dim=1):
            centred = half - half.mean((1, 2, 3), keepdim=True)
            halves.append(centred / (centred.pow(2).mean((1, 2, 3), keepdim=True) + 1e-5).sqrt())
        return torch.cat(halves, 1) * next(weights).view(1, -1, 1, 1) + next(weights).view(1, -1, 1, 1)

    x = conv_norm(x).clamp(min=0)
    for stage in range(3):
        for block in range(3):
            down = stage > 0 and block == 0
            y = conv_norm(conv_norm(x, stride=2 if down else 1).clamp(min=0))
            if down:
                zeros = y.new_zeros(len(y), x.shape[1] // 2, *y.shape[2:])
                x = torch.cat([zeros, x[:, :, ::2, ::2], zeros], 1)
            x = (x + y).clamp(min=0)
    assert next(weights, None) is None
    return x.flatten(2).mean(2) @ matrix.T + bias


REFERENCES = {"ghbm_cnn": cnn, "resnet20": resnet}


@pytest.mark.parametrize(("name", "classes"), PARAMETERS)
def test_parameters(name, classes):
    assert sum(p.numel() for p in made(name, classes=classes).parameters()) == PARAMETERS[name, classes]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_against_plain_functions(name, shape):
    module = jittered(name, shape).double()
    parameters, x = list(module.parameters()), images(5, *shape).double()
    targets = torch.arange(5) % 10
    ours, plain = module(x), REFERENCES[name](parameters, x)
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(F.cross_entropy(z, targets), parameters) for z in (ours, plain)]
    for p, own, other in zip(parameters, *gradients, strict=True):
        assert own.any()
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-10, msg=lambda text, p=p: f"{p.shape}: {text}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_stacks_of_clients_train_as_one_after_another(name, shape):
    """Three clients with models of their own, batches of 6, 4 and 1 real samples."""
    networks = [kind(made(name, shape)) for kind in (LoopNetwork, StackNetwork)]
    layout = networks[0].layout
    at = layout.model(torch.stack([layout.pack(jittered(name, shape, seed)).row for seed in range(3)]))
    x, y = images(3, 6, *shape), torch.arange(18).view(3, 6) % 10
    loop, stack = (network.gradients(at, Batch(x, y, 0, [6, 4, 1])) for network in networks)
    off = (loop.value - stack.value).norm(dim=1) / loop.value.norm(dim=1)
    # rounding may take a ReLU's input to the other side of zero, which changes a client's gradient by some 1e-4
    assert off.max() < 1e-3
    assert off.min() < 1e-5
    torch.testing.assert_close(loop.task_loss, stack.task_loss)
    assert torch.equal(loop.followed[0], stack.followed[0])
    logits = [network.forward(at, x).logits for network in networks]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_facts(name):
    """FLOPs of the forward pass by hand, two per multiplication; both models can be batched over clients."""
    if name == "ghbm_cnn":
        macs = 28**2 * 64 * 3 * 25 + 10**2 * 64 * 64 * 25 + 1600 * 384 + 384 * 192 + 192 * 10
    else:
        stages = [(32**2, 16, 16), (16**2, 16, 32), (8**2, 32, 64)]
        macs = 32**2 * 3 * 16 * 9 + 64 * 10
        macs += sum(9 * pixels * (before * width + 5 * width * width) for pixels, before, width in stages)
    facts = inspect_model(made(name), torch.zeros(2, *COLOUR), name)
    assert facts.flops == 2 * macs
    count = samples_of_trial(4)
    assert stacking_obstacle(made(name), Task(), images(count, *COLOUR), torch.arange(count) % 10) is None
    assert not facts.draws
    assert facts.buffers == 0


def test_resnets_weights_are_drawn_as_he_et_al_say():
    """N(0, 2 / fan-in): standard deviations within five of their own, and tails that a uniform draw has not."""
    for layer in made("resnet20", classes=100).modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            weight = layer.weight.detach()
            scaled = weight / sqrt(2 / weight[0].numel())
            assert abs(scaled.mean()) < 5 / sqrt(weight.numel())
            assert abs(scaled.std() - 1) < 5 / sqrt(2 * weight.numel())
            assert scaled.abs().max() > 2
        elif isinstance(layer, nn.GroupNorm):
            assert layer.num_groups == 2
            assert (layer.weight == 1).all()
            assert (layer.bias == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_channels_last(name):
    network = LoopNetwork(made(name))
    kernels = [p for p in network.module.parameters() if p.dim() == 4]
    assert kernels
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in kernels)


@pytest.mark.parametrize(("name", "least"), [("ghbm_cnn", 16), ("resnet20", 4)])
def test_images_that_are_too_small(name, least):
    assert made(name, (3, least, least))(images(2, 3, least, least)).shape == (2, 10)
    for shape in [(3, least - 1, 32), (3, 32, least - 1), (3072,), (32, 32)]:
        with pytest.raises(UserError, match=rf"model {name} can't be made.*at least {least} x {least}"):
            made(name, shape)


def test_they_are_listed(capsys):
    assert all(name in MODELS and not options_of(MODELS[name]) for name in NAMES)
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ghbm_cnn .*\n    The CNN that the authors of GHBM", text, re.MULTILINE)
    assert re.search(r"^resnet20 .*\n    ResNet-20", text, re.MULTILINE)
