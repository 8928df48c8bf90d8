"""The zoo of ``test_odd_modules.py``: parametrisations, random numbers, state and code in odd places."""

from __future__ import annotations

import random
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from odd_modules import CLASSES, WIDTH, Ours, odd
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

# parametrisations


@odd()
def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 8)), nn.ReLU(), nn.Linear(8, CLASSES))


@odd()
def old_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, 8)), nn.ReLU(), nn.Linear(8, CLASSES))


@odd()
def spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, 8)), nn.ReLU(), nn.Linear(8, CLASSES))


@odd()
def old_spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, 8)), nn.ReLU(), nn.Linear(8, CLASSES))


@odd()
def orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, 8)), nn.ReLU(), nn.Linear(8, CLASSES))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


@odd()
def own_parametrization() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(WIDTH, CLASSES))


@odd()
def pruned() -> nn.Module:
    layer = nn.Linear(WIDTH, 8)
    prune.random_unstructured(layer, "weight", amount=0.3)
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(8, CLASSES))


# random numbers


@odd(draws=True)
def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, CLASSES))


@odd(draws=True)
class LayerDrop(Ours):
    """Leaves a layer out at random, by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.at_times = nn.Linear(8, 8)

    def between(self, h: Tensor) -> Tensor:
        return h if self.training and random.random() < 0.5 else self.at_times(h)


@odd(draws=True)
class NumpyNoise(Ours):
    def between(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.from_numpy(np.random.randn(*h.shape)).float() if self.training else h  # noqa: NPY002


@odd(refused="keeps something from one forward pass to the next, or draws")
class OwnGenerator(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)

    def between(self, h: Tensor) -> Tensor:
        return h + torch.from_numpy(self.rng.normal(size=h.shape)).float() if self.training else h


@odd(draws=True)
def noisy_gradient() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    module[0].weight.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))
    return module


@odd()
class DrawnByNumpy(Ours):
    """Its initial weights are of NumPy's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.from_numpy(np.random.randn(8, 8)).float())  # noqa: NPY002

    def between(self, h: Tensor) -> Tensor:
        return h @ self.mix


# state of which torch does not know


@odd(refused="keeps something from one forward pass to the next")
class Remembering(Ours):
    """Adds what it made of the mini-batch before."""

    def between(self, h: Tensor) -> Tensor:
        before = getattr(self, "last_mean", None)
        self.last_mean = h.detach().mean(0)
        return h if before is None else h + before


@odd(refused="keeps something from one forward pass to the next")
class Annealed(Ours):
    """Counts its passes in Python."""

    passes = 0

    def between(self, h: Tensor) -> Tensor:
        self.passes += 1
        return h / self.passes


@odd()
class Logging(Ours):
    """Counts its passes, and does not use the number."""

    passes = 0

    def between(self, h: Tensor) -> Tensor:
        self.passes += 1
        return h


# hooks and code in odd places


@odd()
def forward_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    module[0].register_forward_hook(lambda layer, inputs, output: output * 0.5)
    return module


@odd()
def gradient_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    module[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return module


@odd()
def backward_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    module[0].register_full_backward_hook(lambda layer, of_input, of_output: None)
    return module


def doubled(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias) * 2


@odd()
def method_replaced() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    module[0].forward = MethodType(doubled, module[0])
    return module


@odd(refused="forward of its layer 0 is or holds a function that refers to the module itself")
def function_of_itself() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    layer = module[0]
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) * 2
    return module


@odd(refused="a forward hook of its layer 0 is or holds a function that refers to the module itself")
def hook_of_itself() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    module[0].register_forward_hook(lambda layer, inputs, output: output * module[2].bias.norm())
    return module


@odd(refused="calls when a gradient is accumulated")
def accumulation_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    module[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return module


@odd()
def function_in_a_layer() -> nn.Module:
    encoder = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, activation=lambda x: x.sin(), batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, WIDTH)), encoder, nn.Flatten(), nn.Linear(WIDTH, CLASSES))


@odd()
def traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, CLASSES)))


class Sign(torch.autograd.Function):
    """A step whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@odd()
class StraightThrough(Ours):
    def between(self, h: Tensor) -> Tensor:
        return Sign.apply(h)


@odd()
class Checkpointed(Ours):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda h: torch.tanh(h) * h, h, use_reentrant=False)


@odd(refused="the gradient of model CheckpointedTheOldWay can't be computed")
class CheckpointedTheOldWay(Ours):
    def between(self, h: Tensor) -> Tensor:
        return checkpoint(lambda h: torch.tanh(h) * h, h, use_reentrant=True)


@odd()
class LayerWithCheckpoint(Ours):
    """Runs a layer with weights again when gradients are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def between(self, h: Tensor) -> Tensor:
        return checkpoint(self.inner, h, use_reentrant=False)


@odd()
class GradientInside(Ours):
    """Takes a gradient within its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.first(x)
            (slope,) = torch.autograd.grad(torch.tanh(h).sum(), h, create_graph=True)
        return self.last(slope * h)


@odd()
class FrozenInside(Ours):
    """Puts a part of itself into evaluation mode in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        return super().forward(self.norm(x))
