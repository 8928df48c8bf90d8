"""FLOPs of a sample's forward pass, counted while it runs: two for each multiply-add of matrix products and
convolutions.

Elementwise layers (activations, normalisation, biases) and look-ups (embeddings) count as zero, as is customary. So
does what is computed of the weights alone, once for a batch of any size, as by spectral normalisation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import TorchDispatchMode

Shape = Sequence[int]

NO_PRODUCTS = {
    "add", "add_", "sub", "cat", "stack", "copy_", "clone", "_to_copy", "index", "index_select", "gather", "embedding",
    "_embedding_bag", "_embedding_bag_forward_only", "native_layer_norm",
}  # fmt: skip
"""Operations that add, look up or scale: what they take of a layer's parameters rightly counts as zero."""


@dataclass(frozen=True)
class ForwardCount:
    """``flops`` of one sample's forward pass, and ``uncounted``, as ``name (Class)``: the layers that own matrices,
    multiplied with them, and did nothing that could be counted."""

    flops: float
    uncounted: tuple[str, ...]


def count_forward_pass(module: nn.Module, example: Tensor) -> tuple[Any, ForwardCount]:
    """What ``module`` gives for the batch ``example [b, ...]`` in its present mode, and what a sample's pass took.

    It is run on the batch, and on the batch twice: what the second pass takes more is for the samples.
    """
    before = torch.random.get_rng_state()
    output, flops, uncounted = _pass(module, example)
    after = torch.random.get_rng_state()
    # layers that are skipped at random are the same ones again
    torch.random.set_rng_state(before)
    _, of_both, _ = _pass(module, torch.cat([example, example]))
    torch.random.set_rng_state(after)
    return output, ForwardCount((of_both - flops) / len(example), uncounted)


def forward_flops(module: nn.Module, example: Tensor) -> float:
    """FLOPs of one sample's forward pass, tried on the batch ``example [b, ...]``, in the module's mode."""
    return count_forward_pass(module, example)[1].flops


def _pass(module: nn.Module, batch: Tensor) -> tuple[Any, int, tuple[str, ...]]:
    """The output of a forward pass without gradients, its FLOPs, and the layers that could not be counted."""
    # it imports a compiler, which the processes that train do not need
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    by_layer: dict[str, int] = {}
    calls: list[list[int]] = []
    matrices = {_label(name, layer): _matrices(layer) for name, layer in module.named_modules()}
    hooks = [
        hook
        for name, layer in module.named_modules()
        if matrices[_label(name, layer)]
        for hook in _hooks(_label(name, layer), layer, counter.get_total_flops, by_layer, calls)
    ]
    try:
        with torch.no_grad(), _plain_encoders(), counter, _Products() as products:
            output = module(batch)
    finally:
        for hook in hooks:
            hook.remove()
    uncounted = [name for name, flops in by_layer.items() if not flops and matrices[name] & products.places]
    return output, int(counter.get_total_flops()), tuple(uncounted)


def _matrices(layer: nn.Module) -> set[int]:
    """Where the layer's own parameters lie that are not vectors, which only scale or shift something.

    Parametrizations (weight norm) have none: they work on weights, not on samples. Nor has RMSNorm, which scales by
    what may have several dimensions.
    """
    own = () if isinstance(layer, (ParametrizationList, nn.RMSNorm)) else layer.parameters(recurse=False)
    return {_storage_of(each) for each in own if each.numel() > max(each.shape, default=1)}


def _storage_of(tensor: Tensor) -> int:
    """The same for a tensor and all views of it."""
    return tensor.untyped_storage().data_ptr()


class _Products(TorchDispatchMode):
    """Notes the ``places`` of the tensors that are multiplied with something, or otherwise more than looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition(":")[2]
        if not func.is_view and name not in NO_PRODUCTS:
            self.places |= {
                _storage_of(each) for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, Tensor)
            }
        return func(*args, **(kwargs or {}))


def _label(name: str, layer: nn.Module) -> str:
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
