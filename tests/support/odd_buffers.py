"""The zoo of ``test_odd_modules.py``: modules with buffers of every kind, and with normalisation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from odd_modules import CLASSES, WIDTH, Ours, odd
from torch import Tensor, nn

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


@odd(refused="changes the type of its buffer kept from torch.int64 to torch.float32")
class ChangingType(WithBuffer):
    """A mean that was registered as a whole number."""

    value = torch.tensor(0)

    def between(self, h: Tensor) -> Tensor:
        self.kept = 0.9 * self.kept + 0.1 * h.detach().mean()
        return h
