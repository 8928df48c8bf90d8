"""The zoo of ``test_odd_modules.py``: functions that a module was given, and what they refer to."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from odd_modules import Ours, odd
from torch import Tensor, nn


class Scaled(Ours):
    """Computes with what is in ``ops``."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Any = None

    def between(self, h: Tensor) -> Tensor:
        op = self.ops["scale"][0] if isinstance(self.ops, dict) else self.ops
        found: Tensor = op(h)
        return found


def scaled(h: Tensor, layer: nn.Linear) -> Tensor:
    return h * layer.weight.norm()


@odd(refused="ops of its layer Scaled is or holds a function that refers to the module itself")
def function_in_containers() -> nn.Module:
    module = Scaled()
    layer = module.last
    module.ops = {"scale": [lambda h: scaled(h, layer)]}
    return module


@odd(refused="ops of its layer Scaled is or holds a function that refers to the module itself")
def function_in_a_partial() -> nn.Module:
    module = Scaled()
    held = [module.last]
    module.ops = partial(lambda factor, h: factor * scaled(h, held[0]), 2)
    return module


@odd(refused="ops of its layer Scaled is or holds a function that refers to the module itself")
def default_of_a_function() -> nn.Module:
    module = Scaled()
    module.ops = lambda h, layer=module.last: scaled(h, layer)
    return module


@odd(refused="ops of its layer Scaled is or holds a function that refers to the module itself")
def function_in_a_function() -> nn.Module:
    module = Scaled()
    layer = module.last

    def inner(h: Tensor) -> Tensor:
        return scaled(h, layer)

    module.ops = lambda h: inner(h)
    return module


@odd(refused="parent of its layer WeaklyItself is or holds a weak reference that refers to the module itself")
class WeaklyItself(Ours):
    def __init__(self) -> None:
        super().__init__()
        self.parent = weakref.ref(self)

    def between(self, h: Tensor) -> Tensor:
        parent = self.parent()
        return h if parent is None else scaled(h, parent.last)


@odd()
class KeptHandle(Ours):
    """Keeps the handle of its hook, in which there are weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = self.first.register_forward_hook(self.hook)

    def hook(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * self.last.weight.norm()


@odd()
def partial_of_a_layer() -> nn.Module:
    """Of what is in a partial, and of what a method is bound to, a copy has copies."""
    module = Scaled()
    module.ops = {"scale": [partial(scaled, layer=module.last)]}
    return module
