"""Client-steps per second of local training: one client after another, and stacks of clients in one batched stream.

python analysis/benchmarks/chunks.py [--device cuda --peak-tflops 67 990] [--compiled] [--quick]

A sample trains whole stacks, FedAvg's steps from the gathering of samples to the sum of the uploads, until
--least-seconds are over; the back ends of a cell (a model, a batch size, a precision) take turns. The ratio of a chunk
is its steps per second over the loop's. Data are synthetic, uint8, on the device. Needs torch and numpy alone, and no
installation: PYTHONPATH=<the repository>.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
from common import QUIET, ProcessTree, Results, Usage, median_ratio, patient

from fedray.client.optimizer import Carry
from fedray.client.phase import ClientPhase, Stack
from fedray.core.local_training import LocalTraining
from fedray.core.samples import Samples
from fedray.core.tree import reduce_rows
from fedray.engine.compiler import compiling
from fedray.engine.process import computing_process, describe
from fedray.gradients.compiled import Compiled
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.stack import StackNetwork
from fedray.models import build, find_model
from fedray.models.inspection import inspect_model

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
SHAPES = {"logistic": GREY, "mlp": GREY, "lenet5": GREY, "ghbm_cnn": COLOUR, "resnet20": COLOUR}
CLIENTS, SAMPLES, CLASSES, LR = 100, 500, 10, 0.01
"""Clients, samples of each, classes, client learning rate."""


class BackEnd:
    """Stacks of ``chunk`` clients in one batched stream; of one client in the ordinary way if ``chunk`` is 0.

    With ``compiled`` gradients are compiled, as with engine.compile."""

    def __init__(self, model: str, samples: Samples, batch: int, precision: str, chunk: int, compiled: bool) -> None:
        self.name, self.samples, self.chunk = name_of(chunk, compiled), samples, chunk or 1
        torch.manual_seed(0)
        module = build(find_model(model), model, SHAPES[model], CLASSES, {})
        self.network = (StackNetwork if chunk else LoopNetwork)(module, device=samples.x.device, precision=precision)
        if compiled:
            shape = (chunk, batch) if chunk else batch
            self.network.compiled = Compiled(self.network.pure_gradient, {shape}, lambda: compiling(1))
        self.shared = {"x": self.network.loaded()}
        self.batch, self.round = batch, 0

    def train(self, steps: int) -> None:
        """What a worker does for one stack: local training, the clients' sum, and what is logged of them."""
        ids = range(self.chunk)
        stack = Stack(
            ids=ids,
            indices=[np.arange(i * SAMPLES, (i + 1) * SAMPLES) for i in ids],
            steps=[steps] * self.chunk,
            weights=[1 / self.chunk] * self.chunk,
            gaps=[0] * self.chunk,
        )
        self.round += 1
        training = LocalTraining(seed=0, batch_size=self.batch, local_steps=steps)
        client = ClientPhase(
            self.network, self.samples, training, stack, round=self.round, lr=LR, clients=CLIENTS, shared=self.shared
        )
        # FedAvg.train, without importing the algorithms, which need pydantic
        carry = Carry({"y": client.start("x")})
        for batch in client.data.batches():
            gradient = client.objective.gradient(carry["y"], batch)
            carry = client.hold(client.optimizer.descend(carry, "y", gradient), carry, batch.step)
        reduce_rows(carry["y"].row.double() * client.p.double()).cpu()
        client.objective.logged()

    def sample(self, steps: int, least: float) -> tuple[float, float]:
        """Client-steps per second, and MiB that a stack takes on the GPU beside data and model.

        On a CPU, seconds are those that the process, one thread, had a core: waiting for one does not count.
        """
        on_gpu = self.samples.x.is_cuda
        clock = time.perf_counter if on_gpu else time.process_time
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began, stacks, seconds = clock(), 0, 0.0
        while seconds < least:
            self.train(steps)
            if on_gpu:
                torch.cuda.synchronize()
            stacks, seconds = stacks + 1, clock() - began
        memory = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else 0.0
        return stacks * self.chunk * steps / seconds, memory

    def fits(self, steps: int, most: float) -> bool:
        """Whether a stack's ``steps`` take no more than ``most`` seconds, and there is memory for it; warms up, too."""
        try:
            self.train(1)
            began = time.perf_counter()
            self.train(1)
        except torch.cuda.OutOfMemoryError:
            return False
        return (time.perf_counter() - began) * steps <= most


def name_of(chunk: int, compiled: bool) -> str:
    """The name of a back end in the tables."""
    return (f"vmap {chunk}" if chunk else "loop") + compiled * " compiled"


@functools.cache
def synthetic(shape: tuple[int, ...], device: str) -> Samples:
    """uint8 images and their classes, scaled as MNIST and CIFAR are."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (CLIENTS * SAMPLES, *shape), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, CLASSES, (len(x),), generator=draw)
    scale, shift = torch.full(shape[:1], 1 / 64), torch.full(shape[:1], -2.0)
    return Samples(x.to(device), y.to(device), scale.to(device), shift.to(device))


def measure(model: str, batch: int, precision: str, args: argparse.Namespace, results: Results) -> dict[str, Any]:
    """One cell: all back ends in turns."""
    shape = SHAPES[model]
    module = build(find_model(model), model, shape, CLASSES, {})
    flops = inspect_model(module, torch.zeros(2, *shape), model).flops
    samples = synthetic(shape, args.device)
    # compiled runs have full precision
    kinds = (False, True) if args.compiled and precision == "fp32" else (False,)
    pairs = itertools.product((0, *args.chunks), kinds)
    tried = [BackEnd(model, samples, batch, precision, chunk, compiled) for chunk, compiled in pairs]
    back_ends = [b for b in tried if b.fits(args.steps, args.max_seconds) or b.name == "loop"]
    rates: dict[str, list[float]] = {b.name: [] for b in back_ends}
    memory = {b.name: 0.0 for b in back_ends}
    usage, more, turn, kept = Usage(ProcessTree()), patient(args.repeats, args.max_minutes), 0, 0
    while more(kept):
        usage.start()
        # who is first changes from turn to turn
        order = back_ends[turn % len(back_ends) :] + back_ends[: turn % len(back_ends)]
        found = {b.name: b.sample(args.steps, args.least_seconds) for b in order}
        foreign = usage.stop()["foreign"]
        turn, quiet = turn + 1, foreign <= args.foreign
        kept += quiet
        for name, (rate, mib) in found.items():
            results.row(
                model=model, batch=batch, precision=precision, back_end=name, turn=turn, steps_per_second=rate,
                memory_mib=mib, foreign=foreign, kept=quiet,
            )  # fmt: skip
            if quiet:
                rates[name].append(rate)
                memory[name] = max(memory[name], mib)
    peak = dict(zip(args.precisions, args.peak_tflops, strict=False)).get(precision)
    cell: dict[str, Any] = {"model": model, "batch": batch, "precision": precision, "batch_flops": flops * batch}
    cell |= {"turns": kept, "dropped": turn - kept, "left_out": [b.name for b in tried if b not in back_ends]}
    for name, values in rates.items() if kept else ():
        rate = statistics.median(values)
        cell[name] = {"steps_per_second": rate, "tflops": 3 * flops * batch * rate / 1e12}
        if name != "loop":
            cell[name] |= median_ratio(values, rates["loop"])
        if args.device == "cuda":
            cell[name]["memory_mib"] = memory[name]
        if peak:
            cell[name]["of_peak"] = cell[name]["tflops"] / peak
    return cell


def table(cells: list[dict[str, Any]], names: list[str]) -> str:
    """A line per cell: the loop's steps per second, and each chunk's ratio to it."""
    columns = ["model", "batch", "precision", "MFLOP forward", *names]
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for cell in cells:
        shown = [_shown(cell[name]) if name in cell else "-" for name in names]
        front = [cell["model"], str(cell["batch"]), cell["precision"], f"{cell['batch_flops'] / 1e6:.3g}"]
        lines.append("| " + " | ".join(front + shown) + " |")
    return "\n".join(lines)


def _shown(found: dict[str, float]) -> str:
    text = f"{found['steps_per_second']:.4g}/s"
    if "ratio" in found:
        text = f"{found['ratio']:.2f} [{found['low']:.2f}-{found['high']:.2f}]"
    if "of_peak" in found:
        text += f" {100 * found['of_peak']:.1f} %"
    return text + (f" {found['memory_mib']:,.0f} MiB" if "memory_mib" in found else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[10, 20, 64])
    parser.add_argument("--chunks", nargs="+", type=int, default=[1, 8, 32, 100])
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--peak-tflops", nargs="+", type=float, default=[], help="the card's, one for each precision")
    parser.add_argument("--steps", type=int, default=10, help="local steps of each client")
    parser.add_argument("--repeats", type=int, default=9, help="turns of a cell")
    parser.add_argument("--least-seconds", type=float, default=0.2, help="of a sample")
    parser.add_argument("--max-seconds", type=float, default=20, help="a chunk that takes longer is left out")
    parser.add_argument("--max-minutes", type=float, default=3, help="for each cell")
    parser.add_argument("--foreign", type=float, default=QUIET, help="cores that others may use during a turn")
    parser.add_argument("--compiled", action="store_true", help="each of them with compiled gradients too")
    parser.add_argument("--quick", action="store_true", help="try everything once, in a minute")
    args = parser.parse_args()
    if args.quick:
        args.batches, args.chunks, args.steps, args.repeats = [10], [1, 8], 2, 2
        args.least_seconds, args.foreign = 0.01, 1e9
    columns = ["model", "batch", "precision", "back_end", "turn", "steps_per_second", "memory_mib", "foreign", "kept"]
    results, cells = Results(f"chunks-{args.device}", columns), []
    kinds = (False, True) if args.compiled else (False,)
    names = [name_of(*pair) for pair in itertools.product((0, *args.chunks), kinds)]
    with computing_process(1, False):
        for model, batch, precision in itertools.product(args.models, args.batches, args.precisions):
            cells.append(measure(model, batch, precision, args, results))
            print(table(cells[-1:], names).splitlines()[-1], flush=True)
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    results.summary(device=describe(args.device), setting=vars(args), cells=cells)
    print(table(cells, names))


if __name__ == "__main__":
    main()
