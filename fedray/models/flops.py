"""Counts the FLOPs of a sample's forward pass while it runs.

Each multiply-add of a matrix product or convolution counts as two. Elementwise layers (activations, normalisation,
biases), look-ups (embeddings), and what is computed from weights alone (spectral normalisation) count as zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fedray.core.structure import call_on_copies, leaves, map_leaves
from fedray.gradients.watching import Mode, address_of

Shape = Sequence[int]

NO_PRODUCTS = {
    "add", "add_", "sub", "cat", "stack", "copy_", "clone", "_to_copy", "index", "index_select", "gather", "embedding",
    "_embedding_bag", "_embedding_bag_forward_only", "native_layer_norm",
}  # fmt: skip
"""The torch operations that only add, look up or scale. A layer has no FLOPs if its parameters enter only these."""


@dataclass(frozen=True)
class ForwardCount:
    """The number of FLOPs (floating-point operations) of one sample's forward pass, ``flops``.

    ``uncounted`` are layers whose FLOPs are missing in this number, as ``name (Class)``. They use their weight matrices
    only in operations for which no formula for the FLOPs is known.
    """

    flops: float
    uncounted: tuple[str, ...]


def count_forward_pass(module: nn.Module, example: Any) -> tuple[Any, ForwardCount]:
    """Counts the FLOPs of a forward pass of ``module`` in its current mode (training or evaluation). Returns the output
    for the inputs ``example [b, ...]``, and the FLOPs of one sample (:class:`ForwardCount`).

    The module is run on ``example``, and then on a batch that contains each of these samples twice. The difference is
    the FLOPs of b samples, without work that is done once per batch.
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
    """Returns the FLOPs (floating-point operations) of one sample's forward pass of ``module`` in its current mode
    (training or evaluation), for inputs ``example [b, ...]``. A multiply-add counts as two FLOPs."""
    return count_forward_pass(module, example)[1].flops


def _pass(module: nn.Module, batch: Any) -> tuple[Any, int, tuple[str, ...]]:
    """Runs a forward pass of ``module`` without gradients, and returns three things: its output, the FLOPs of the whole
    ``batch``, and the names of the layers that could not be counted."""
    counter = _Counter()
    layers = {f"{name or 'own parameters'} ({type(m).__name__})": m for name, m in module.named_modules()}
    matrices = {label: found for label, layer in layers.items() if (found := _matrices(layer))}
    with contextlib.ExitStack() as hooks:
        for label in matrices:
            for hook in counter.hooks(label, layers[label]):
                hooks.enter_context(hook)
        with torch.no_grad(), _plain_encoders(), counter:
            output = call_on_copies(module, batch)
    uncounted = [label for label, flops in counter.by_layer.items() if not flops and matrices[label] & counter.factors]
    return output, counter.flops, tuple(uncounted)


def _matrices(layer: nn.Module) -> set[int | None]:
    """Returns the memory addresses of the layer's own parameters that may be factors of a product.

    Vectors are left out, because they only scale or shift something. So are all parameters of parametrizations (weight
    norm), which compute with weights and not with samples, and of RMSNorm, which only scales, by a parameter that may
    have several dimensions.
    """
    direct = () if isinstance(layer, (ParametrizationList, nn.RMSNorm)) else layer.parameters(recurse=False)
    return {address_of(each) for each in direct if each.numel() > max(each.shape, default=1)}


class _Counter(Mode):
    """A torch mode that adds up the FLOPs of each operation by torch's formulas, in ``flops`` and ``by_layer``. In
    ``factors`` it collects the memory addresses of tensors that may be multiplied.

    torch's ``FlopCounterMode`` counts FLOPs too, but imports torch's compiler, which takes 200 MB and some seconds at
    the start of each run.
    """

    def __init__(self) -> None:
        # imported here because it imports Triton, which the processes that train do not need
        from torch.utils.flop_counter import flop_registry, shape_wrapper

        super().__init__()
        self.flops = 0
        self.by_layer: dict[str, int] = {}
        self.factors: set[int | None] = set()
        self._running: list[str] = []
        of_shapes: Callable[..., Callable[..., int]] = shape_wrapper
        self._formulas = {**flop_registry, **{kernel: of_shapes(formula) for kernel, formula in _formulas().items()}}

    def hooks(self, label: str, layer: nn.Module) -> list[RemovableHandle]:
        """Puts hooks on ``layer``, so that the FLOPs of its operations are added to ``by_layer[label]``, except for
        those of inner layers that have such hooks too. Returns the hooks' handles, by which they can be removed."""

        def begin(*_: Any) -> None:
            self._running.append(label)
            self.by_layer.setdefault(label, 0)

        def end(*_: Any) -> None:
            self._running.pop()

        return [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not func.is_view and func._schema.name.rpartition(":")[2] not in NO_PRODUCTS:
            self.factors |= {address_of(each) for each in tree_leaves(args) if isinstance(each, Tensor)} - {None}
        formula = self._formulas.get(func.overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        output = super().run(func, args, kwargs)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=output))
            self.flops += flops
            if self._running:
                self.by_layer[self._running[-1]] += flops
        return output


@contextlib.contextmanager
def _plain_encoders() -> Iterator[None]:
    """A context in which transformer layers run their separate operations and not one fused kernel, which could not be
    counted."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _formulas() -> dict[Any, Callable[..., int]]:
    """Returns formulas for the FLOPs of those torch operations that torch's own table of formulas lacks, as a dict by
    operation. A formula is a function that takes the shapes of the operation's arguments and returns the FLOPs."""
    aten = torch.ops.aten
    return {
        aten.mkldnn_rnn_layer: _lstm_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten.mv: lambda matrix, vector, **_: 2 * prod(matrix),
        aten.addmv: lambda added, matrix, vector, **_: 2 * prod(matrix),
        aten.dot: lambda one, other, **_: 2 * prod(one),
    }


def _lstm_flops(inputs: Shape, of_inputs: Shape, of_hidden: Shape, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of one direction of an LSTM layer for ``inputs [tokens, b, width]``. ``of_inputs`` and
    ``of_hidden`` are its weight matrices ``[4 hidden, ...]``. The arguments are shapes."""
    return 2 * inputs[0] * inputs[1] * (prod(of_inputs) + prod(of_hidden))


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of attention: of Q K^T, and of the product of its softmax with V. The arguments are the shapes
    ``[b, heads, tokens, width]`` of Q, K and V. Masks are ignored."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
