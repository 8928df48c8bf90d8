"""Private layers: the parameters and buffers of a model that stay at each client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fedray.core.linear import is_adapter
from fedray.core.norms import norm_layers
from fedray.core.places import Places
from fedray.core.vectors import Layout
from fedray.errors import UserError, near_miss

SHORTCUTS = {
    "head": "the last layer",
    "base": "everything but the last layer",
    "norm": "the normalisation layers, with their statistics",
}
"""The names that stand for parts of any model."""


def private_names(module: nn.Module, layout: Layout, patterns: Sequence[str], what: str = "private layers") -> set[str]:
    """Returns the names of the trainable parameters and changing buffers of ``module`` that ``patterns`` name.

    A pattern is one of :data:`SHORTCUTS`, the name of a parameter, buffer or layer, or a pattern of names with ``*``,
    such as ``*.bias``. A tensor that layers share goes by the name that it has in any of them; the result has its first
    name. Raises :class:`UserError`, which begins with ``what``, if nothing has such a name. A model need not have what
    a shortcut names.
    """
    first = [slot.name for slot in layout.slots]
    first += [slot.name for block in layout.blocks for slot in block.slots]
    names = {name: name for name in first}
    names |= {other: name for other, name in Places(module).aliases.items() if name in names}
    found: set[str] = set()
    for pattern in patterns:
        chosen = _chosen(module, names, pattern)
        if not chosen and pattern not in SHORTCUTS:
            near = near_miss(pattern, [*names, *SHORTCUTS])
            raise UserError(f"{what}: the model has no parameter and no layer {pattern!r}{near}")
        found |= chosen
    return found


def private_columns(module: nn.Module, layout: Layout, patterns: Sequence[str]) -> Tensor:
    """Returns where the private layers of ``module`` are in a model's row: their places, int64 ``[k]``, ascending.
    ``layout`` is that of the row, and ``patterns`` name the layers (:func:`private_names`)."""
    names = private_names(module, layout, patterns)
    ranges = [(slot.start, slot.size) for slot in layout.slots if slot.name in names]
    for block in layout.blocks:
        for slot in block.slots:
            if slot.name in names:
                # the parts of an entry of another type are as far from each other as the block is long
                first = layout.width + block.start + slot.start
                ranges += [(first + part * block.count, slot.size) for part in range(block.parts)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(at, at + size) for at, size in sorted(ranges))])


def mask_of(module: nn.Module, layout: Layout, patterns: Sequence[str]) -> Tensor:
    """Returns a mask, bool ``[width]``, that is true for the parameters of ``module`` that ``patterns`` name
    (:func:`private_names`). ``layout`` is that of a model's row."""
    places = private_columns(module, layout, patterns)
    chosen = torch.zeros(layout.width, dtype=torch.bool)
    chosen[places[places < len(chosen)]] = True
    return chosen


def layers_with_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the layers of ``module`` that have parameters of their own, with their names (:func:`name_of_layer`), in
    the order in which they were registered."""
    for name, layer in module.named_modules():
        if any(True for _ in layer.parameters(recurse=False)):
            yield name_of_layer(name), layer


def name_of_layer(name: str) -> str:
    """Returns ``name``, that of a module or parameter, or, if it is a part of a weight that is computed, as by
    weight_norm, the name of that layer, within which torch keeps these parts."""
    return name.partition(".parametrizations")[0]


def check_head(module: nn.Module, last_called: str | None, asked: Mapping[str, Sequence[str]]) -> None:
    """Checks that ``head`` and ``base`` mean what users expect: that the layer of ``module`` that was registered last
    is also ``last_called``, the name of the layer that a forward pass calls last.

    ``asked`` has the patterns of each key of the configuration that names layers, by key. Raises :class:`UserError` if
    one of them says ``head`` or ``base``, and these layers differ.
    """
    registered = [name for name, _ in layers_with_parameters(module) if not is_adapter(name)][-1:]
    for key, patterns in asked.items():
        said = [each for each in ("head", "base") if each in patterns]
        if said and last_called is not None and [last_called] != registered:
            raise UserError(
                f"{key}: {said[0]} goes by the layer that the model registers last, {registered[0]}, but its forward "
                f"pass calls {last_called} last: name the layers themselves"
            )


def _chosen(module: nn.Module, names: Mapping[str, str], pattern: str) -> set[str]:
    """Returns the first names of the tensors that ``pattern`` names. ``names`` maps all names to first names."""
    if pattern == "base":
        return {*names.values()} - _chosen(module, names, "head")
    if pattern not in SHORTCUTS:
        return {names[name] for name in names if name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)}
    if pattern == "norm":
        layers = [name for name, _ in norm_layers(module)]
    else:
        layers = [name for name, _ in layers_with_parameters(module)][-1:]
    inside = {name for name in names if name_of_layer(name).rpartition(".")[0] in layers}
    inside |= {name for name in names if name_of_layer(name) in layers}
    return {names[name] for name in inside}
