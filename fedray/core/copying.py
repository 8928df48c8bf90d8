"""Copies modules, also those on which ``copy.deepcopy`` fails, or of which it silently loses a part."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.nn.utils import parametrize

from fedray.core.places import Places, shared_memory
from fedray.errors import UserError


class Portable:
    """A wrapper with which a ``module`` can be copied, and pickled for other processes, without losing anything.

    torch loses the hooks of a module's parameters when it copies or pickles the module, and it can't pickle a module
    with parametrizations. This class handles both cases. After unpickling, its attribute ``module`` is the complete
    module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = Places(module).parameters.items()
        self.hooks = {name: list(p._backward_hooks.values()) for name, p in named if p._backward_hooks}

    def copy(self) -> nn.Module:
        """Returns a copy of the wrapped module, including the hooks of its parameters. The copy shares no memory with
        the original."""
        return self._hooked(copied(self.module))

    def _hooked(self, module: nn.Module) -> nn.Module:
        parameters = Places(module).parameters
        for name, hooks in self.hooks.items():
            for hook in hooks:
                parameters[name].register_hook(hook)  # type: ignore[no-untyped-call]
        return module

    def __getstate__(self) -> tuple[nn.Module, dict[str, list[str]], dict[str, Any]]:
        parametrized = {
            name: [*layer.parametrizations]
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
    """Returns a copy of ``module`` that shares no memory with it. Unlike ``copy.deepcopy``, this works for modules in
    which a forward pass has left tensors, and for uninitialised buffers of lazy modules. Hooks of parameters are not
    copied."""
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in _made_by_passes(module)}
    for layer in module.modules():
        for buffer in layer._buffers.values():
            if isinstance(buffer, UninitializedBuffer):
                memo[id(buffer)] = UninitializedBuffer(device=buffer.device, dtype=buffer.dtype)  # type: ignore[call-arg]
    return copy.deepcopy(module, memo)


def _made_by_passes(module: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors that forward passes have left in the attributes of a module's layers, as
    torch.nn.utils.weight_norm does. Such tensors belong to autograd's graph, and can be neither copied nor pickled."""
    for layer in module.modules():
        yield from (value for value in vars(layer).values() if isinstance(value, Tensor) and not value.is_leaf)


def require_copyable(module: nn.Module) -> None:
    """Checks that fedray can train copies of the user's ``module``.

    Raises:
        UserError: an attribute is a view of a parameter; two different parameters or buffers lie in the same memory
            (one that several layers share is allowed); a parameter is on the device meta, so that it has no numbers; a
            parameter has a hook for accumulated gradients, which fedray would never call; or a hook of a layer, or a
            function or weak reference in its attributes, refers to the module itself, so that copies would use the
            original.
    """
    require_no_views(module, "model=...")
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
        for what, function in _shared(layer):
            if any(id(value) in of_module for value in _used_by(function)):
                kind = "a function" if isinstance(function, FunctionType) else "a weak reference"
                raise UserError(
                    f"model=...: {what} of its layer {name or type(layer).__name__} is or holds {kind} that refers to "
                    "the module itself, of which fedray trains copies: hand over a class, or a function that makes the "
                    "module, in place of the module"
                )


def require_no_views(module: nn.Module, name: str) -> None:
    """Checks that no layer of ``module`` keeps a view of a trained parameter in an attribute, such as
    ``self.w = self.encoder.weight.t()``. It would keep the values of the model that was loaded first. ``name`` is what
    the message calls the module. Raises :class:`UserError` if there is such a view."""
    trained = {key: each for key, each in Places(module).parameters.items() if each.requires_grad and _has_memory(each)}
    own = {id(each) for each in Places(module).parameters.values()}
    memory = {each.untyped_storage().data_ptr(): key for key, each in trained.items()}
    for place, layer in module.named_modules():
        for attribute, value in vars(layer).items():
            # torch.nn.utils.spectral_norm computes this attribute in each pass
            if attribute in ("_parameters", "_modules") or f"{attribute}_orig" in layer._parameters:
                continue
            for each in parts(value):
                is_tensor = isinstance(each, Tensor) and id(each) not in own and _has_memory(each)
                if is_tensor and (key := memory.get(each.untyped_storage().data_ptr())):
                    raise UserError(
                        f"{name}: its attribute {f'{place}.{attribute}'.lstrip('.')} is a view of its parameter {key}, "
                        "and would stay as it is when clients' models are loaded: compute it in the forward pass"
                    )


def _has_memory(tensor: Tensor) -> bool:
    is_plain = not is_lazy(tensor) and tensor.layout is torch.strided and type(tensor.data) is Tensor
    return is_plain and tensor.device.type != "meta" and tensor.numel() > 0


def _shared(layer: nn.Module) -> Iterator[tuple[str, FunctionType | weakref.ref[Any]]]:
    """Yields the functions and weak references of a ``layer`` that a copy of the layer would not copy but share,
    because they are hooks or are in its attributes. Each is one pair (name, object), with a name for messages, such as
    ``a forward hook``."""
    hooks: dict[str, Mapping[Any, Any]] = {
        "a forward hook": layer._forward_hooks, "a forward pre-hook": layer._forward_pre_hooks,
        "a backward hook": layer._backward_hooks, "a backward pre-hook": layer._backward_pre_hooks,
    }  # fmt: skip
    # torch renews these weak references in copies
    renewed = "_flat_weight_refs" if isinstance(layer, nn.RNNBase) else None
    found = [(key, value) for key, value in vars(layer).items() if key != renewed]
    found = [(what, hook) for what, of_kind in hooks.items() for hook in of_kind.values()] + found
    for what, value in found:
        yield from ((what, each) for each in parts(value) if isinstance(each, (FunctionType, weakref.ref)))


DEPTH = 4
"""How many levels of nested containers :func:`parts` and similar searches look into."""


ATOMS = (str, bytes, int, float, complex, type(None))
"""The types of values that searches of nested containers skip, because a vocabulary may hold millions of them."""


def parts(value: Any) -> Iterator[Any]:
    """Yields ``value`` and all objects inside it, for example to find the tensors in an attribute of a module.

    Objects are inside a container, in the attributes of an object, in a method (its function and the object to which
    it is bound), and in a ``functools.partial`` (its function and arguments). The search goes down four levels. Each
    object is yielded once. Strings, numbers and None are left out. Modules, tensors, classes and functions are yielded,
    but not searched.
    """
    yield from _reached([value], _contents)


def _reached(values: Iterable[Any], contents: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yields each of ``values``, then the objects that ``contents(value)`` gives for each of them, then the contents of
    those, down to :data:`DEPTH` levels. Each object comes once; those of the types :data:`ATOMS` are left out."""
    seen: dict[int, Any] = {}
    for _ in range(DEPTH + 1):
        new = {id(value): value for value in values if not isinstance(value, ATOMS) and id(value) not in seen}
        yield from new.values()
        seen |= new
        values = [each for value in new.values() for each in contents(value)]


def _contents(value: Any) -> Iterable[Any]:
    """Returns the objects in ``value`` that are copied along with it, such as the elements of a list. Modules, tensors,
    classes and functions count as objects without contents."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, (nn.Module, Tensor, type, ModuleType, FunctionType)):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def _used_by(shared: FunctionType | weakref.ref[Any]) -> Iterator[Any]:
    """Yields a function or weak reference, the objects that it uses or points to, and what these contain. Of the
    functions among these objects, only those from the same Python module are searched further."""

    def contents(value: Any) -> Iterable[Any]:
        if isinstance(value, weakref.ref):
            # handles of hooks refer to dicts, and a copy gets new dicts
            target = value()
            return [target] if isinstance(target, (nn.Module, Tensor, MethodType)) else ()
        if isinstance(value, FunctionType):
            return _surroundings(value) if value is shared or value.__module__ == shared.__module__ else ()
        # other objects may hold the module for other purposes
        return _contents(value) if isinstance(value, (list, tuple, set, Mapping, partial, MethodType)) else ()

    yield from _reached([shared], contents)


def _surroundings(function: FunctionType) -> list[Any]:
    """Returns the objects that a function can reach besides its arguments: the values of the closure variables and
    global variables that it uses, and the default values of its arguments."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    try:
        found = inspect.getclosurevars(function)
    except ValueError:
        # a closure variable has no value yet
        return defaults
    return [*defaults, *found.nonlocals.values(), *found.globals.values()]
