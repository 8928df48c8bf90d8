"""Small torch modules, each with one thing that is easily got wrong, such as buffers, dropout, or tied layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedray.core.seeds import Purpose, torch_rng
from fedray.models.small import MLP, FedTripCNN, LeNet5, Linear, Logistic

IMAGE = (1, 28, 28)


class Normed(nn.Module):
    """Has BatchNorm, and whole-number, boolean and infinite buffers that training never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 4)
        self.register_buffer("places", torch.tensor([7, 3, 2**24]))
        self.register_buffer("keep", torch.tensor([True, False]))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Dropping(nn.Module):
    """Drops values in training, and nothing in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(12, 9), nn.Linear(9, 4), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.first(x))))


class AlwaysDropping(Dropping):
    """Makes a common slip: F.dropout drops in evaluation mode too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(torch.relu(self.first(x))))


class Partial(nn.Module):
    """Has a frozen layer, and one that forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(12, 9), nn.Linear(9, 4), nn.Linear(3, 5)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Unused(nn.Module):
    """Has a layer that forward never uses, and the optimizer still knows."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.last = nn.Linear(3, 5), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


class Tied(nn.Module):
    """Has the same weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.again, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.again.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.again(torch.tanh(self.inner(x)))))


def made(make: Any, seed: int = 0) -> nn.Module:
    """Returns a new module, whose initial weights follow from the seed alone."""
    with torch_rng(seed, Purpose.INIT):
        return make()


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "lenet5": (lambda: LeNet5(IMAGE, 10), IMAGE),
    "lenet5-contiguous": (lambda: LeNet5(IMAGE, 10).to(memory_format=torch.contiguous_format), IMAGE),
    "lenet5-colour": (lambda: LeNet5((3, 32, 32), 10), (3, 32, 32)),
    "cnn": (lambda: FedTripCNN(IMAGE, 10), IMAGE),
    "cnn-contiguous": (lambda: FedTripCNN(IMAGE, 10).to(memory_format=torch.contiguous_format), IMAGE),
    "mlp": (lambda: MLP((12,), 10, [9, 5]), (12,)),
    "logistic": (lambda: Logistic((12,), 10), (12,)),
    "linear": (lambda: Linear((12,), 10), (12,)),
    "unused": (Unused, (12,)),
    "tied": (Tied, (12,)),
}
