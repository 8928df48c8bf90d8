"""Inputs and outputs of models that consist of several tensors: nested tuples and dicts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Returns a structure like ``tree`` in which each leaf is replaced by ``function(leaf, *others)``.

    A leaf is anything that is neither a tuple nor a dict. ``others`` are structures like ``tree``, whose leaves at the
    same place are passed.
    """
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, *parts) for parts in zip(tree, *others, strict=True))
    if isinstance(tree, Mapping):
        return {name: map_leaves(function, part, *(other[name] for other in others)) for name, part in tree.items()}
    return function(tree, *others)


def leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a structure, from left to right."""
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    return [tree]


def outline(tree: Any) -> str:
    """Returns the form of nested tuples and dicts as text, such as ``(one array, {mask: one array})``."""
    if isinstance(tree, tuple):
        return f"({', '.join(map(outline, tree))})"
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{name}: {outline(tree[name])}' for name in sorted(tree))}}}"
    return "one array"


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments with which a module is called for ``inputs``. The elements of a
    tuple are positional arguments, and the entries of a dict are keyword arguments; a tensor is the only argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def call(module: Callable[..., Any], inputs: Any) -> Any:
    """Calls ``module`` with ``inputs`` as its :func:`arguments`, and returns its output."""
    args, named = arguments(inputs)
    return module(*args, **named)
