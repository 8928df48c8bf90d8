"""The yardstick: FedAvg as a plain, hand-written PyTorch loop over worker processes.

python analysis/benchmarks/plain_loop.py --workload A
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import ALLOCATOR, QUIET, ProcessTree, Usage
from problems import MODELS, drawn, load, shares
from torch import nn
from workloads import BLOCK, WORKLOADS, Workload

WORKER_ENV = {**ALLOCATOR, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


LAYOUTS = ("usual", "channels_last", "contiguous")
"""How convolutions' weights lie in memory. Usual is channels last for LeNet-5, and as it is for a user's own model."""


def make_model(name: str, layout: str) -> nn.Module:
    model = MODELS[name]()
    last = layout == "channels_last" or (layout == "usual" and name == "lenet5")
    return model.to(memory_format=torch.channels_last) if last else model


class PlainLoop:
    """``start()``, then ``round()`` as often as wanted, then ``close()``.

    ``layout``: one of LAYOUTS. ``compiled``: whether the workers run the model under ``torch.compile``."""

    def __init__(
        self, workload: Workload, workers: int = 2, seed: int = 0, layout: str = "usual", compiled: bool = False
    ) -> None:
        self.workload, self.workers, self.seed, self.layout, self.compiled = workload, workers, seed, layout, compiled
        self.processes: list[Any] = []
        self.steps = 0

    def start(self) -> None:
        work = self.workload
        torch.manual_seed(self.seed)
        self.x, self.y = load(work.source)
        owned = shares(work)
        self.model = make_model(work.model, self.layout)
        self.cohort = torch.arange(work.cohort)
        for tensor in (self.x, self.y, owned, self.cohort):
            tensor.share_memory_()
        self.weights = [p.detach().share_memory_() for p in self.model.parameters()]
        self.sums = [[torch.zeros_like(w).share_memory_() for w in self.weights] for _ in range(self.workers)]

        spawn = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        before = {key: os.environ.get(key) for key in WORKER_ENV}
        os.environ.update(WORKER_ENV)  # the allocator reads its settings when a process starts
        try:
            for k in range(self.workers):
                ours, theirs = spawn.Pipe()
                share = (self.x, self.y, owned, self.cohort[k :: self.workers], self.weights, self.sums[k])
                args = (work, self.seed + 1 + k, self.layout, self.compiled, share, theirs)
                self.processes.append(spawn.Process(target=serve, args=args, daemon=True))
                self.processes[-1].start()
                self.pipes.append(ours)
                theirs.close()
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value
        for pipe in self.pipes:
            pipe.recv_bytes()

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def round(self) -> float:
        """One round of FedAvg; its seconds."""
        begin = time.perf_counter()
        if self.workload.cohort < self.workload.clients:
            self.cohort.copy_(torch.randperm(self.workload.clients)[: self.workload.cohort])
        for pipe in self.pipes:
            pipe.send_bytes(b"round")
        for pipe in self.pipes:
            self.steps += int(pipe.recv_bytes())
        for weight, *parts in zip(self.weights, *self.sums, strict=True):
            weight.copy_(parts[0])
            for part in parts[1:]:
                weight.add_(part)
        return time.perf_counter() - begin

    def accuracy(self) -> float:
        x, y = load(self.workload.source, train=False)
        with torch.no_grad():
            return (self.model(x).argmax(1) == y).float().mean().item()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join()
        self.processes = []


def serve(work: Workload, seed: int, layout: str, compiled: bool, share: Sequence[Any], pipe: Connection) -> None:
    """A worker: each message is a round over its part of the cohort; the answer is the number of its steps."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, y, owned, cohort, weights, total = share
    model = make_model(work.model, layout)
    parameters = list(model.parameters())
    if compiled:
        model.compile()
    share_of_mean = 1 / work.cohort  # the clients are equal in size
    pipe.send_bytes(b"ready")
    while True:
        try:
            pipe.recv_bytes()
        except EOFError:
            return
        steps = 0
        for tensor in total:
            tensor.zero_()
        for client in cohort.tolist():
            with torch.no_grad():
                torch._foreach_copy_(parameters, weights)
            samples = drawn(work, owned[client])
            for inputs, labels in zip(x[samples].split(work.batch), y[samples].split(work.batch), strict=True):
                gradients = torch.autograd.grad(F.cross_entropy(model(inputs), labels), parameters)
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-work.lr)
                steps += 1
            with torch.no_grad():
                torch._foreach_add_(total, parameters, alpha=share_of_mean)
        pipe.send_bytes(b"%d" % steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="Median seconds per round of the plain loop.")
    parser.add_argument("--workload", choices=WORKLOADS, default="A")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layout", choices=LAYOUTS, default="usual", help="of the convolutions' weights")
    parser.add_argument("--compiled", action="store_true", help="under torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(1)
    work = WORKLOADS[args.workload]
    loop = PlainLoop(work, args.workers, layout=args.layout, compiled=args.compiled)
    loop.start()
    for _ in range(args.warmup):
        loop.round()
    tree = ProcessTree()
    kept, dropped = [], 0
    for _ in range(args.samples):
        usage = Usage(tree)
        seconds = [loop.round() for _ in range(BLOCK[args.workload])]
        if usage.stop()["foreign"] <= QUIET:
            kept.append(statistics.fmean(seconds))
        else:
            dropped += 1
    if kept:
        median = statistics.median(kept)
        step = 1000 * median * min(args.workers, work.cohort) / (work.cohort * work.steps)
        print(f"{args.workload}: {median:.4f} s/round [{min(kept):.4f}-{max(kept):.4f}], {step:.3f} ms/step")
    print(f"samples kept {len(kept)}, dropped {dropped}; test accuracy {loop.accuracy():.4f}")
    loop.close()


if __name__ == "__main__":
    main()
