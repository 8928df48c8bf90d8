"""Finds out whether the gradient of a model can be compiled, by tracing it and comparing the two."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fedray.core.batches import Batch
from fedray.core.compiled import trace
from fedray.core.copying import copied
from fedray.core.loop_network import LoopNetwork
from fedray.core.network import Network
from fedray.core.stack_network import StackNetwork
from fedray.core.structure import map_leaves
from fedray.core.task import Task
from fedray.errors import first_sentence
from fedray.models.stacking import TOLERANCE, hooked_parameter


def traced_gradient(
    module: nn.Module, task: Task, vectorize: bool, x: Any, y: Tensor, changing: Collection[str] | None = None
) -> GraphModule | str:
    """Returns the operations of the gradient of ``module`` for a mini-batch of ``x [b, ...]`` and ``y [b, ...]``, or
    the reason why it can't be compiled. With ``vectorize`` it is that of a stack. ``changing`` are the buffers that
    forward passes change, None if it may be all."""
    if hooked := hooked_parameter(module):
        return hooked
    kind: type[Network] = StackNetwork if vectorize else LoopNetwork
    network = kind(copied(module), task, changing=changing)
    batch = Batch(map_leaves(lambda each: each[None], x), y[None], 0)
    try:
        inputs = network.inputs_of(network.loaded().rows(1), batch, 0)
        graph = trace(network.pure_gradient, inputs)
        with torch.no_grad():
            found = graph(*inputs)[0].flatten()
    except Exception as error:
        return f"it can't be traced, {type(error).__name__}: {first_sentence(error)}"
    expected = network.gradients(network.loaded().rows(1), batch).value.flatten()
    off = float((found - expected).norm() / expected.norm().clamp(min=1e-12))
    # where gradients are not finite, nothing can be said
    return f"what was traced is off by {100 * off:.3g} %" if off > TOLERANCE else graph
