"""The models and the data of the workloads."""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import SAMPLES, Workload


class LeNet5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x), inplace=True), 2)
        x = F.max_pool2d(F.relu(self.conv2(x), inplace=True), 2)
        x = F.relu(self.fc1(x.flatten(1)), inplace=True)
        return self.fc3(F.relu(self.fc2(x), inplace=True))


class Logistic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 10))


class SimpleCNN(nn.Sequential):
    """pfl-research's simple_cnn for images of 3 x 32 x 32, without its dropout (0.25 and 0.5)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(12_544, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
        for layer in self:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)


def mobilenet_v2() -> nn.Module:
    # the other simulators' environments lack torchvision, and this model is not used there
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(num_classes=10)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet5": LeNet5, "logistic": Logistic, "problems:SimpleCNN": SimpleCNN, "mobilenet_v2": mobilenet_v2
}  # fmt: skip


def load(source: str, train: bool = True) -> tuple[Tensor, Tensor]:
    """Images as normalised float32 [n, channels, height, width], and labels."""
    return {"mnist": _mnist, "cifar10": _cifar10}[source](train)


def shares(work: Workload) -> Tensor:
    """The samples of each client, [clients, samples]."""
    generator, total = torch.Generator().manual_seed(0), SAMPLES[work.source]
    if work.overlap:
        return torch.randint(total, (work.clients, work.samples), generator=generator)
    return torch.randperm(total, generator=generator)[: work.clients * work.samples].view(work.clients, work.samples)


def drawn(work: Workload, share: Tensor) -> Tensor:
    """The samples of a client's steps, in the order in which it uses them: passes over all of them."""
    count = work.steps * work.batch
    passes = math.ceil(count / work.samples)
    return share[torch.cat([torch.randperm(work.samples) for _ in range(passes)])[:count]]


def _mnist(train: bool) -> tuple[Tensor, Tensor]:
    part = "train" if train else "t10k"
    raw = [_raw(f"{part}-{kind}-ubyte", "MNIST/raw", "mnist/raw", "raw") for kind in ("images-idx3", "labels-idx1")]
    x = torch.from_numpy(np.frombuffer(raw[0], np.uint8, offset=16).astype(np.float32)).view(-1, 1, 28, 28)
    y = torch.from_numpy(np.frombuffer(raw[1], np.uint8, offset=8).astype(np.int64))
    return x.div_(255).sub_(0.1307).div_(0.3081), y


def _cifar10(train: bool) -> tuple[Tensor, Tensor]:
    names = [f"data_batch_{k}" for k in range(1, 6)] if train else ["test_batch"]
    raw = b"".join(_raw(f"{name}.bin", "cifar-10-batches-bin") for name in names)
    rows = np.frombuffer(raw, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    x = torch.from_numpy(rows[:, 1:].astype(np.float32)).view(-1, 3, 32, 32)
    mean, deviation = (torch.tensor(v)[:, None, None] for v in ([0.491, 0.482, 0.447], [0.247, 0.243, 0.262]))
    return x.div_(255).sub_(mean).div_(deviation), torch.from_numpy(rows[:, 0].astype(np.int64))


def _raw(name: str, *folders: str) -> bytes:
    """A file, or what its .gz holds, in one of the folders of $FEDRAY_DATA or in itself."""
    root = Path(os.environ.get("FEDRAY_DATA", "."))
    places = [root / folder / (name + end) for folder in (*folders, "") for end in ("", ".gz")]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise SystemExit(f"no {name}(.gz) in {root}: set FEDRAY_DATA to where the data is")
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
