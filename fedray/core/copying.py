"""Copies of modules. ``copy.deepcopy`` fails on some modules, and silently loses a part of others."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.nn.utils import parametrize

from fedray.core.places import Places, shared_memory
from fedray.errors import UserError


class Portable:
    """A ``module`` that can be copied, and be sent to other processes, with all that it consists of.

    Copies and pickles of modules have no hooks of parameters, and a module with parametrizations can't be pickled.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = Places(module).parameters.items()
        self.hooks = {name: list(p._backward_hooks.values()) for name, p in named if p._backward_hooks}

    def copy(self) -> nn.Module:
        """Returns a copy of the module with a memory of its own."""
        return self._hooked(copied(self.module))

    def _hooked(self, module: nn.Module) -> nn.Module:
        parameters = Places(module).parameters
        for name, hooks in self.hooks.items():
            for hook in hooks:
                parameters[name].register_hook(hook)
        return module

    def __getstate__(self) -> tuple[nn.Module, dict[str, list[str]], dict[str, Any]]:
        parametrized = {
            name: [*layer.parametrizations]  # type: ignore[arg-type]
            for name, layer in self.module.named_modules()
            if parametrize.is_parametrized(layer)
        }
        plain = copied(self.module) if parametrized or any(True for _ in _made_by_passes(self.module)) else self.module
        for name in parametrized:
            layer = plain.get_submodule(name)
            layer.__class__ = parametrize.type_before_parametrizations(layer)
        return plain, parametrized, self.hooks

    def __setstate__(self, state: tuple[nn.Module, dict[str, list[str]], dict[str, Any]]) -> None:
        self.module, parametrized, self.hooks = state
        for name, keys in parametrized.items():
            layer = self.module.get_submodule(name)
            # what register_parametrization does, but for its change of the parameters
            parametrize._inject_new_class(layer)
            for key in keys:
                parametrize._inject_property(layer, key)
        self._hooked(self.module)


def copied(module: nn.Module) -> nn.Module:
    """Returns a copy of ``module`` with a memory of its own. The hooks of parameters are not in it."""
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in _made_by_passes(module)}
    for layer in module.modules():
        for buffer in layer._buffers.values():
            if isinstance(buffer, UninitializedBuffer):
                memo[id(buffer)] = UninitializedBuffer(device=buffer.device, dtype=buffer.dtype)  # type: ignore[call-arg]
    return copy.deepcopy(module, memo)


def _made_by_passes(module: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors in a module's attributes that forward passes have left there, as torch.nn.utils.weight_norm
    does. They can be neither copied nor pickled."""
    for layer in module.modules():
        yield from (value for value in vars(layer).values() if isinstance(value, Tensor) and not value.is_leaf)


def require_copyable(module: nn.Module) -> None:
    """Raises :class:`UserError` if a copy of ``module`` would be another model: it would lose that two tensors lie in
    the same memory, or a function in it would go on to use the tensors of the original."""
    if pair := shared_memory(module):
        raise UserError(
            f"model=...: its {pair[0]} and {pair[1]} are two tensors in the same memory, so that a change of one "
            "changes the other; to tie parameters, let both layers have the same nn.Parameter, and otherwise .clone() "
            "one of them"
        )
    for key, parameter in Places(module).parameters.items():
        if parameter.device.type == "meta":
            raise UserError(f"model=...: its parameter {key} is on the device meta, and has no numbers")
        if parameter._post_accumulate_grad_hooks:
            raise UserError(
                f"model=...: its parameter {key} has a hook that torch calls when a gradient is accumulated, which "
                "fedray never does: use register_hook, which may change the gradient"
            )
    of_module = {id(each) for each in (*module.modules(), *Places(module).tensors.values())}
    for name, layer in module.named_modules():
        for what, function in _functions(layer):
            if any(id(value) in of_module for value in _used_by(function)):
                raise UserError(
                    f"model=...: {what} of its layer {name or type(layer).__name__} is a function that refers to the "
                    "module itself, of which fedray trains copies: hand over a class, or a function that makes the "
                    "module, in place of the module"
                )


def _functions(layer: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """Yields the functions that a layer was given beside those of its class, each with its name for a message."""
    hooks: dict[str, Mapping[Any, Any]] = {
        "a forward hook": layer._forward_hooks, "a forward pre-hook": layer._forward_pre_hooks,
        "a backward hook": layer._backward_hooks,
    }  # fmt: skip
    found = [(key, value) for key, value in vars(layer).items()]
    found += [(what, hook) for what, own in hooks.items() for hook in own.values()]
    yield from ((what, value) for what, value in found if isinstance(value, FunctionType))


def _used_by(function: FunctionType) -> Iterator[Any]:
    """Yields the objects of its surroundings that a function uses."""
    try:
        found = inspect.getclosurevars(function)
    except ValueError:
        # a variable that has no value yet
        return
    yield from found.nonlocals.values()
    yield from found.globals.values()
