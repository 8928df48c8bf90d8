"""Small modules that are odd in one way each, as users write them: the zoo of ``test_odd_modules.py``."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from fedray.core.seeds import Purpose, every_rng

WIDTH, CLASSES, WORDS, LENGTH = 12, 4, 9, 5
IMAGE = (2, 6, 6)


class Odd(NamedTuple):
    """A module of the zoo: how it is made, what inputs it takes, and what a user reads who hands it over, if it is
    refused. ``draws`` says that its passes draw random numbers, and ``coarse`` that it computes with few bits."""

    make: Callable[[], nn.Module]
    inputs: str = "flat"
    refused: str | None = None
    draws: bool = False
    coarse: bool = False


ZOO: dict[str, Odd] = {}


def odd(
    inputs: str = "flat", refused: str | None = None, draws: bool = False, coarse: bool = False
) -> Callable[[Any], Any]:
    """Puts a class, or a function that makes a module, into the zoo under its name."""

    def add(make: Any) -> Any:
        ZOO[make.__name__] = Odd(make, inputs, refused, draws, coarse)
        return make

    return add


def made(name: str) -> nn.Module:
    """Returns a new module of the zoo. Its initial weights are the same each time."""
    with every_rng(5, Purpose.INIT):
        return ZOO[name].make()


class Ours(nn.Module):
    """A layer, something odd, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.between(self.first(x))))


# layers and parameters with several names


@odd()
def layer_used_twice() -> nn.Module:
    again = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(again, nn.Tanh(), again, nn.Tanh(), again, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


@odd()
def norm_used_twice() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(norm, nn.Linear(WIDTH, WIDTH), norm, nn.ReLU(), nn.Linear(WIDTH, CLASSES))


@odd()
class SecondName(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.alias = self.first


@odd()
class TiedTransposed(nn.Module):
    """An auto-encoder whose decoder has the weights of its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bias, self.last = nn.Linear(WIDTH, 8), nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.bias))


@odd("tokens")
class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.score, self.last = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS, bias=False), nn.Linear(WORDS, 4)
        self.score.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.score(self.words(x).mean(1)))


@odd()
class TiedBuffer(Ours):
    """Two layers share a buffer that both change."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.two.running_mean = self.one.running_mean

    def between(self, h: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(h)))


@odd(refused="are two tensors in the same memory")
class SharedMemory(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.view = nn.Parameter(self.first.weight.data[:2])


@odd()
class UnusedLayer(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


@odd()
class UsedByValue(Ours):
    """A layer is used in some mini-batches, so that its gradient is None in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.at_times = nn.Linear(8, 8)

    def between(self, h: Tensor) -> Tensor:
        return self.at_times(h) if bool(h.sum() > 0) else h


@odd()
class FrozenLayer(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


# forward passes that write into parameters


@odd("tokens")
def short_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 6, max_norm=0.5), nn.Flatten(), nn.Linear(6 * LENGTH, CLASSES))


@odd("tokens")
def short_embedding_bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(WORDS, 6, max_norm=0.7), nn.Linear(6, CLASSES))


@odd()
class Clamped(Ours):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.1, 0.1)
        return h


@odd()
class ClampedData(Ours):
    def between(self, h: Tensor) -> Tensor:
        self.last.weight.data.clamp_(-0.1, 0.1)
        return h


@odd()
class ShortRows(Ours):
    """Divides weights by their norm, but only where it is too large."""

    def between(self, h: Tensor) -> Tensor:
        norm = self.last.weight.data.norm()
        if float(norm) > 0.9:
            self.last.weight.data.div_(norm)
        return h


@odd()
class Quantised(Ours):
    """Puts other memory in the place of a parameter's."""

    def between(self, h: Tensor) -> Tensor:
        self.last.weight.data = (self.last.weight.data * 64).round() / 64
        return h


@odd()
class LargeAndClamped(Ours):
    """So large that no copy of it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(8, 13000), nn.Linear(13000, 8)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.back.weight.clamp_(-0.005, 0.005)
        return self.back(torch.relu(self.wide(h)))


@odd(refused="puts another tensor in the place of its parameter last.weight")
class Replaced(Ours):
    def between(self, h: Tensor) -> Tensor:
        self.last.weight = nn.Parameter(self.last.weight.detach() * 0.99)
        return h


# buffers of every kind


class WithBuffer(Ours):
    value = torch.tensor([0.5])

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", self.value.clone())


@odd()
class RareValues(WithBuffer):
    """Nobody changes them."""

    value = torch.tensor([-torch.inf, torch.nan, -0.0, 1e-40])


@odd()
class LargeNumbers(WithBuffer):
    value = torch.tensor([2147483647, -(2**62) + 1, 2**24 + 1])


@odd()
class DoublePrecision(WithBuffer):
    value = torch.tensor([1 / 3, 1e-300, 1e300], dtype=torch.float64)

    def between(self, h: Tensor) -> Tensor:
        return h * self.kept[0].float()


@odd()
class ComplexBuffer(WithBuffer):
    value = torch.tensor([1 + 2j, 0.3 - 1j])

    def between(self, h: Tensor) -> Tensor:
        return (h * self.kept[0]).real


@odd()
class Counter(WithBuffer):
    """Counts further than float32 can."""

    value = torch.tensor(2**24 - 2)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.kept += 1
        return h


@odd()
class CounterAnew(WithBuffer):
    """Puts a new tensor in the place of a buffer."""

    value = torch.tensor(5)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.kept = self.kept + 1
        return h * (1 + 0.01 * self.kept)


@odd()
class CountsEverywhere(WithBuffer):
    """Counts in evaluation, too, where the count changes what is computed."""

    def between(self, h: Tensor) -> Tensor:
        self.kept.mul_(1.01)
        return h * self.kept


@odd()
class DoubleMean(WithBuffer):
    value = torch.zeros(8, dtype=torch.float64)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.kept.lerp_(h.detach().double().mean(0), 0.1)
        return h - self.kept.float()


@odd()
class ComplexMean(WithBuffer):
    value = torch.zeros(8, dtype=torch.complex64)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.kept += 0.1 * torch.exp(1j * h.detach()).mean(0)
        return h + self.kept.imag


@odd(coarse=True)
class HalfMean(WithBuffer):
    value = torch.zeros(8, dtype=torch.bfloat16)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.kept.add_(h.detach().mean(0).bfloat16(), alpha=0.25)
        return h - self.kept.float()


@odd()
class BoolFlag(WithBuffer):
    value = torch.tensor(False)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.kept.fill_(True)
        return h * (0.5 if bool(self.kept) else 1.0)


@odd()
class NotSaved(Ours):
    """A buffer that is not in the state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.linspace(0.1, 2, 8), persistent=False)

    def between(self, h: Tensor) -> Tensor:
        return h * self.places


@odd()
class NotSavedMean(Ours):
    """A buffer that is not in the state_dict, and that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(h.detach().mean(0), 0.2)
        return h - self.mean


@odd(refused="changes the shape of the model's buffer kept")
class Growing(WithBuffer):
    def between(self, h: Tensor) -> Tensor:
        self.kept = torch.cat([self.kept, self.kept[:1]])
        return h


@odd(refused="has changed its buffer kept, but did not when it was tried")
class RarelyChanged(WithBuffer):
    def between(self, h: Tensor) -> Tensor:
        if len(h) == 4:
            self.kept += 1
        return h


# normalisation


@odd("image")
def batch_norm_of_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))


@odd("image")
def pooled_batch_norm() -> nn.Module:
    """One layer has a single value per channel of a single sample, and the other has many."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4)
    )


@odd()
def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


@odd()
def cumulative_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, CLASSES))


@odd(refused="no running statistics to use instead")
def untracked_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, CLASSES))


@odd("image")
def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm2d(4, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(64, CLASSES))


@odd("image")
def group_and_layer_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, CLASSES))


@odd()
class FrozenStatistics(Ours):
    """Its own train() keeps a layer in evaluation mode, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


@odd(refused="can't be trained on a mini-batch of one sample")
class OwnBatchNorm(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def between(self, h: Tensor) -> Tensor:
        return F.batch_norm(h, self.mean, self.var, training=self.training)


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


class Scaled(Ours):
    """Computes with what is in ``ops``."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Any = None

    def between(self, h: Tensor) -> Tensor:
        op = self.ops["scale"][0] if isinstance(self.ops, dict) else self.ops
        found: Tensor = op(h)
        return found


def scaled(h: Tensor, layer: nn.Linear) -> Tensor:
    return h * layer.weight.norm()


@odd(refused="ops of its layer Scaled is or holds a function that refers to the module itself")
def function_in_containers() -> nn.Module:
    module = Scaled()
    layer = module.last
    module.ops = {"scale": [lambda h: scaled(h, layer)]}
    return module


@odd(refused="ops of its layer Scaled is or holds a function that refers to the module itself")
def function_in_a_partial() -> nn.Module:
    module = Scaled()
    held = [module.last]
    module.ops = partial(lambda factor, h: factor * scaled(h, held[0]), 2)
    return module


@odd(refused="ops of its layer Scaled is or holds a function that refers to the module itself")
def default_of_a_function() -> nn.Module:
    module = Scaled()
    module.ops = lambda h, layer=module.last: scaled(h, layer)
    return module


@odd(refused="ops of its layer Scaled is or holds a function that refers to the module itself")
def function_in_a_function() -> nn.Module:
    module = Scaled()
    layer = module.last

    def inner(h: Tensor) -> Tensor:
        return scaled(h, layer)

    module.ops = lambda h: inner(h)
    return module


@odd(refused="parent of its layer WeaklyItself is or holds a weak reference that refers to the module itself")
class WeaklyItself(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.parent = weakref.ref(self)

    def between(self, h: Tensor) -> Tensor:
        parent = self.parent()
        return h if parent is None else scaled(h, parent.last)


@odd()
class KeptHandle(Ours):
    """Keeps the handle of its hook, in which there are weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = self.first.register_forward_hook(self.hook)

    def hook(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.last.weight.norm()


@odd()
def partial_of_a_layer() -> nn.Module:
    """Of what is in a partial, and of what a method is bound to, a copy has copies."""
    module = Scaled()
    module.ops = {"scale": [partial(scaled, layer=module.last)]}
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


# kinds of layers and tensors


@odd("tokens")
def sparse_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 6, sparse=True), nn.Flatten(), nn.Linear(6 * LENGTH, CLASSES))


@odd()
def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(CLASSES))


@odd(refused="is of complex numbers")
class ComplexParameter(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def between(self, h: Tensor) -> Tensor:
        return (h * self.phase).real


@odd()
def double_module() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)).double()


@odd(refused="can't take inputs")
class DoublePart(Ours):
    """Computes a part in float64, with a layer of that type."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(8, 8).double()

    def between(self, h: Tensor) -> Tensor:
        return self.fine(h.double()).float()


@odd()
class DoubleInside(Ours):
    """Computes a part in float64, with tensors of its own."""

    def between(self, h: Tensor) -> Tensor:
        return torch.logsumexp(h.double(), 1, keepdim=True).float() * h


@odd()
class ScalarParameter(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0))

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale


@odd()
class Strided(Ours):
    """Has a parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.linspace(-1, 1, 128).view(8, 16)[:, ::2])

    def between(self, h: Tensor) -> Tensor:
        return h @ self.mix


@odd("tokens")
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(WORDS, 6), nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(self.words(x))[0][:, -1])


@odd("tokens")
class PackedRecurrent(nn.Module):
    """Words of number 0 at the end are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(WORDS, 6, padding_idx=0), nn.GRU(6, 5, batch_first=True)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1)
        packed = pack_padded_sequence(self.words(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.cells(packed)[0], batch_first=True)
        return self.last(found.sum(1))


@odd("tokens")
class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.heads = nn.Embedding(WORDS, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, CLASSES)
        self.register_buffer("mask", torch.triu(torch.full((LENGTH, LENGTH), -torch.inf), 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        return self.last(self.heads(h, h, h, attn_mask=self.mask, need_weights=False)[0].mean(1))
