"""FLOPs of a forward pass, counted while it runs: two for each multiply-add of matrix products and convolutions.

Elementwise layers (activations, normalisation, biases) and look-ups (embeddings) count as zero, as is customary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

Shape = Sequence[int]

WITHOUT_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, ParametrizationList)
"""Layers that rightly count as zero, beside those whose parameters are all vectors, which scale or shift something.
Parametrizations (weight norm) work on weights, not on samples."""


class ForwardCount:
    """What a forward pass took: ``flops`` of the whole batch, and ``uncounted``, the layers that own parameters, were
    called, and did nothing that could be counted though they should have, as ``name (Class)``."""

    def __init__(self) -> None:
        self.flops = 0.0
        self.uncounted: tuple[str, ...] = ()


@contextlib.contextmanager
def counting(module: nn.Module) -> Iterator[ForwardCount]:
    """Count the forward passes of ``module`` within it; the result is filled in at its end. No gradients are taken."""
    # it imports a compiler, which the processes that train do not need
    from torch.utils.flop_counter import FlopCounterMode

    found = ForwardCount()
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    by_layer: dict[str, int] = {}
    calls: list[list[int]] = []
    hooks = [
        hook
        for name, layer in module.named_modules()
        if _should_count(layer)
        for hook in _hooks(_shown(name, layer), layer, counter.get_total_flops, by_layer, calls)
    ]
    try:
        with torch.no_grad(), _plain_encoders(), counter:
            yield found
    finally:
        for hook in hooks:
            hook.remove()
    found.flops = float(counter.get_total_flops())
    found.uncounted = tuple(name for name, flops in by_layer.items() if not flops)


def _should_count(layer: nn.Module) -> bool:
    matrices = any(p.numel() > max(p.shape, default=1) for p in layer.parameters(recurse=False))
    return matrices and not isinstance(layer, WITHOUT_PRODUCTS)


def _shown(name: str, layer: nn.Module) -> str:
    return f"{name or 'own parameters'} ({type(layer).__name__})"


def _hooks(
    name: str, layer: nn.Module, total: Callable[[], int], by_layer: dict[str, int], calls: list[list[int]]
) -> list[Any]:
    """Hooks that note under ``name`` what the calls of ``layer`` add to the ``total`` beside its children's.

    ``calls``: of each call that goes on, the total at its beginning and what its children have added.
    """

    def begin(*_: Any) -> None:
        calls.append([total(), 0])

    def end(*_: Any) -> None:
        began, of_children = calls.pop()
        added = total() - began
        by_layer[name] = by_layer.get(name, 0) + added - of_children
        if calls:
            calls[-1][1] += added

    return [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]


@contextlib.contextmanager
def _plain_encoders() -> Iterator[None]:
    """Transformer layers in evaluation mode are otherwise run by one fused kernel, of which nothing can be counted."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _formulas() -> dict[Any, Callable[..., int]]:
    """FLOPs of kernels that torch's counter lacks (attention on CPUs: before torch 2.9 or so), from their arguments'
    shapes."""
    aten = torch.ops.aten
    return {
        aten.mkldnn_rnn_layer: _lstm_layer,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten.mv: lambda matrix, vector, **_: 2 * prod(matrix),
        aten.addmv: lambda added, matrix, vector, **_: 2 * prod(matrix),
        aten.dot: lambda one, other, **_: 2 * prod(one),
    }


def _lstm_layer(inputs: Shape, of_inputs: Shape, of_hidden: Shape, *_: Any, **__: Any) -> int:
    """One direction of one layer of ``inputs [tokens, b, width]`` with its two matrices, ``[4 hidden, ...]``."""
    return 2 * inputs[0] * inputs[1] * (prod(of_inputs) + prod(of_hidden))


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Q K^T, and its softmax times V, of ``[b, heads, tokens, width]``. What a mask leaves out is counted too."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def forward_flops(module: nn.Module, example: Tensor) -> float:
    """FLOPs of one sample's forward pass, from those of the batch ``example [b, ...]``, in the module's mode."""
    with counting(module) as count:
        module(example)
    return count.flops / len(example)
