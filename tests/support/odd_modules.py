"""Small modules that are odd in one way each, as users write them: the zoo of ``test_odd_modules.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


# frozen parameters that a pass changes, and other things that belong to a client


@odd()
class MovingAverage(Ours):
    """A frozen copy of a layer follows it, and is used in evaluation (mean teacher, MoCo, BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.last(torch.relu(self.slow(x)))
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.last(torch.relu(self.first(x)))


@odd()
class MovingAverageData(MovingAverage):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data
        return self.last(torch.relu(self.first(x)))


@odd(refused="makes its buffer mean in a forward pass")
class LateMean(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            mean = h.detach().mean(0)
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return h if self.mean is None else h - self.mean


@odd()
class LateMask(Ours):
    """Makes a mask when it sees the first inputs, which depends on their shape alone."""

    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.arange(h.shape[1]) % 2 == 0)
        return h * self.mask


@odd(refused="makes its parameter late.weight in its first forward pass")
class LateLayer(Ours):
    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(8, 8)
        return self.late(h)


@odd(refused="its train() or eval() writes into first.weight")
class Merging(Ours):
    """As LoRA layers do: a product is added to a weight for evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(8, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.first.weight.data += (-1 if mode else 1) * (self.b @ self.a)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h if self.merged else h + x @ self.a.t() @ self.b.t())


@odd(refused="sets requires_grad of first.bias")
class FreezingItself(Ours):
    def train(self, mode: bool = True) -> FreezingItself:
        super().train(mode)
        self.first.requires_grad_(False)
        return self


@odd(refused="keeps something from one forward pass to the next")
class StatisticsInAttributes(Ours):
    """What training leaves is used in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def between(self, h: Tensor) -> Tensor:
        if not self.training:
            return h - self.mean
        self.mean = 0.8 * self.mean + 0.2 * h.detach().mean(0)
        return h - h.mean(0)


@odd(refused="keeps something from one forward pass to the next")
class CachedWeight(Ours):
    """What it computes of its weights in the first evaluation is used in all others."""

    cache = None

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            return h
        if self.cache is None:
            self.cache = self.first.weight.detach().norm()
        return h * self.cache


@odd()
class ParameterAsBuffer(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.first.bias)

    def between(self, h: Tensor) -> Tensor:
        return h + self.view
