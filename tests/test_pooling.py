"""Our max-pooling against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedray.models.pooling import max_pool2

SHAPES = [(64, 6, 28, 28), (3, 1, 4, 6), (1, 15, 2, 2), (2, 16, 10, 10), (2, 6, 7, 10), (2, 6, 10, 7)]
FORMATS = [torch.contiguous_format, torch.channels_last]


def gradients(pool, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = pool(x)
    torch.manual_seed(1)
    return y.detach(), torch.autograd.grad(y, x, torch.randn(y.shape))[0]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_maxima_and_gradients(shape, memory_format):
    x = torch.randn(shape).contiguous(memory_format=memory_format)
    ours, torchs = gradients(max_pool2, x), gradients(lambda x: F.max_pool2d(x, 2), x)
    assert torch.equal(ours[0], torchs[0])
    assert torch.equal(ours[1], torchs[1])


def test_of_equal_entries_one_gets_the_gradient():
    x = torch.randint(0, 2, (5, 6, 8, 8)).float().contiguous(memory_format=torch.channels_last)
    ours, torchs = gradients(max_pool2, x), gradients(lambda x: F.max_pool2d(x, 2), x)
    assert torch.equal(ours[0], torchs[0])
    windows = ours[1].unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)
    assert ((windows != 0).sum(4) == 1).all()
    assert torch.equal(windows.sum(4), torchs[1].unfold(2, 2, 2).unfold(3, 2, 2).flatten(4).sum(4))


def test_nothing_finite_stays_nothing_finite():
    x = torch.randn(2, 6, 4, 4)
    x[0, 0, 0, 0] = torch.nan
    assert max_pool2(x)[0, 0, 0, 0].isnan()


@pytest.mark.parametrize("transform", ["vmap", "vmap of grad", "vmap over weights alone"])
def test_over_stacks(transform):
    weights, images = torch.randn(3, 6, 1, 5, 5), torch.randn(3, 4, 1, 12, 12)

    def loss(pool, w: Tensor, x: Tensor) -> Tensor:
        return pool(F.conv2d(x, w, padding=2)).tanh().sum()

    def results(pool) -> Tensor:
        def of_one(w: Tensor, x: Tensor) -> Tensor:
            return loss(pool, w, x)

        if transform == "vmap":
            return torch.func.vmap(of_one)(weights, images)
        if transform == "vmap of grad":
            return torch.func.vmap(torch.func.grad(of_one))(weights, images)
        return torch.func.vmap(torch.func.grad(of_one), in_dims=(0, None))(weights, images[0])

    torch.testing.assert_close(results(max_pool2), results(lambda x: F.max_pool2d(x, 2)))
