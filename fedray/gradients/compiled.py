"""Gradients of whole mini-batches as functions that torch's compiler has made.

What is compiled is the gradient alone, a pure function of a client's model and mini-batch, for one shape of
mini-batches. Mini-batches of other shapes, such as the last ones of an epoch, are computed as without the compiler. So
the shape alone decides which bits a gradient has, and not what a process has computed before.
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
"""The folder in which the user wants torch to keep what it compiles, or None. torch itself sets the variable later."""

Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a context in which a function is compiled."""

Function = Callable[..., tuple[Tensor, ...]]


def trace(function: Function, inputs: Any) -> torch.fx.GraphModule:
    """Returns the operations of ``function(*inputs)`` as a graph. Raises whatever an operation raises that can't be
    traced, such as a branch that depends on values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # parameters that are not trained are constants of the graph
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


class Compiled:
    """A pure ``function`` of tensors, or of tuples and dicts of them, that is compiled for each of the ``shapes`` of
    mini-batches when it is first asked for.

    It is compiled within ``around()``.
    """

    def __init__(self, function: Function, shapes: Collection[Any], around: Around = contextlib.nullcontext) -> None:
        self._function, self._shapes, self._around = function, frozenset(shapes), around
        self._made: dict[Any, Function] = {}

    def __contains__(self, shape: Any) -> bool:
        return shape in self._shapes

    def __call__(self, shape: Any, *inputs: Any) -> tuple[Tensor, ...]:
        """Returns ``function(*inputs)`` for a mini-batch of ``shape``."""
        # the compiled function is for the strides with which it was compiled
        tensors = map_leaves(lambda tensor: tensor.contiguous(), inputs)
        with torch.no_grad():
            if shape not in self._made:
                with self._around():
                    graph = trace(self._function, tensors)
                    self._made[shape] = torch.compile(graph, fullgraph=True, dynamic=False)
                    return self._made[shape](*tensors)
            return self._made[shape](*tensors)
