"""Counts the FLOPs of a sample's forward pass while it runs.

Each multiply-add of a matrix product or convolution counts as two. Elementwise layers (activations, normalisation,
biases) and look-ups (embeddings) count as zero, as is customary. What a layer computes from its weights alone, once for
a batch of any size, as spectral normalisation does, counts as zero too.
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
from torch.utils._pytree import tree_leaves

from fedray.core.structure import arguments, leaves, map_leaves

Shape = Sequence[int]

NO_PRODUCTS = {
    "add", "add_", "sub", "cat", "stack", "copy_", "clone", "_to_copy", "index", "index_select", "gather", "embedding",
    "_embedding_bag", "_embedding_bag_forward_only", "native_layer_norm",
}  # fmt: skip
"""The operations that only add, look up or scale. A layer whose parameters enter nothing else needs no FLOPs."""


@dataclass(frozen=True)
class ForwardCount:
    """The FLOPs of one sample's forward pass.

    ``uncounted`` are the layers, as ``name (Class)``, that multiplied with matrices of their own in a way that could
    not be counted.
    """

    flops: float
    uncounted: tuple[str, ...]


def count_forward_pass(module: nn.Module, example: Any) -> tuple[Any, ForwardCount]:
    """Runs ``module`` in its present mode on the inputs ``example [b, ...]``; returns its output and a sample's FLOPs.

    The module is run on the batch, and then on a batch that holds it twice. The difference of FLOPs is that of b
    samples, without what is computed once for a batch of any size.
    """
    before = torch.random.get_rng_state()
    output, flops, uncounted = _pass(module, example)
    after = torch.random.get_rng_state()
    # a module that skips layers at random skips the same ones again
    torch.random.set_rng_state(before)
    _, of_both, _ = _pass(module, map_leaves(lambda x: torch.cat([x, x]), example))
    torch.random.set_rng_state(after)
    return output, ForwardCount((of_both - flops) / len(leaves(example)[0]), uncounted)


def forward_flops(module: nn.Module, example: Any) -> float:
    """Returns the FLOPs of one sample's forward pass in the module's present mode.

    ``example [b, ...]`` is a batch of inputs with which the module is run.
    """
    return count_forward_pass(module, example)[1].flops


def _pass(module: nn.Module, batch: Any) -> tuple[Any, int, tuple[str, ...]]:
    """Runs a forward pass without gradients; returns its output, its FLOPs, and the layers that could not be
    counted."""
    args, named = arguments(batch)
    counter = _Counter()
    by_layer: dict[str, int] = {}
    calls: list[list[int]] = []
    matrices = {_label(name, layer): _matrices(layer) for name, layer in module.named_modules()}
    hooks = [
        hook
        for name, layer in module.named_modules()
        if matrices[_label(name, layer)]
        for hook in _hooks(_label(name, layer), layer, lambda: counter.flops, by_layer, calls)
    ]
    try:
        with torch.no_grad(), _plain_encoders(), counter:
            output = module(*args, **named)
    finally:
        for hook in hooks:
            hook.remove()
    uncounted = [name for name, flops in by_layer.items() if not flops and matrices[name] & counter.places]
    return output, counter.flops, tuple(uncounted)


def _matrices(layer: nn.Module) -> set[int]:
    """Returns the memory addresses of the layer's own parameters that may be factors of a product.

    Vectors are left out, because they only scale or shift something. There are none for a parametrization (weight
    norm), because it computes with weights and not with samples, and none for RMSNorm, which only scales, by a
    parameter that may have several dimensions.
    """
    own = () if isinstance(layer, (ParametrizationList, nn.RMSNorm)) else layer.parameters(recurse=False)
    return {_storage_of(each) for each in own if each.numel() > max(each.shape, default=1)}


def _storage_of(tensor: Tensor) -> int:
    """Returns the memory address of a tensor's storage, which all views of the tensor share."""
    return tensor.untyped_storage().data_ptr()


class _Counter(TorchDispatchMode):
    """A mode of torch that adds up in ``flops`` what torch's formulas give for each operation, and collects in
    ``places`` the memory addresses of tensors which may be multiplied.

    torch's own ``FlopCounterMode`` does the first, but imports torch's compiler, which takes 200 MB and some seconds at
    the start of each run.
    """

    def __init__(self) -> None:
        # imported here, as it imports Triton, which the processes that train do not need
        from torch.utils.flop_counter import flop_registry, shape_wrapper

        super().__init__()
        self.flops = 0
        self.places: set[int] = set()
        self._formulas = {**flop_registry, **{kernel: shape_wrapper(own) for kernel, own in _formulas().items()}}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # the default would import the compiler when the first operation is seen
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = func._schema.name.rpartition(":")[2]
        if not func.is_view and name not in NO_PRODUCTS:
            tensors = (each for each in tree_leaves(args) if isinstance(each, Tensor))
            # others, such as sparse ones, have no storage
            self.places |= {_storage_of(each) for each in tensors if each.layout == torch.strided}
        formula = self._formulas.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **named)
            if parts is not NotImplemented:
                return parts
        output = func(*args, **named)
        if formula is not None:
            self.flops += int(formula(*args, **named, out_val=output))
        return output


def _label(name: str, layer: nn.Module) -> str:
    return f"{name or 'own parameters'} ({type(layer).__name__})"


def _hooks(
    name: str, layer: nn.Module, total: Callable[[], int], by_layer: dict[str, int], calls: list[list[int]]
) -> list[Any]:
    """Puts hooks on ``layer`` that add to ``by_layer[name]`` the FLOPs of its calls, without those of its children.

    ``total`` returns all FLOPs so far. ``calls`` is the stack of the calls that are running: for each the total at its
    beginning, and what its children have added. Returns the handles of the hooks.
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
    """A context in which transformer layers run their single operations.

    In evaluation mode one fused kernel would otherwise do all, uncounted.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _formulas() -> dict[Any, Callable[..., int]]:
    """Returns functions that compute the FLOPs of kernels which torch's counter does not know, from the arguments'
    shapes.

    Attention on CPUs is one of them before torch 2.9 or so.
    """
    aten = torch.ops.aten
    return {
        aten.mkldnn_rnn_layer: _lstm_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten.mv: lambda matrix, vector, **_: 2 * prod(matrix),
        aten.addmv: lambda added, matrix, vector, **_: 2 * prod(matrix),
        aten.dot: lambda one, other, **_: 2 * prod(one),
    }


def _lstm_flops(inputs: Shape, of_inputs: Shape, of_hidden: Shape, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of one direction of an LSTM layer for ``inputs [tokens, b, width]``.

    Its matrices are ``[4 hidden, ...]``.
    """
    return 2 * inputs[0] * inputs[1] * (prod(of_inputs) + prod(of_hidden))


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of attention for ``[b, heads, tokens, width]``, as if there were no mask.

    They are those of Q K^T, and of its softmax times V.
    """
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
