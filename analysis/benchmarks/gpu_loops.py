"""FedAvg by hand on one GPU: an eager loop, a CUDA graph of a client's step, and a graph of several clients' steps in
streams of their own. They use torch alone, and are what fedray is compared to."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_work import Work, images, made, seconds_of
from torch import Tensor

LEAST_SECONDS = 0.2
"""The time that a sample takes, about."""


@contextlib.contextmanager
def numerics(precision: str) -> Iterator[None]:
    """A context of deterministic kernels, with TF32 if the precision says so. Settings are put back afterwards."""
    matmul, cudnn, fill = torch.backends.cuda.matmul, torch.backends.cudnn, torch.utils.deterministic
    tf32 = precision == "tf32"
    wanted: list[tuple[Any, str, Any]] = [
        (matmul, "allow_tf32", tf32), (cudnn, "allow_tf32", tf32), (cudnn, "benchmark", False),
        (cudnn, "deterministic", True), (fill, "fill_uninitialized_memory", False),
    ]  # fmt: skip
    newer = [(each, "fp32_precision") for each in (matmul, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))]
    before: list[tuple[Any, str, Any]] = []
    for where, name in [*((where, name) for where, name, _ in wanted), *newer]:
        # of torch 2.9 and later, the older name can't be read if somebody has used the newer one
        with contextlib.suppress(AttributeError, RuntimeError):
            before.append((where, name, getattr(where, name)))
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        for where, name, value in wanted:
            setattr(where, name, value)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
            for where, name, value in before:
                setattr(where, name, value)


class Lane:
    """One client at a time: its model, and the indices of the samples of its next step, which stay in one place."""

    def __init__(self, work: Work, data: tuple[Tensor, Tensor], precision: str, index: Tensor) -> None:
        self.x, self.y = data
        self.device, self.index, self.bf16 = self.x.device, index, precision == "bf16"
        # channels last is faster where tensor cores are used, and as fast or slower without
        self.format = torch.contiguous_format if precision == "fp32" else torch.channels_last
        self.module = made(work).to(self.device).to(memory_format=self.format)
        self.parameters = list(self.module.parameters())

    def step(self) -> None:
        inputs = self.x[self.index].float().sub_(128).div_(64)
        inputs = inputs.contiguous(memory_format=self.format)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            outputs = self.module(inputs)
        loss = F.cross_entropy(outputs.float(), self.y[self.index])
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-0.01)


class Loop:
    """Clients one after another, or ``lanes`` of them side by side; ``captured`` in a CUDA graph, or eager."""

    def __init__(self, name: str, work: Work, precision: str, device: str, lanes: int, captured: bool) -> None:
        self.name, self.work, self.precision, self.device = name, work, precision, device
        x, y, _ = images(work.clients, work.samples, work.shape)
        draw = torch.Generator().manual_seed(0)
        order = torch.randint(len(x), (work.steps, lanes, work.batch), generator=draw)
        self.order, self.index = order.to(device), order[0].to(device)
        data = x.to(device), y.to(device)
        with numerics(precision):
            self.lanes = [Lane(work, data, precision, self.index[lane]) for lane in range(lanes)]
            self.start = copy.deepcopy(self.lanes[0].parameters)
            self.total = [torch.zeros_like(each) for each in self.start]
            self.streams = [torch.cuda.Stream() for _ in range(lanes)] if captured and lanes > 1 else []
            self.steps: Callable[[], None] = self._graph() if captured else self._steps
            self._clients()
            self.groups = max(1, round(LEAST_SECONDS / seconds_of(self._clients, device)))

    def _steps(self) -> None:
        if not self.streams:
            for lane in self.lanes:
                lane.step()
            return
        main = torch.cuda.current_stream()
        for stream, lane in zip(self.streams, self.lanes, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                lane.step()
        for stream in self.streams:
            main.wait_stream(stream)

    def _graph(self) -> Callable[[], None]:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                self._steps()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._steps()
        replay: Callable[[], None] = graph.replay
        return replay

    @torch.no_grad()
    def _clients(self) -> None:
        """Trains one client in each lane, from the same model, and adds up what they end with."""
        for lane in self.lanes:
            torch._foreach_copy_(lane.parameters, self.start)
        for step in range(self.work.steps):
            self.index.copy_(self.order[step])
            with torch.enable_grad():
                self.steps()
        for lane in self.lanes:
            torch._foreach_add_(self.total, lane.parameters, alpha=1 / self.work.cohort)

    def sample(self) -> float:
        """Returns the client-steps per second of some clients."""

        def run() -> None:
            for _ in range(self.groups):
                self._clients()

        with numerics(self.precision):
            return self.groups * len(self.lanes) * self.work.steps / seconds_of(run, self.device)


def loops(work: Work, precision: str, device: str) -> list[Loop]:
    """Returns the ways by hand: on a CPU the eager loop alone, because CUDA graphs and streams are those of a GPU."""
    found = [Loop("eager loop", work, precision, device, 1, captured=False)]
    if device == "cuda":
        found.append(Loop("one graph", work, precision, device, 1, captured=True))
        if work.lanes > 1:
            found.append(Loop(f"{work.lanes} streams", work, precision, device, work.lanes, captured=True))
        torch.cuda.empty_cache()
    return found
