"""Compiles gradients of whole mini-batches with torch's compiler.

The compiled function is pure: it takes a client's model and mini-batch and returns the gradient. It is compiled only
for some shapes of mini-batches. Others, such as the last mini-batch of an epoch, are computed without the compiler. So
the bits of a gradient depend only on the shape, and not on what a process has computed before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fedray.core.structure import map_leaves

USER_FOLDER = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
"""The folder in which the user wants torch to keep compiled code (``TORCHINDUCTOR_CACHE_DIR``), or None. It is read
early, because torch itself sets the variable later."""

Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""The type of functions that return a context in which another function is compiled."""

Function = Callable[..., tuple[Tensor, ...]]


def trace(function: Function, inputs: Any) -> torch.fx.GraphModule:
    """Returns the torch operations of ``function(*inputs)`` as a graph, which can be called with other inputs of the
    same shapes, and can be compiled. ``inputs`` are tensors, or tuples and dicts of tensors. If an operation can't be
    traced, such as a branch that depends on a tensor's values, torch raises an exception."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # parameters that are not trained are constants of the graph
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


class Compiled:
    """A pure function, such as a gradient, that torch's compiler makes faster: ``compiled(shape, *inputs)`` returns the
    tensors ``function(*inputs)`` for a mini-batch of ``shape``. This is possible only for some shapes, those for which
    ``shape in compiled`` is true. For each of them the function is compiled separately, when it is first called.

    Args:
        function: Takes tensors, or tuples and dicts of tensors, and returns a tuple of tensors.
        shapes: The shapes of mini-batches for which the function is compiled, as hashable values, such as the number of
            samples.
        around: ``around()`` returns a context in which one compilation runs, for example to measure its time.
    """

    def __init__(self, function: Function, shapes: Collection[Any], around: Around = contextlib.nullcontext) -> None:
        self._function, self._shapes, self._around = function, frozenset(shapes), around
        self._made: dict[Any, Function] = {}

    def __contains__(self, shape: Any) -> bool:
        return shape in self._shapes

    def __call__(self, shape: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns ``function(*inputs)``, computed by compiled code for mini-batches of ``shape``, which must be one of
        the shapes with which this object was made. The first call with a shape compiles the function, which takes some
        seconds."""
        # a compiled function is valid only for the strides with which it was compiled
        tensors = map_leaves(lambda tensor: tensor.contiguous(), inputs)
        with torch.no_grad():
            if shape not in self._made:
                with self._around():
                    graph = trace(self._function, tensors)
                    self._made[shape] = torch.compile(graph, fullgraph=True, dynamic=False)
                    return self._made[shape](*tensors)
            return self._made[shape](*tensors)
