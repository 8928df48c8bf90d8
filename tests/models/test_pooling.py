"""Our convolution with ReLU and max-pooling against torch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedray.models import pooling
from fedray.models.pooling import conv_relu_pool

# channels, their number after it, kernel, padding, height, width
CASES = {
    "lenet5-1": (1, 6, 5, 2, 28, 28),
    "lenet5-2": (6, 16, 5, 0, 14, 14),
    "colour": (3, 6, 5, 2, 32, 32),
    "few-to-few": (6, 5, 3, 1, 8, 12),
    "oblong": (2, 3, (3, 5), (1, 0), 10, 12),
    "one-by-one": (15, 4, 1, 0, 6, 4),
    "many": (16, 20, 3, 1, 8, 8),
    "even-kernel": (1, 6, 4, 0, 13, 13),
    "odd-height": (2, 6, 5, 2, 13, 12),
    "odd-width": (2, 6, 5, 2, 12, 13),
}
FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.fixture(autouse=True)
def wide_registers(monkeypatch):
    monkeypatch.setattr(pooling, "REGISTER", 16)


def made(case: str) -> nn.Conv2d:
    torch.manual_seed(1)
    channels, out, kernel, padding, *_ = CASES[case]
    return nn.Conv2d(channels, out, kernel, padding=padding)


def images(case: str, count: int = 4) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(count, CASES[case][0], *CASES[case][4:])


class Layer(nn.Module):
    def __init__(self, conv: nn.Conv2d, layer=conv_relu_pool) -> None:
        super().__init__()
        self.conv, self.layer = conv, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.conv)


def plain(x: Tensor, conv: nn.Conv2d) -> Tensor:
    return F.max_pool2d(F.relu(F.conv2d(x, conv.weight, conv.bias, padding=conv.padding)), 2)


def results(layer, x: Tensor, conv: nn.Conv2d, first: bool) -> list[Tensor]:
    """Outputs, and gradients of the parameters and, but in a first layer, of the images."""
    x = x.detach().requires_grad_(not first)
    y = layer(x, conv)
    torch.manual_seed(3)
    wanted = [*conv.parameters()] if first else [x, *conv.parameters()]
    return [y, *torch.autograd.grad(y, wanted, torch.randn(y.shape, dtype=y.dtype))]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_torchs(case, first, memory_format):
    conv, x = made(case).to(memory_format=memory_format), images(case).contiguous(memory_format=memory_format)
    for ours, torchs in zip(results(conv_relu_pool, x, conv, first), results(plain, x, conv, first), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(conv_relu_pool(x, conv), plain(x, conv))


@pytest.mark.parametrize("register", [16, 0])
@pytest.mark.parametrize("case", CASES)
def test_it_is_torchs_own_where_ours_would_be_wrong_or_slow(case, register, monkeypatch):
    monkeypatch.setattr(pooling, "REGISTER", register)
    ours = "Layer" in type(conv_relu_pool(images(case), made(case)).grad_fn).__name__
    assert ours == (register and case not in {"many", "even-kernel", "odd-height", "odd-width"})


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("case", ["few-to-few", "oblong", "one-by-one"])
def test_gradients_are_those_of_finite_differences(case, first):
    conv, x = made(case).double(), images(case, 2)[..., :4, :6].double().requires_grad_(not first)

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(Layer(conv), {"conv.weight": weight, "conv.bias": bias}, (x,))

    assert torch.autograd.gradcheck(layer, (x, *conv.parameters()))
    assert torch.autograd.gradgradcheck(layer, (x, *conv.parameters()))


@pytest.mark.parametrize("first", [True, False])
def test_of_equal_entries_one_gets_the_gradient(first):
    conv, x = nn.Conv2d(2, 5, 3), torch.ones(3, 2, 8, 8)
    ours, torchs = results(conv_relu_pool, x, conv, first), results(plain, x, conv, first)
    for a, b in zip(ours[-2:], torchs[-2:], strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(ours[1].sum(), torchs[1].sum())


def test_nothing_finite_stays_nothing_finite():
    conv, x = made("lenet5-1"), images("lenet5-1")
    x[0, 0, 10, 10] = torch.nan
    y, of_weight, _ = results(conv_relu_pool, x, conv, True)
    assert torch.equal(y.isnan(), plain(x, conv).isnan())
    assert of_weight.isnan().all()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("case", ["lenet5-1", "lenet5-2"])
def test_bits_do_not_change(case, first):
    conv, x = made(case), images(case, 20)
    once = results(conv_relu_pool, x, conv, first)
    results(conv_relu_pool, images(case, 7), conv, first)
    assert all(map(torch.equal, once, results(conv_relu_pool, x.clone(), copy.deepcopy(conv), first)))


def test_in_lower_precision():
    conv, x = made("lenet5-2"), images("lenet5-2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, torchs = results(conv_relu_pool, x, conv, False), results(plain, x, conv, False)
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("over", ["weights and images", "weights", "images"])
@pytest.mark.parametrize("case", ["lenet5-1", "lenet5-2", "few-to-few"])
def test_over_stacks(case, over):
    convs = [copy.deepcopy(made(case)) for _ in range(3)]
    for conv in convs:
        nn.init.normal_(conv.weight)
    stacked, _ = torch.func.stack_module_state(convs)
    weights = {f"conv.{name}": value.detach() for name, value in stacked.items()}
    x = torch.stack([images(case) + number for number in range(3)])
    in_dims = (0 if "weights" in over else None, 0 if "images" in over else None)
    w = weights if "weights" in over else {name: value[0] for name, value in weights.items()}
    x = x if "images" in over else x[0]

    def gradients(layer):
        module = Layer(copy.deepcopy(convs[0]), layer)

        def loss(w: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(module, w, (x,)).tanh().sum()

        return torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims)(w, x)

    torch.testing.assert_close(gradients(conv_relu_pool), gradients(plain), rtol=1e-4, atol=1e-4)
