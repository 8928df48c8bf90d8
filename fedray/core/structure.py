"""Inputs and outputs of models that consist of several tensors: nested tuples and dicts of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Calls ``function`` for each tensor in nested tuples and dicts, and returns its results in the same structure:
    ``map_leaves(f, (a, {"mask": b}))`` is ``(f(a), {"mask": f(b)})``.

    ``tree`` may also be a single tensor. Anything that is neither a tuple nor a dict counts as a leaf, like a tensor.
    Named tuples, and classes derived from dict such as the outputs of the library transformers, stay what they are.
    ``others`` have the structure of ``tree``; their leaves at the same place are further arguments of ``function``.
    """
    if isinstance(tree, tuple):
        parts = [map_leaves(function, *each) for each in zip(tree, *others, strict=True)]
        return type(tree)._make(parts) if hasattr(tree, "_make") else tuple(parts)
    if isinstance(tree, Mapping):
        named = {name: map_leaves(function, part, *(other[name] for other in others)) for name, part in tree.items()}
        if type(tree) is dict or not isinstance(tree, dict):
            return named
        # filled one by one, because the class may take other arguments, or forbid update()
        like = copy.copy(tree)
        for name, part in named.items():
            like[name] = part
        return like
    return function(tree, *others)


def leaves(tree: Any) -> list[Any]:
    """Returns the tensors in nested tuples and dicts as a list, from left to right: ``[a, b]`` for ``(a, {"mask":
    b})``, and ``[a]`` for a single tensor ``a``. Anything that is neither a tuple nor a dict counts as a leaf, like a
    tensor."""
    if isinstance(tree, tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    return [tree]


def outline(tree: Any) -> str:
    """Returns the structure of nested tuples and dicts as text, for messages and comparisons: ``(one array, {mask: one
    array})``. Entries of dicts are sorted by name."""
    if isinstance(tree, tuple):
        return f"({', '.join(map(outline, tree))})"
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{name}: {outline(tree[name])}' for name in sorted(tree))}}}"
    return "one array"


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Converts a model's ``inputs`` to the arguments with which the module is called: returns a tuple of positional and
    a dict of keyword arguments. The elements of a tuple become positional arguments, and the entries of a dict keyword
    arguments; a tensor becomes the only argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def call(module: Callable[..., Any], inputs: Any) -> Any:
    """Calls ``module`` with the ``inputs`` of a data set, and returns its output. A tensor is passed as the only
    argument, the elements of a tuple as positional arguments, and the entries of a dict as keyword arguments."""
    args, named = arguments(inputs)
    return module(*args, **named)


def call_on_copies(module: Callable[..., Any], inputs: Any) -> Any:
    """Does what :func:`call` does, with copies of the ``inputs``, into which the module may write."""
    return call(module, map_leaves(lambda leaf: leaf.clone(), inputs))
