"""Computes the clients of a stack side by side on a GPU.

A GPU runs the small kernels of a client's gradient faster than Python can launch them, and one client's kernels leave
most of it idle. So the recorded gradients (:mod:`fedray.gradients.recording`) of several clients are captured as one
CUDA graph, each client in its own stream, called a lane. The kernels are the same in every lane, so the number of lanes
changes no bit.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedray.core.sending import sent
from fedray.core.structure import map_leaves
from fedray.gradients.recording import Eager, Function, Recorded, leaves_of, refuse, replay, same, shape_of

FIRST = 4
"""The number of mini-batches of one shape that are computed before their gradient is captured. A graph is 3 to 10 times
as fast as the ordinary way."""


class Lanes:
    """Computes several clients side by side on a GPU, in ``count`` CUDA streams of ``device``, which are called lanes.
    The computation of all clients is captured as one CUDA graph."""

    def __init__(self, device: torch.device, count: int) -> None:
        new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream
        self._main = new_stream(device)
        self._lanes = [new_stream(device) for _ in range(count)]
        # graphs are launched one after another, so they can share memory
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Function, rows: Sequence[Sequence[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
        """Captures ``function`` for C clients as one CUDA graph, in which the clients are computed side by side.
        Returns a function that launches the graph: it takes other ``rows`` of the same shapes, and returns a tensor
        ``[C, ...]`` with the clients' results for each output of ``function``.

        Args:
            function: The computation for one client; it takes tensors and returns a tuple of tensors.
            rows: The inputs of ``function`` for each client. All clients' inputs must have the same shapes.

        Raises:
            RuntimeError: An operation can't be captured, such as one that waits for the GPU.
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
            # other threads may be reading samples
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._side_by_side(function, held, lanes)
            finally:
                graph.capture_end()

        def launch(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
            _copy(held, rows)
            graph.replay()
            # into new memory, because the next launch overwrites the memory of the graph
            return tuple(map(torch.stack, outputs))

        return launch

    def _side_by_side(
        self, function: Function, rows: Sequence[Sequence[Tensor]], lanes: Sequence[torch.cuda.Stream]
    ) -> list[tuple[Tensor, ...]]:
        """Computes ``function`` for each row of inputs, each in one of the ``lanes`` (streams of the GPU). Returns a
        list with an entry for each output of ``function``: the results of all rows."""
        found = []
        for lane in lanes:
            lane.wait_stream(self._main)
        for place, row in enumerate(rows):
            with torch.cuda.stream(lanes[place % len(lanes)]):
                found.append(function(*row))
        for lane in lanes:
            self._main.wait_stream(lane)
        return list(zip(*found, strict=True))


class SideBySide(Recorded):
    """A pure function, such as a gradient, that is computed for several clients at once on a GPU, by CUDA graphs.

    Args:
        function: Takes tensors, or tuples and dicts of tensors, and returns a tuple of tensors.
        changing: Tensors whose values change between calls, such as a module's parameters. A function that uses one of
            them without getting it as an input is computed without graphs.
        lanes: Has the CUDA streams in which the clients are computed side by side.
        say: ``say(line)`` is called with a line for the user if no graph can be captured.
    """

    @property
    def first(self) -> int:
        return FIRST

    def __init__(
        self,
        function: Function,
        changing: Iterable[Tensor],
        lanes: Lanes,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(function, changing)
        self._lanes, self._say = lanes, say
        self._graphs: dict[Any, Callable[..., tuple[Tensor, ...]]] = {}
        self._unsteady: set[Any] = set()

    def gave_up(self, why: str) -> None:
        self._say(f"gradients can't be captured as CUDA graphs, and are computed more slowly, because {why}")

    def __call__(self, inputs: Sequence[Any], eager: Eager) -> tuple[Tensor, ...]:
        return tuple(each[0] for each in self.together([inputs], [eager]))

    def together(
        self, rows: Sequence[Sequence[Any]], eager: Sequence[Eager], same_shape: bool = False
    ) -> tuple[Tensor, ...]:
        """Computes the function for C clients. Returns the clients' results as one tensor ``[C, ...]`` for each output
        of the function.

        Args:
            rows: The inputs of each client. Clients whose inputs have the same shapes are computed by one graph.
            eager: For each client a function without arguments that computes its result without a graph, as a tuple of
                tensors. It is used as long as there is no graph.
            same_shape: Says that all clients' inputs have the same shapes. If False, clients are grouped.
        """
        if same_shape:
            return self._of_shape(shape_of(rows[0]), rows, eager)
        shapes: dict[Any, list[int]] = {}
        for place, inputs in enumerate(rows):
            shapes.setdefault(shape_of(inputs), []).append(place)
        parts = [
            self._of_shape(key, [rows[place] for place in places], [eager[place] for place in places])
            for key, places in shapes.items()
        ]
        if len(parts) == 1:
            return parts[0]
        places = torch.tensor([place for chosen in shapes.values() for place in chosen]).argsort()
        return tuple(torch.cat(each)[sent(places, each[0].device)] for each in zip(*parts, strict=True))

    def _of_shape(self, key: Any, rows: Sequence[Sequence[Any]], eager: Sequence[Eager]) -> tuple[Tensor, ...]:
        found = self.known(key, rows[0], len(rows))
        is_due = found.replay is not None and found.is_due and key not in self._unsteady
        first = [map_leaves(torch.clone, each) for each in rows[0]] if is_due else []
        launched = None
        if found.replay is not None:
            launched = replay(found, partial(self._launch, key, found.replay), [leaves_of(row) for row in rows])
        if launched is not None and is_due and not self._is_right(key, first, [each[0] for each in launched]):
            refuse(found)
            launched = None
        return launched or tuple(map(torch.stack, zip(*(each() for each in eager), strict=True)))

    def _launch(self, key: Any, function: Function, *rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        key = key, len(rows)
        if key not in self._graphs:
            self._graphs[key] = self._lanes.capture(function, rows)
        return self._graphs[key](rows)

    def _is_right(self, key: Any, inputs: Sequence[Any], launched: Sequence[Tensor]) -> bool:
        """Returns whether ``launched``, the results of a CUDA graph for one client, are what the function returns for
        the same ``inputs``. If the function returns something else each time, because a GPU has no deterministic
        kernel, they can't be compared, and the answer is True. ``key`` stands for the shapes of the inputs."""
        expected = self.function(*inputs)
        if same(expected, launched):
            return True
        if same(expected, self.function(*inputs)):
            return False
        self._unsteady.add(key)
        return True


def _place_for(tensor: Tensor) -> Tensor:
    """Returns new memory with the shape and the strides of ``tensor``. The strides decide which kernels are run."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _copy(held: Sequence[Sequence[Tensor]], rows: Sequence[Sequence[Tensor]]) -> None:
    for places, tensors in zip(zip(*held, strict=True), zip(*rows, strict=True), strict=True):
        torch._foreach_copy_(list(map(_once, places)), list(map(_once, tensors)))


def _once(tensor: Tensor) -> Tensor:
    """Returns a view of ``tensor`` without the repetitions that ``expand`` has added, so that each number is copied
    only once."""
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
