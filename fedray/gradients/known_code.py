"""Finds code in a model or its loss that may keep state that torch does not know about."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from fedray.core.task import Task

KNOWN = ("builtins", "torch", "torchvision", "fedray")
"""The packages in which all classes of modules compute the same from the same tensors, however often they are
called."""


def unknown_code(module: nn.Module, task: Task) -> str | None:
    """Looks for code in the gradient of ``module`` that might keep state from one call to the next: hooks, and code
    that is not from the :data:`KNOWN` packages. If there is such code, replaying the recorded operations of the
    gradient might give wrong results. Returns a clause for messages that names the code, such as
    ``the loss is user-defined``, or None if there is none.

    The forward pass of a user-defined class may count its calls, draw random numbers from Python's generator, or keep
    statistics in attributes, which can't be seen from outside. A user's ``nn.Sequential`` of torch's layers is known
    code. ``task`` has the loss, and the metric that is computed with the gradient.
    """
    if unknown := unknown_layer(module):
        return unknown
    if not is_of_known(task.loss):
        return "the loss is user-defined"
    if task.followed is not None and not is_of_known(task.metrics[task.followed].values):
        return f"the metric {task.followed} is user-defined"
    return None


def unknown_layer(module: nn.Module) -> str | None:
    """Looks for code in the forward pass of ``module`` that might keep state from one call to the next: hooks, and
    classes that are not from the :data:`KNOWN` packages. Returns a clause for messages that names such code, such as
    ``a layer Linear has a hook``, or None if there is none."""
    if global_hooks():
        return "this process has hooks for all modules"
    for layer in module.modules():
        name = type(layer).__name__
        if any(_hooks(layer)):
            return f"a layer {name} has a hook"
        if isinstance(layer, (GraphModule, ScriptModule)) or any(map(_adds_code, type(layer).__mro__)):
            return f"{name} has user-defined code"
        for key, value in vars(layer).items():
            if callable(value) and (hasattr(type(layer), key) or not is_of_known(value)):
                return f"the {key} of a layer {name} is not torch's"
    return None


def may_write(module: nn.Module) -> bool:
    """Returns whether a forward pass of ``module`` may write into the module's parameters, as embeddings with
    ``max_norm`` do. For a module with hooks or user-defined code, which may do anything, the answer is True."""
    limited = (getattr(layer, "max_norm", None) is not None for layer in module.modules())
    return any(limited) or unknown_layer(module) is not None


def global_hooks() -> bool:
    """Returns whether this process has any hooks that torch calls for every module (``register_module_forward_hook``
    and the like). Other processes, such as Ray actors that train clients, do not have them."""
    of_all = nn.modules.module
    return any(
        (
            of_all._global_forward_hooks, of_all._global_forward_pre_hooks, of_all._global_backward_hooks,
            of_all._global_backward_pre_hooks,
        )
    )  # fmt: skip


def _hooks(layer: nn.Module) -> list[Any]:
    return [
        layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks,
        *(parameter._backward_hooks for parameter in layer.parameters(recurse=False)),
    ]  # fmt: skip


def _adds_code(kind: type) -> bool:
    """Returns whether ``kind``, a class of layers, is user-defined and has methods or properties besides ``__init__``,
    such as a ``forward``, which may keep state."""
    members = (value for name, value in vars(kind).items() if name != "__init__")
    return not is_of_known(kind) and any(callable(value) or hasattr(value, "__get__") for value in members)


def is_of_known(function: Any) -> bool:
    """Returns whether ``function``, a function or a class, is from the :data:`KNOWN` packages."""
    while isinstance(function, partial):
        function = function.func
    home = getattr(function, "__module__", None)
    if home is None:
        # some of torch's functions do not say where they are from
        return getattr(torch, getattr(function, "__name__", ""), None) is function
    return str(home).partition(".")[0] in KNOWN
