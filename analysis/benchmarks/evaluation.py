"""How many samples a forward pass of an evaluation should have: the time of 1,000 samples in passes of each size.

    python analysis/benchmarks/evaluation.py [--seconds 6]

One thread, the sizes in turn, each over passes of 50 samples (fedray/engine/evaluation/evaluator.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from common import Results, median_ratio
from problems import SimpleCNN
from torch import Tensor, nn

from fedray.models import build, find_model
from fedray.models.channels_last import convert
from fedray.models.flops import forward_flops

SAMPLES = 1000
SIZES = (50, 100, 200, 500, 1000)
WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024)
KNOWN = {
    "logistic": (1, 28), "mlp": (1, 28), "lenet5": (1, 28), "cnn": (1, 28), "ghbm_cnn": (3, 32), "firenet": (3, 32),
    "resnet20": (3, 32),
}  # fmt: skip
"""Models of fedray: the channels and the side of their images."""

WARM_UP = 1
"""Turns that do not count."""


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())


def convolutions(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, width, 5), nn.ReLU(), nn.MaxPool2d(2)
    )


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    for width in WIDTHS:
        yield f"dense, width {width}", lambda w=width: dense(w), (1, 28, 28)
    for width in WIDTHS[:5]:
        yield f"convolutions, width {width}", lambda w=width: convolutions(w), (1, 28, 28)
    for name, (channels, side) in KNOWN.items():
        shape = (channels, side, side)
        yield name, lambda n=name, s=shape: build(find_model(n), n, s, 10, {}), shape
    yield "simple_cnn", SimpleCNN, (3, 32, 32)


@torch.no_grad()
def seconds_of(module: nn.Module, x: Tensor, indices: Tensor, size: int) -> float:
    start = time.perf_counter()
    for rows in indices.split(size):
        module(x[rows])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("evaluation", ["case", "flops", "size", "turns", "ms_of_50", "ratio", "low", "high"])
    for name, make, shape in cases():
        module = make().eval()
        if any(isinstance(layer, nn.Conv2d) and layer.out_channels >= 16 for layer in module.modules()):
            convert(module)
        x, indices = torch.randn(5 * SAMPLES, *shape), torch.randperm(5 * SAMPLES)[:SAMPLES]
        flops = forward_flops(module, x[:2])
        turns: list[dict[int, float]] = []
        end = time.monotonic() + options.seconds
        while time.monotonic() < end or len(turns) < 6:
            turns.append({size: seconds_of(module, x, indices, size) for size in SIZES})
        kept = turns[WARM_UP:]
        of_50 = [turn[50] for turn in kept]
        shown = []
        for size in SIZES[1:]:
            ratio = median_ratio([turn[size] for turn in kept], of_50)
            facts = {"case": name, "flops": flops, "size": size, "turns": len(kept), "ms_of_50": 1e3 * median(of_50)}
            results.row(**facts, **ratio)
            shown.append(f"{size} {ratio['ratio']:.2f}")
        print(f"{name}, {flops:,.0f} FLOPs a sample, {1e3 * median(of_50):.1f} ms: {', '.join(shown)}", flush=True)
    results.summary(threads=1, seconds=options.seconds, samples=SAMPLES)


if __name__ == "__main__":
    main()
