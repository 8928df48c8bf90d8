"""Compiles gradients of whole mini-batches with torch's compiler.

Only the gradient is compiled: a pure function of a client's model and mini-batch, for one shape of mini-batches.
Mini-batches of other shapes, such as the last of an epoch, are computed without the compiler. So the bits of a gradient
depend only on the shape, and not on what a process has computed before.
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
    same shapes, and compiled. An operation that can't be traced, such as a branch that depends on values, raises its
    own exception."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # parameters that are not trained are constants of the graph
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


class Compiled:
    """A function that torch's compiler makes faster: ``compiled(shape, *inputs)`` returns ``function(*inputs)`` for a
    mini-batch of ``shape``.

    ``function`` must be pure, and take tensors, or tuples and dicts of tensors. ``shapes`` are the possible shapes of
    mini-batches; ``shape in compiled`` says whether a shape is among them. The function is compiled separately for
    each, when a mini-batch of that shape first occurs, within the context ``around()``.
    """

    def __init__(self, function: Function, shapes: Collection[Any], around: Around = contextlib.nullcontext) -> None:
        self._function, self._shapes, self._around = function, frozenset(shapes), around
        self._made: dict[Any, Function] = {}

    def __contains__(self, shape: Any) -> bool:
        return shape in self._shapes

    def __call__(self, shape: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns ``function(*inputs)``, compiled for mini-batches of ``shape``, which must be one of the shapes of
        this object. The first call with a shape compiles the function, which takes some seconds."""
        # a compiled function is valid only for the strides with which it was compiled
        tensors = map_leaves(lambda tensor: tensor.contiguous(), inputs)
        with torch.no_grad():
            if shape not in self._made:
                with self._around():
                    graph = trace(self._function, tensors)
                    self._made[shape] = torch.compile(graph, fullgraph=True, dynamic=False)
                    return self._made[shape](*tensors)
            return self._made[shape](*tensors)
