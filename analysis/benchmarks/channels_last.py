"""What the channels-last layout of convolutions is worth: the time of a gradient with it over that without it.

    python analysis/benchmarks/channels_last.py [--seconds 6]

One thread, the two layouts in turn: from how many channels on it pays, and what it does for known models
(engine.channels_last; fedray/models/channels_last.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.nn.functional as F
from common import Results, median_ratio
from problems import SimpleCNN
from torch import nn

from fedray.models import build, find_model
from fedray.models.channels_last import convert

Case = tuple[str, Callable[[], nn.Module], tuple[int, ...], int]
KNOWN = {"firenet": (32, 20), "resnet18": (64, 8), "vgg16": (32, 8), "mobilenet_v2": (96, 8)}
"""Models of fedray: the side of their images, and the samples of a mini-batch."""

WARM_UP = 2
"""Pairs of a case that do not count."""


def two_convolutions(channels: int, width: int, stride: int) -> nn.Module:
    """Makes a network whose convolutions have ``width`` and twice as many output channels."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, stride), nn.ReLU(), *([nn.MaxPool2d(2)] if stride == 1 else []),
        nn.Conv2d(width, 2 * width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, 10),
    )  # fmt: skip


def cases() -> Iterator[Case]:
    for width in (4, 8, 16, 32):
        for channels, side in ((1, 28), (3, 32)):
            for stride in (1, 2):
                for size in (10, 50):
                    name = f"{width} and {2 * width} channels, inputs {channels} x {side}, stride {stride}"
                    make = lambda c=channels, w=width, s=stride: two_convolutions(c, w, s)  # noqa: E731
                    yield name, make, (channels, side, side), size
    yield "simple_cnn", SimpleCNN, (3, 32, 32), 10
    for name, (side, size) in KNOWN.items():
        make = lambda n=name, s=side: build(find_model(n), n, (3, s, s), 10, {})  # noqa: E731
        yield name, make, (3, side, side), size


def seconds_of(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    start = time.perf_counter()
    module.zero_grad()
    F.cross_entropy(module(x), y).backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("channels-last", ["case", "batch", "pairs", "contiguous_ms", "ratio", "low", "high"])
    for name, make, shape, size in cases():
        plain, converted = make(), make()
        convert(converted)
        x, y = torch.randn(size, *shape), torch.randint(0, 10, (size,))
        pairs: list[tuple[float, float]] = []
        end = time.monotonic() + options.seconds
        while time.monotonic() < end or len(pairs) < 10:
            pairs.append((seconds_of(plain, x, y), seconds_of(converted, x, y)))
        before, after = zip(*pairs[WARM_UP:], strict=True)
        ratio = median_ratio(after, before)
        results.row(case=name, batch=size, pairs=len(after), contiguous_ms=1e3 * median(before), **ratio)
        print(f"{name}, batch {size}: {ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})", flush=True)
    results.summary(threads=1, seconds=options.seconds)


if __name__ == "__main__":
    main()
