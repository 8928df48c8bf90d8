"""Clients of a stack side by side on a GPU.

A GPU runs the small kernels of a client's gradient faster than Python can launch them, and one client's kernels leave
most of it idle. So the operations of a gradient, once they are recorded (:mod:`fedray.core.recording`), are captured as
a CUDA graph, which is launched as a whole. Each lane is a stream with graphs of its own, and the graphs of several
clients run side by side. A client's kernels are the same in every lane, so the number of lanes changes no bit.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]


class Lanes:
    """``count`` streams of the GPU ``device``, beside the one that is current."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]
        # the graphs of a lane never run at the same time, so they may use the same memory
        self._pools = [torch.cuda.graph_pool_handle() for _ in range(count)]
        self._begun = torch.cuda.Event()
        self._busy: set[int] = set()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A context in which what is launched in different lanes runs side by side. It begins when all is done that was
        launched before, and what is launched afterwards waits for it."""
        self._begun.record(torch.cuda.current_stream(self.device))
        try:
            yield
        finally:
            self.join()

    def join(self) -> None:
        """Has the current stream wait for all lanes."""
        current = torch.cuda.current_stream(self.device)
        for lane in self._busy:
            current.wait_stream(self._streams[lane])
        self._busy.clear()

    def of(self, row: int) -> int:
        """Returns the lane of the client in ``row`` of a stack."""
        return row % len(self._streams)

    def capture(self, function: Function, inputs: Sequence[Tensor], lane: int) -> Function:
        """Returns ``function`` as a graph for inputs like these, in one of the lanes. It is to be called within
        :meth:`together`.

        Raises RuntimeError if an operation can't be captured, such as one that waits for the GPU.
        """
        stream, current = self._streams[lane], torch.cuda.current_stream(self.device)
        held = [_place_for(tensor) for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), _no_collection():
            _copy(held, inputs)
            # what libraries set up when they are first used can't be captured
            function(*held)
            stream.synchronize()
            # other threads may go on to read samples
            graph.capture_begin(self._pools[lane], capture_error_mode="thread_local")
            try:
                outputs = function(*held)
            finally:
                graph.capture_end()
        current.wait_stream(stream)

        def launch(*inputs: Tensor) -> tuple[Tensor, ...]:
            self._busy.add(lane)
            with torch.cuda.stream(stream):
                stream.wait_event(self._begun)
                _copy(held, inputs)
                graph.replay()
                # the next launch overwrites the graph's own
                return tuple(map(torch.clone, outputs))

        return launch


def _place_for(tensor: Tensor) -> Tensor:
    """Returns fresh memory with the shape and the strides of ``tensor``, by which kernels are chosen."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _copy(held: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(map(_once, held)), list(map(_once, inputs)))


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
