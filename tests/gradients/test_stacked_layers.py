"""Convolutions of stacks as batched products: values and gradients against torch's own, and what they consist of."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_runs import needs_compiler
from torch import Tensor, nn

from fedray.core.batches import Batch
from fedray.gradients import stacked_layers
from fedray.gradients.compiled import Compiled, trace
from fedray.gradients.recording import record
from fedray.gradients.stack import StackNetwork
from fedray.gradients.stacked_layers import StackedLayers
from fedray.models.ghbm import GHBMCNN, ResNet20
from fedray.models.small import MLP, FedTripCNN, LeNet5, Logistic

CONVOLUTIONS = ("convolution", "im2col")
NOT_WANTED = (
    *CONVOLUTIONS,
    "gather",
    "index_put",
    "scatter_add",
    "scatter_reduce",
    "cumsum",
    "index_add",
    "put_",
)
"""Parts of the names of operations that are slow in stacks, or that add atomically on a GPU, or whose gradient does."""


def found(convolve: Any, x: Tensor, w: Tensor, b: Tensor, layers: bool, traced: bool = False) -> list[Tensor]:
    """Outputs and all gradients of the clients' convolutions."""

    def of_one(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if layers:
            with StackedLayers(traced):
                out = convolve(x, w, b)
        else:
            out = convolve(x, w, b)
        return (out * torch.cos(torch.arange(out.numel(), dtype=out.dtype).view(out.shape))).sum(), out

    gradients, out = torch.func.vmap(torch.func.grad(of_one, (0, 1, 2), has_aux=True))(x, w, b)
    return [out, *gradients]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("limits", ["one part", "parts", "one product"])
@pytest.mark.parametrize("seed", range(12))
def test_any_convolution_is_that_of_torch(seed, limits, traced, monkeypatch):
    if limits == "parts":
        monkeypatch.setattr(stacked_layers, "MOST", 2000)
    monkeypatch.setattr(stacked_layers, "LEAST_PLACES", 10**9 if limits == "one product" else 2)
    draw = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=draw))]

    dims = pick(1, 2, 2, 2)
    clients, samples, channels, out = pick(1, 2, 5), pick(1, 3, 4), pick(1, 2, 5), pick(1, 3, 6)
    kernel = [pick(1, 2, 3, 5) for _ in range(dims)]
    options = {
        "stride": pick(1, 1, 2, 3), "dilation": pick(1, 1, 2), "padding": pick(0, 1, 2, [pick(0, 2)] * dims),
    }  # fmt: skip
    if options["stride"] == 1:
        options["padding"] = pick("same", "valid", 2)
    sizes = [options["dilation"] * (each - 1) + 1 + pick(0, 1, 4, 6) for each in kernel]
    x, w, b = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((clients, samples, channels, *sizes), (clients, out, channels, *kernel), (clients, out))
    )

    def convolve(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (F.conv1d if dims == 1 else F.conv2d)(x, w, b, **options)

    expected, ours = (found(convolve, x, w, b, layers, traced) for layers in (False, True))
    for one, other in zip(expected, ours, strict=True):
        assert other.shape == one.shape
        assert (one - other).norm() <= 1e-12 * one.norm()


def test_rectangles_and_other_paddings_are_right_too():
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 2, 2, 9, 7).double(), torch.randn(3, 4, 2, 3, 2).double(), torch.randn(3, 4).double()
    for options in ({"stride": (2, 1), "padding": (1, 2), "dilation": (1, 3)}, {"padding": (3, 0)}):
        expected, ours = (found(partial(F.conv2d, **options), x, w, b, layers) for layers in (False, True))
        assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(expected, ours, strict=True))
    layer = nn.Conv2d(2, 4, (3, 2), padding=1, padding_mode="circular")
    expected, ours = (found(layer._conv_forward, x, w, b, layers) for layers in (False, True))
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(expected, ours, strict=True))


def networks(model: nn.Module, **options: Any) -> tuple[StackNetwork, StackNetwork]:
    plain, ours = (StackNetwork(model, windows=windows, **options) for windows in (False, True))
    return plain, ours


def gradient_inputs(network: StackNetwork, shape: tuple[int, ...], clients: int = 3, size: int = 4) -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(clients, size, *shape, generator=draw, dtype=network.dtype)
    row = network.loaded().row
    row = row * (1 + 0.1 * torch.randn(clients, len(row), generator=draw, dtype=network.dtype))
    batch = Batch(
        x, torch.randint(0, 10, (clients, size), generator=draw), 0, [size, *range(size - 1, size - clients, -1)]
    )
    return network.layout.model(row), batch


MODELS = {
    "logistic": (Logistic, (1, 28, 28)), "mlp": (MLP, (1, 28, 28)), "lenet5": (LeNet5, (1, 28, 28)),
    "fedtrip_cnn": (FedTripCNN, (1, 28, 28)), "ghbm_cnn": (GHBMCNN, (3, 32, 32)), "resnet20": (ResNet20, (3, 16, 16)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_same_gradients(name):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    plain, ours = networks(make(shape, 10), dtype=torch.float64)
    at, batch = gradient_inputs(ours, shape)
    expected, found = plain.gradients(at, batch), ours.gradients(at, batch)
    assert (expected.value - found.value).norm() < 1e-12 * expected.value.norm()
    assert torch.allclose(expected.task_loss, found.task_loss, rtol=1e-12)
    one, other = plain.forward(at, batch.x), ours.forward(at, batch.x)
    assert torch.allclose(one.logits, other.logits, rtol=1e-10)
    traced = ours.pure_gradient(*ours.inputs_of(at, batch, 0))[0]
    assert (expected.value - traced).norm() < 1e-12 * expected.value.norm()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_recorded_has_no_slow_or_random_operation(name):
    """The gradient is recorded as on a CPU, so that it can be captured, and replayed on other numbers."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    network = StackNetwork(make(shape, 10), windows=True)
    at, batch = gradient_inputs(network, shape)
    replay = record(network.recordable_gradient, network.inputs_of(at, batch, 0))
    names = [str(node.target) for node in replay.__self__.graph.nodes if node.op == "call_function"]
    assert names
    assert not [each for each in names if any(part in each for part in NOT_WANTED)]
    other = Batch(batch.x.flip(1) * 0.5, batch.y.flip(1), 1, batch.counts)
    expected = network.gradients(at, other)
    value, losses, *_ = replay(*(leaf for leaf in network.inputs_of(at, other, 0)))
    assert torch.equal(value, expected.value)
    assert torch.equal(losses, expected.task_loss)


@pytest.mark.slow
@needs_compiler
def test_compiled_gradients_are_right():
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.Conv2d(2, 3, 2, dilation=2, bias=False)
    network = StackNetwork(nn.Sequential(first, second, nn.Flatten(), nn.Linear(12, 10)), windows=True)
    at, batch = gradient_inputs(network, (1, 8, 8))
    expected = network.gradients(at, batch).value
    network.compiled = Compiled(network.pure_gradient, [(3, 4)])
    assert (network.gradients(at, batch).value - expected).norm() < 1e-5 * expected.norm()


def test_the_compiler_gets_no_operation_that_adds_atomically():
    network = StackNetwork(LeNet5((1, 28, 28), 10), windows=True)
    at, batch = gradient_inputs(network, (1, 28, 28))
    graph = trace(network.pure_gradient, network.inputs_of(at, batch, 0)).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert not [each for each in names if any(part in each for part in (*NOT_WANTED, "col2im"))]


def test_lower_precision_is_that_of_torch():
    torch.manual_seed(0)
    plain, ours = networks(LeNet5((1, 28, 28), 10), precision="bf16")
    at, batch = gradient_inputs(ours, (1, 28, 28))
    expected, found = plain.gradients(at, batch).value, ours.gradients(at, batch).value
    assert found.dtype == expected.dtype
    assert (expected - found).norm() < 0.02 * expected.norm()


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 10))
        self[0].weight.requires_grad_(False)


def test_grouped_and_frozen_convolutions_are_left_to_torch():
    torch.manual_seed(0)
    plain, ours = networks(Frozen(), dtype=torch.float64)
    at, batch = gradient_inputs(ours, (1, 8, 8))
    assert torch.equal(plain.gradients(at, batch).value, ours.gradients(at, batch).value)


@pytest.mark.parametrize(
    ("classes", "options"),
    [
        ((5, 4), {"reduction": "none"}),
        ((5, 4), {"reduction": "none", "ignore_index": -3}),
        ((5, 4), {"reduction": "none", "ignore_index": 1}),
        ((5, 4), {"reduction": "none", "label_smoothing": 0.1}),
        ((5, 4), {}),
        ((5, 4, 3), {"reduction": "none"}),
    ],
)
def test_cross_entropy_is_that_of_torch(classes, options):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, *classes, generator=draw, dtype=torch.float64)
    logits[0, 0, 1] = -torch.inf
    targets = torch.randint(0, 4, (3, classes[0], *classes[2:]), generator=draw)
    targets[0, 0] = 0
    targets[1, 2] = options.get("ignore_index", -100)

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        each = F.cross_entropy(logits, targets, **options)
        return each.sum(), each

    plain = torch.func.vmap(torch.func.grad(loss, has_aux=True))
    expected = plain(logits, targets)
    with StackedLayers():
        found = plain(logits, targets)
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(found, expected, strict=True))


def test_a_gpu_is_where_it_is_done():
    assert not StackNetwork(Frozen()).windows
