"""Finds the linear layers of a model, of which the one that is called last has the model's features as its input."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def linear_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """Yields the linear layers of ``module``. The narrow ones that the library peft has put beside another layer are
    left out: they are parts of that layer."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and not is_adapter(name):
            yield layer


def is_adapter(name: str) -> bool:
    """Returns whether the layer ``name`` is one that the library peft has put beside another one."""
    return any(part.startswith("lora_") for part in name.split("."))
