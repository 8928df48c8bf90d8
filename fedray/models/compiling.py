"""Finds out whether the gradient of a model can be compiled, by tracing it and comparing the traced gradient with the
original one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fedray.core.batches import Batch
from fedray.core.copying import copied
from fedray.core.structure import map_leaves
from fedray.core.task import Task
from fedray.errors import first_sentence
from fedray.gradients.compiled import trace
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.network import Network
from fedray.gradients.stack import StackNetwork
from fedray.models.stacking import hooked_parameter

TOLERANCE = 1e-3
"""The largest difference between two gradients, relative to their length, that counts as rounding. They are compared in
float64 where that is possible, so that the answer does not depend on how a processor rounds."""


def traced_gradient(
    module: nn.Module,
    task: Task,
    vectorize: bool,
    x: Any,
    y: Tensor,
    changing: Collection[str] | None = None,
    device: str = "cpu",
) -> GraphModule | str:
    """Finds out whether torch's compiler can compile the gradient of ``module``. Returns the gradient's torch
    operations as a graph if it can, and otherwise the reason why it can't, as text for messages.

    The gradient of one mini-batch is traced, that is, turned into a graph of operations, and the graph's result is
    compared with the original gradient.

    Args:
        module: The model.
        task: The task, whose loss is differentiated.
        vectorize: Whether it is the gradient of a stack (several clients that are computed at once) or of one client.
        x: The inputs ``[b, ...]`` of the mini-batch.
        y: The targets ``[b, ...]`` of the mini-batch.
        changing: The names of the buffers that forward passes change; None means that all may be changed.
        device: The kind of device for which the gradient is to be compiled, ``cpu`` or ``cuda``.
    """
    if hooked := hooked_parameter(module):
        return hooked

    def trial(dtype: torch.dtype) -> tuple[GraphModule, float, Network]:
        network: Network
        if vectorize:
            windows = device == "cuda"
            network = StackNetwork(copied(module).to(dtype), task, changing=changing, dtype=dtype, windows=windows)
        else:
            network = LoopNetwork(copied(module).to(dtype), task, changing=changing, dtype=dtype)
        return *_compared(network, _cast(x, dtype), _cast(y, dtype)), network

    try:
        graph, off, network = trial(torch.float32)
    except Exception as error:
        return f"it can't be traced, {type(error).__name__}: {first_sentence(error)}"
    # buffers lie in rows of float32, and some modules convert to it themselves
    if off and not network.layout.buffers:
        with contextlib.suppress(Exception):
            _, off, _ = trial(torch.float64)
    # if gradients are not finite, nothing can be said
    return f"what was traced is off by {100 * off:.3g} %" if off > TOLERANCE else graph


def _compared(network: Network, x: Any, y: Tensor) -> tuple[GraphModule, float]:
    """Traces a gradient of ``network`` for the mini-batch ``x [b, ...]`` and ``y [b, ...]``. Returns its operations as
    a graph, and by how much the graph's results (gradient, loss, buffers and metric) differ from those of a gradient
    that is not traced: the largest difference, relative to the result's length."""
    batch = Batch(map_leaves(lambda each: each[None], x), y[None], 0)
    inputs = network.inputs_of(network.loaded().rows(1), batch, 0)
    graph = trace(network.pure_gradient, inputs)
    expected = [network.gradients(network.loaded().rows(1), batch).value, *network.pure_gradient(*inputs)[1:]]
    with torch.no_grad():
        results = zip(graph(*inputs), expected, strict=True)
        pairs = [(found.double().flatten(), right.double().flatten()) for found, right in results]
    off = [float((found - right).norm() / right.norm().clamp(min=1e-12)) for found, right in pairs]
    return graph, max((each for each in off if not math.isnan(each)), default=math.nan)


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    return map_leaves(lambda each: each.to(dtype) if each.is_floating_point() else each, inputs)
