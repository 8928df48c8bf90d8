"""What compiled gradients are worth: the time of one over that of a replayed gradient.

    python analysis/benchmarks/compiled.py [--seconds 6]

One thread, the two in turn, one client after another, in the layout that engine.channels_last=auto gives: which models
engine.compile=auto should compile (fedray/experiment/backend.py). Stacks of clients: chunks.py --compiled.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from channels_last import cases
from common import Results, median_ratio
from torch import nn

from fedray.core.batches import Batch
from fedray.core.task import Task
from fedray.core.vectors import Model
from fedray.engine.compiler import compiling
from fedray.gradients.compiled import Compiled
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.recording import FIRST
from fedray.models import build, find_model
from fedray.models.channels_last import in_channels_last, pays

WARM_UP = FIRST + 4
"""The pairs that do not count. Then the gradient is recorded, and the recording has been tried."""

OWN = {
    "cnn": ((1, 28, 28), 50),
    "lenet5": ((1, 28, 28), 64),
    "mlp": ((1, 28, 28), 64),
    "ghbm_cnn": ((3, 32, 32), 64),
    "resnet20": ((3, 32, 32), 64),
}
"""Models of fedray: the shape of their inputs, and the samples of a mini-batch."""


def all_cases() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, ...], int]]:
    yield from cases()
    for name, (shape, size) in OWN.items():
        yield name, lambda n=name, s=shape: build(find_model(n), n, s, 10, {}), shape, size


def seconds_of(network: LoopNetwork, model: Model, batch: Batch) -> float:
    start = time.perf_counter()
    network.gradients(model, batch)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each case")
    parser.add_argument("--only", default="", help="a part of the names of the cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("compiled", ["case", "batch", "channels_last", "pairs", "eager_ms", "ratio", "low", "high"])
    for name, make, shape, size in all_cases():
        if options.only not in name:
            continue
        module, x, y = make(), torch.randn(size, *shape), torch.randint(0, 10, (size,))
        converted, _ = in_channels_last("auto", pays(module, "cpu", "fp32"), module, name, Task(), x[:2], y[:2])
        eager, compiled = LoopNetwork(module), LoopNetwork(copy.deepcopy(module))
        eager.replay()
        compiled.compiled = Compiled(compiled.pure_gradient, {size}, lambda: compiling(1))
        model, batch = eager.loaded().rows(1), Batch(x[None], y[None], 0)

        pairs: list[tuple[float, float]] = []
        seconds_of(compiled, model, batch)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end or len(pairs) < WARM_UP + 10:
            pairs.append((seconds_of(eager, model, batch), seconds_of(compiled, model, batch)))
        before, after = zip(*pairs[WARM_UP:], strict=True)
        ratio = median_ratio(after, before)
        row = {"case": name, "batch": size, "channels_last": converted, "pairs": len(after)}
        results.row(**row, eager_ms=1e3 * median(before), **ratio)
        print(f"{name}, batch {size}: {ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})", flush=True)
    results.summary(threads=1, seconds=options.seconds)


if __name__ == "__main__":
    main()
