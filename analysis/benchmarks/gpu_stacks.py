"""The gradients of one stack of clients on a GPU: vmap's grouped convolutions, and windows, each eager, in a CUDA graph
and compiled.

    python analysis/benchmarks/gpu_stacks.py [MODEL ...] [--clients C] [--cpu] [--no-compile]

fp32 with deterministic kernels. Each line has gradients per second of all clients, the error against float64, whether
two gradients have the same bits, and the memory. A MODEL is one of CASES, all unless given. What
fedray/experiment/backend.py decides for GPUs comes from this program.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fedray.core.batches import Batch
from fedray.engine.compiler import compiling
from fedray.engine.determinism import nondeterministic_operations
from fedray.engine.process import computing_process
from fedray.gradients import stacked_layers
from fedray.gradients.compiled import Compiled
from fedray.gradients.stack import StackNetwork
from fedray.models.ghbm import GHBMCNN
from fedray.models.small import MLP, LeNet5, Logistic

CASES: dict[str, tuple[Any, tuple[int, ...], int, int]] = {
    "lenet5": (LeNet5, (1, 28, 28), 64, 100), "lenet5_50": (LeNet5, (1, 28, 28), 64, 50),
    "logistic": (Logistic, (1, 28, 28), 10, 1000), "mlp": (MLP, (1, 28, 28), 32, 100),
    "cnn": (GHBMCNN, (3, 32, 32), 50, 64),
}  # fmt: skip
"""Model, shape of a sample, mini-batch and clients."""

COMPARED = 8
"""The clients whose gradients are compared with those in float64, which takes a CPU some seconds."""

Run = Callable[[], tuple[Tensor, ...]]


class Case:
    """A stack of clients, and the ways to compute its gradients."""

    def __init__(self, name: str, clients: int | None, device: str) -> None:
        self.make, self.shape, size, usual = CASES[name]
        self.name, self.device, self.clients = name, device, clients or usual
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(self.clients, size, *self.shape, generator=draw)
        y = torch.randint(0, 10, (self.clients, size), generator=draw)
        self.batch = Batch(x.to(device), y.to(device), 0)
        exact = self.network(False, "cpu", torch.float64)
        row = exact.loaded().row
        row = row * (1 + 0.1 * torch.randn(self.clients, len(row), generator=draw))
        self.at, some = row.float().to(device), slice(COMPARED)
        few = Batch(x[some].double(), y[some], 0)
        self.expected = exact.gradients(exact.layout.model(row[some].float().double()), few).value

    def network(self, windows: bool, device: str | None = None, dtype: torch.dtype = torch.float32) -> StackNetwork:
        torch.manual_seed(0)
        return StackNetwork(self.make(self.shape, 10), device=device or self.device, windows=windows, dtype=dtype)

    def inputs(self, network: StackNetwork) -> tuple[Any, ...]:
        return network.inputs_of(network.layout.model(self.at), self.batch, 0)

    def eager(self, windows: bool) -> Run:
        network = self.network(windows)
        inputs = self.inputs(network)
        return lambda: network.recordable_gradient(*inputs)

    def compiled(self) -> Run:
        network = self.network(True)
        inputs = self.inputs(network)
        function = Compiled(network.pure_gradient, [()], lambda: compiling(1))
        return lambda: function((), *inputs)

    def show(self, way: str, prepare: Callable[[], Run]) -> None:
        """Prints a line about one way."""
        began, cuda = time.perf_counter(), self.device == "cuda"
        try:
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            run = prepare()
            once, twice = run()[0].clone(), run()[0].clone()
            ready = time.perf_counter() - began
            seconds = timed(run, cuda)
            off = float((once[:COMPARED].cpu().double() - self.expected).norm() / self.expected.norm())
            peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
            print(
                f"{self.name:10} C={self.clients:<5}{way:28}{self.clients / seconds:10,.0f}/s {seconds * 1e3:9.3f} ms  "
                f"off {off:.1e}  same bits {torch.equal(once, twice)}  {peak:5.1f} GB  ready after {ready:4.1f} s",
                flush=True,
            )
        except Exception as error:
            print(f"{self.name:10} {way:28} failed, {type(error).__name__}: {str(error)[:200]}", flush=True)


def timed(run: Run, cuda: bool, least: float = 0.5) -> float:
    """Returns the seconds that a call of ``run`` takes."""
    wait: Callable[[], Any] = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(3):
        run()
    wait()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < least:
        for _ in range(5):
            run()
        calls += 5
        wait()
    return (time.perf_counter() - began) / calls


def graphed(run: Run) -> Run:
    """Returns ``run`` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        found = run()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return found

    return replay


@contextlib.contextmanager
def one_product() -> Iterator[None]:
    """A context in which each client has one product for all of its samples."""
    usual, stacked_layers.LEAST_PLACES = stacked_layers.LEAST_PLACES, 10**9
    try:
        yield
    finally:
        stacked_layers.LEAST_PLACES = usual


def measure(name: str, clients: int | None, device: str, compile: bool) -> None:
    case = Case(name, clients, device)
    case.show("vmap", lambda: case.eager(False))
    case.show("windows", lambda: case.eager(True))
    if device == "cuda":
        case.show("vmap, graph", lambda: graphed(case.eager(False)))
        case.show("windows, graph", lambda: graphed(case.eager(True)))
        with one_product():
            case.show("one product, graph", lambda: graphed(case.eager(True)))
    if compile:
        case.show("windows, compiled", case.compiled)
        if device == "cuda":
            case.show("windows, compiled, graph", lambda: graphed(case.compiled()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", help="; ".join(CASES))
    parser.add_argument("--clients", type=int)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    given = parser.parse_args()
    device = "cpu" if given.cpu else "cuda"
    print(torch.__version__, "CPU" if given.cpu else torch.cuda.get_device_name(), flush=True)
    with computing_process(1, portable=False):
        for name in given.models or CASES:
            measure(name, given.clients, device, not given.no_compile)
        print("without a deterministic kernel:", ", ".join(nondeterministic_operations()) or "nothing")


if __name__ == "__main__":
    main()
