"""Tells whether a model and its loss consist of known code alone, which keeps no state that torch does not know."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fedray.core.task import Task

KNOWN = ("builtins", "torch", "torchvision", "fedray")
"""Packages whose modules compute the same from the same tensors, however often they are called."""


def is_known(module: nn.Module, task: Task) -> bool:
    """Returns whether all that a gradient of ``module`` runs is code of :data:`KNOWN` packages, without hooks.

    The forward pass of a user's own class may count its calls, draw numbers of Python's, or keep statistics of its own,
    which can't be seen from outside. A user's ``nn.Sequential`` of torch's layers is known.
    """
    followed = None if task.followed is None else task.metrics[task.followed].values
    functions = [task.loss, *(() if followed is None else (followed,))]
    return all(map(_is_known_layer, module.modules())) and all(map(_is_of_known, functions))


def _is_known_layer(layer: nn.Module) -> bool:
    hooks: list[Any] = [
        layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks,
        *(parameter._backward_hooks for parameter in layer.parameters(recurse=False)),
    ]  # fmt: skip
    own = "forward" in vars(layer) or any(map(_adds_code, type(layer).__mro__))
    return not own and not any(hooks)


def _adds_code(kind: type) -> bool:
    """Returns whether a class of the user's has more methods or properties than ``__init__``, such as a ``forward``."""
    own = (value for name, value in vars(kind).items() if name != "__init__")
    return not _is_of_known(kind) and any(callable(value) or hasattr(value, "__get__") for value in own)


def _is_of_known(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0] in KNOWN
