"""Refuses modules that can't be used at all, before torch raises a less helpful error."""

from __future__ import annotations

import torch
from torch import nn

from fedray.errors import UserError


def require_made(module: nn.Module, what: str) -> list[tuple[str, nn.Module]]:
    """Checks that torch can use ``module``: the ``__init__`` of the module, and of each layer in it, must have called
    that of nn.Module. Returns the module and all layers in it, as a list of (name, layer), where the module itself has
    an empty name. Layers inside TorchScript modules are left out.

    Raises :class:`UserError` if such a call is missing. ``what`` is the module's name in the message.
    """
    # torch's named_modules() fails on such a layer
    left, found = [("", module)], dict[nn.Module, str]()
    while left:
        name, layer = left.pop()
        found[layer] = name
        if isinstance(layer, torch.jit.ScriptModule):
            continue
        if "_modules" not in vars(layer):
            kind = type(layer).__name__
            raise UserError(f"{what}: the __init__ of {kind} must begin with super().__init__(), as nn.Module needs it")
        for key, each in layer._modules.items():
            if each is not None and each not in found:
                left.append((f"{name}.{key}" if name else key, each))
    return [(name, layer) for layer, name in found.items()]


def require_trainable_kind(module: nn.Module, what: str) -> None:
    """Checks that ``module`` is of a kind that can be trained. Raises :class:`UserError` if the ``__init__`` of one of
    its layers did not call that of nn.Module, or if the module or one of its layers is a TorchScript module. ``what``
    is the module's name in the message."""
    for name, layer in require_made(module, what):
        if isinstance(layer, torch.jit.ScriptModule):
            which = f"its layer {name} is" if name else "it is"
            raise UserError(
                f"{what}: {which} a TorchScript module (torch.jit.script, torch.jit.trace, torch.jit.load), which "
                "fedray can't train: hand over the plain nn.Module of which it was made"
            )
