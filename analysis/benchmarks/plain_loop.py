"""The yardstick: FedAvg as a plain, hand-written PyTorch loop over worker processes.

python analysis/benchmarks/plain_loop.py --workload A
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import QUIET, ProcessTree, Usage
from torch import Tensor, nn

# glibc's defaults return a step's buffers to the system and fault them in again; only both together help
WORKER_ENV = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "536870912",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Workload:
    model: str
    clients: int
    samples: int
    cohort: int
    steps: int
    batch: int
    lr: float = 0.01


WORKLOADS = {
    "A": Workload("lenet5", clients=100, samples=600, cohort=100, steps=10, batch=64),
    "B": Workload("lenet5", clients=1000, samples=60, cohort=100, steps=3, batch=20),
    "C": Workload("logistic", clients=100, samples=60, cohort=100, steps=2, batch=10),
}

# rounds per sample: CPU accounting has a resolution of 10 ms, so that a sample must last about half a second
BLOCK = {"A": 1, "B": 3, "C": 60}


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


def make_model(name: str, channels_last: bool) -> nn.Module:
    if name == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    return LeNet5().to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def mnist(part: str) -> tuple[Tensor, Tensor]:
    """Images as normalised float32 [n, 1, 28, 28], and labels."""
    root = Path(os.environ.get("FEDRAY_DATA", "."))
    folders = [root / "MNIST/raw", root / "mnist/raw", root / "raw", root]
    files = []
    for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        places = [folder / (name + end) for folder in folders for end in ("", ".gz")]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise SystemExit(f"no {name}(.gz) in {root}: set FEDRAY_DATA to where MNIST is")
        files.append(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    x = torch.from_numpy(np.frombuffer(files[0], np.uint8, offset=16).astype(np.float32)).view(-1, 1, 28, 28)
    y = torch.from_numpy(np.frombuffer(files[1], np.uint8, offset=8).astype(np.int64))
    return x.div_(255).sub_(0.1307).div_(0.3081), y


class PlainLoop:
    """``start()``, then ``round()`` as often as wanted, then ``close()``."""

    def __init__(self, workload: Workload, workers: int = 2, seed: int = 0, channels_last: bool = True) -> None:
        self.workload, self.workers, self.seed, self.channels_last = workload, workers, seed, channels_last
        self.processes: list[Any] = []

    def start(self) -> None:
        work = self.workload
        torch.manual_seed(self.seed)
        self.x, self.y = mnist("train")
        total = len(self.y)
        if work.clients * work.samples <= total:
            owned = torch.randperm(total)[: work.clients * work.samples].view(work.clients, work.samples)
        else:
            owned = torch.stack([torch.randperm(total)[: work.samples] for _ in range(work.clients)])
        self.model = make_model(work.model, self.channels_last)
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
                args = (work, self.seed + 1 + k, self.channels_last, share, theirs)
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
            pipe.recv_bytes()
        for weight, *parts in zip(self.weights, *self.sums, strict=True):
            weight.copy_(parts[0])
            for part in parts[1:]:
                weight.add_(part)
        return time.perf_counter() - begin

    def accuracy(self) -> float:
        x, y = mnist("t10k")
        with torch.no_grad():
            return (self.model(x).argmax(1) == y).float().mean().item()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join()
        self.processes = []


def serve(work: Workload, seed: int, channels_last: bool, share: Sequence[Any], pipe: Connection) -> None:
    """A worker: each message is a round over its part of the cohort."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, y, owned, cohort, weights, total = share
    model = make_model(work.model, channels_last)
    parameters = list(model.parameters())
    passes = math.ceil(work.steps * work.batch / work.samples)
    share_of_mean = 1 / work.cohort  # the clients are equal in size
    pipe.send_bytes(b"ready")
    while True:
        try:
            pipe.recv_bytes()
        except EOFError:
            return
        for tensor in total:
            tensor.zero_()
        for client in cohort.tolist():
            with torch.no_grad():
                torch._foreach_copy_(parameters, weights)
            order = torch.cat([torch.randperm(work.samples) for _ in range(passes)])[: work.steps * work.batch]
            chosen = owned[client][order]
            for inputs, labels in zip(x[chosen].split(work.batch), y[chosen].split(work.batch), strict=True):
                gradients = torch.autograd.grad(F.cross_entropy(model(inputs), labels), parameters)
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-work.lr)
            with torch.no_grad():
                torch._foreach_add_(total, parameters, alpha=share_of_mean)
        pipe.send_bytes(b"done")


def main() -> None:
    parser = argparse.ArgumentParser(description="Median seconds per round of the plain loop.")
    parser.add_argument("--workload", choices=WORKLOADS, default="A")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--contiguous", action="store_true", help="ordinary memory layout instead of channels last")
    args = parser.parse_args()
    torch.set_num_threads(1)
    work = WORKLOADS[args.workload]
    loop = PlainLoop(work, args.workers, channels_last=not args.contiguous)
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
