"""The workloads of gpu.py: their models and data, what fedray is told of them, and what the card could do at most."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedray.models import build, find_model
from fedray.models.flops import forward_flops
from fedray.models.norms import replace_norms

PRECISIONS = ("fp32", "tf32", "bf16")
GREY, COLOUR, PHOTOGRAPH = (1, 28, 28), (3, 32, 32), (3, 224, 224)
CLASSES = 10


@dataclass(frozen=True)
class Work:
    """A round: ``cohort`` of ``clients`` with ``samples`` each make ``steps`` of SGD on mini-batches of ``batch``.

    ``options`` are further keys of the section ``model``. ``lanes`` says how many clients the hand-written streams
    train side by side; with 1 there are none.
    """

    model: str
    shape: tuple[int, ...]
    batch: int
    clients: int
    cohort: int
    samples: int
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    lanes: int = 8

    @property
    def steps_of_round(self) -> int:
        return self.cohort * self.steps


GROUP_NORM = {"stem": "imagenet", "norm": "group"}

WORKS = {
    "lenet5": Work("lenet5", GREY, 64, clients=100, cohort=100, samples=600, steps=20),
    "cnn": Work("ghbm_cnn", COLOUR, 50, clients=100, cohort=96, samples=500, steps=10),
    # torchvision's stem, which the hand-written loops of the issue had: the small one makes 15 times as many FLOPs
    "resnet18": Work("resnet18", COLOUR, 50, clients=48, cohort=48, samples=250, steps=5, options=GROUP_NORM),
    "vit": Work("vit_b_16", PHOTOGRAPH, 32, clients=8, cohort=4, samples=64, steps=10, lanes=1),
    "logistic": Work("logistic", GREY, 10, clients=10_000, cohort=1_000, samples=20, steps=2),
}


SMALL = "torchvision:shufflenet_v2_x0_5"
"""What stands for a large model in a trial with tiny sizes."""


def quick(work: Work) -> Work:
    """Returns a workload of the same kind that a CPU does in a second."""
    side = 32 if work.shape == PHOTOGRAPH else work.shape[1]
    shape = (work.shape[0], side, side)
    model = SMALL if work.shape == PHOTOGRAPH else work.model
    return replace(work, model=model, shape=shape, batch=4, clients=4, cohort=2, samples=8, steps=2, lanes=2)


class TutorialCNN(nn.Sequential):
    """The CNN of BlazeFL's benchmark: that of PyTorch's tutorial for CIFAR-10, like LeNet-5, 62,006 parameters."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
        )  # fmt: skip


def made(work: Work) -> nn.Module:
    """Returns the model of a workload, the same that fedray trains."""
    options = dict(work.options)
    norm = options.pop("norm", None)
    module = build(find_model(work.model), work.model, work.shape, CLASSES, options)
    if norm is not None:
        replace_norms(module, norm, 2, work.model)
    return module


@functools.cache
def images(clients: int, samples: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns images of random bytes, their classes, and whose they are."""
    draw = torch.Generator().manual_seed(0)
    count = clients * samples
    x = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=draw)
    return x, torch.randint(0, CLASSES, (count,), generator=draw), torch.arange(clients).repeat_interleave(samples)


def given(work: Work) -> dict[str, Any]:
    """Returns the arguments ``data`` and ``test`` of fedray.simulate."""
    x, y, client = images(work.clients, work.samples, work.shape)
    few = min(200, len(x))
    return {"data": (x.numpy(), y.numpy(), client.numpy()), "test": (x[:few].numpy(), y[:few].numpy())}


def settings(work: Work, precision: str, device: str, folder: str) -> dict[str, Any]:
    """Returns what fedray is told. It evaluates after the last round only, and makes no checkpoints."""
    keys = {
        "algorithm.name": "fedavg", "model.name": work.model, "train.precision": precision, "train.lr": 0.01,
        "train.cohort_size": work.cohort, "train.local_steps": work.steps, "train.batch_size": work.batch,
        "run.output": folder, "run.resume": False, "run.eval_every": 0, "run.checkpoint_every": 0,
        "run.log_clients": False, "engine.device": device,
    }  # fmt: skip
    return keys | {f"model.{key}": value for key, value in work.options.items()}


def engine(actors: int, device: str) -> dict[str, Any]:
    """Returns the settings of the local engine, if there are no actors, or of so many on one device."""
    if not actors:
        return {"engine.kind": "local"}
    share = {"engine.actors_per_gpu": actors} if device == "cuda" else {}
    return {"engine.kind": "ray", "engine.address": "local", "engine.actors": actors, **share}


def step_flops(work: Work) -> float:
    """Returns the FLOPs of one local step: a backward pass counts as two forward passes."""
    return 3 * work.batch * forward_flops(made(work), torch.zeros(2, *work.shape))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """Returns how long a call takes until the device is done with it."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def peak_flops(precision: str, device: str, size: int) -> float:
    """Returns the FLOPs per second of a product of two square matrices of ``size``, the best of five samples."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def sample(count: int = 5) -> None:
        for _ in itertools.repeat(None, count):
            torch.mm(a, b)

    sample()
    return 5 * 2 * size**3 / min(seconds_of(sample, device) for _ in range(5))


def shown(value: float) -> str:
    """Returns a number with three digits, or all of its digits before the point."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
