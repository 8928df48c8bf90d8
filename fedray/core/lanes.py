"""Clients of a stack side by side on a GPU.

A GPU runs the small kernels of a client's gradient faster than Python can launch them, and one client's kernels leave
most of it idle. So the operations of a gradient, once they are recorded (:mod:`fedray.core.recording`), are captured as
a CUDA graph, which is launched as a whole. A graph has the gradients of several clients, each in a lane of its own, so
that they run side by side. A client's kernels are the same in every lane, so the number of lanes changes no bit.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]


class Lanes:
    """``count`` streams of the GPU ``device`` in which clients are computed side by side."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._main = torch.cuda.Stream(device)
        self._lanes = [torch.cuda.Stream(device) for _ in range(count)]
        # graphs are launched one after another, so they may use the same memory
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Function, rows: Sequence[Sequence[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
        """Returns a function that computes ``function`` of each of as many rows of inputs as ``rows``, which have the
        same shapes, by one graph. It returns the rows of the outputs together, ``[C, ...]``.

        Raises RuntimeError if an operation can't be captured, such as one that waits for the GPU.
        """
        held = [[_place_for(tensor) for tensor in row] for row in rows]
        lanes = self._lanes[: len(rows)]
        graph = torch.cuda.CUDAGraph()
        self._main.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._main), _no_collection():
            _copy(held, rows)
            # what libraries set up when they are first used can't be captured
            self._side_by_side(function, held, lanes)
            torch.cuda.synchronize()
            # other threads may go on to read samples
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._side_by_side(function, held, lanes)
            finally:
                graph.capture_end()

        def launch(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
            _copy(held, rows)
            graph.replay()
            # the next launch overwrites the graph's own
            return tuple(map(torch.clone, outputs))

        return launch

    def _side_by_side(
        self, function: Function, rows: Sequence[Sequence[Tensor]], lanes: Sequence[torch.cuda.Stream]
    ) -> list[Tensor]:
        """Computes ``function`` of each row in its lane, and returns the rows of the outputs together."""
        found = []
        for lane in lanes:
            lane.wait_stream(self._main)
        for place, row in enumerate(rows):
            with torch.cuda.stream(lanes[place % len(lanes)]):
                found.append(function(*row))
        for lane in lanes:
            self._main.wait_stream(lane)
        return [torch.stack(each) for each in zip(*found, strict=True)]


def _place_for(tensor: Tensor) -> Tensor:
    """Returns fresh memory with the shape and the strides of ``tensor``, by which kernels are chosen."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _copy(held: Sequence[Sequence[Tensor]], rows: Sequence[Sequence[Tensor]]) -> None:
    for places, tensors in zip(zip(*held, strict=True), zip(*rows, strict=True), strict=True):
        torch._foreach_copy_(list(map(_once, places)), list(map(_once, tensors)))


def _once(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` without the repetitions of an ``expand``."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A context without garbage collection, which might free memory of the GPU while a graph is captured."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
