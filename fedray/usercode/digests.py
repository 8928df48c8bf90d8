"""Makes digests of the user's code, so that a run notices if its folder was made with different code.

A digest covers functions and classes and everything that they refer to: defaults, closures, globals, weights, the
user's modules. Comments, line numbers and docstrings do not count. Of an object that a library defines only the name
counts, together with the library's file if runs do not record the library's version.

A digest misses attributes of a library's objects that the user replaced, and the content of objects that pickle can't
take apart, such as generators. It changes without need if variables are renamed, if another minor version of Python
compiles the code, and if an object changes as it is used.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedray.usercode.modules import is_library, library_digest, source_digest, with_length

PLAIN = {type(None), bool, int, float, complex, str, bytes, type(...), range, slice, torch.dtype, torch.device}

USES = {
    "LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_ATTR": "attribute", "LOAD_METHOD": "attribute",
    "IMPORT_FROM": "attribute", "IMPORT_NAME": "module",
}  # fmt: skip
"""For each bytecode operation of Python that contains a name: what the name refers to, a global, an attribute or
a module."""

HAS_DOCSTRING = 0x4000000
"""The flag of functions with a docstring, from Python 3.14 on."""

ONLY_TELL = {"logging.Logger", "logging.Handler", "tqdm.std.tqdm", "torch.utils.tensorboard.writer.SummaryWriter"}
"""Classes of objects that only report, such as loggers, and compute nothing. In a digest their class counts, but not
their content."""


class _Object(NamedTuple):
    """A part of an object in a digest that is an object itself, ``thing``, whose own parts still have to be
    included."""

    thing: Any


_Part = str | bytes | _Object


def code_digest(thing: Any, apart_from: Collection[torch.Tensor] = ()) -> str:
    """Returns a digest of a function, a class or another object, by which a run notices that the user has edited its
    code: a sha256 as hexadecimal digits. It covers everything to which the object ``thing`` refers.

    Of the tensors in ``apart_from`` only shapes and dtypes count, not values. If they are a model's parameters and
    buffers, the result is a digest of the model's code without its weights.
    """
    digest, weights = hashlib.sha256(), frozenset(map(id, apart_from))
    # objects may refer to each other; visited objects are kept alive, so that no new object gets one of their ids
    numbers: dict[int, int] = {}
    visited: list[Any] = []
    left = deque([thing])
    while left:
        each = left.popleft()
        parts: Iterable[_Part]
        if type(each) in PLAIN:
            parts = [repr(each)]
        elif id(each) in numbers:
            parts = [f"again {numbers[id(each)]}"]
        else:
            numbers[id(each)] = len(numbers)
            visited.append(each)
            parts = _parts(each, weights)
        digest.update(with_length(type(each).__name__))
        for part in parts:
            if isinstance(part, _Object):
                left.append(part.thing)
                part = "object"
            digest.update(with_length(part))
    return digest.hexdigest()


def _parts(thing: Any, weights: frozenset[int]) -> Iterable[_Part]:
    """Returns the parts of an object that count in its digest: texts, bytes, and further objects. ``weights`` are the
    ids of tensors whose values do not count."""
    # not isinstance(), because a weak proxy passes that on to the object behind it, which may be gone
    kind = type(thing)
    if ONLY_TELL & {f"{_module_of(each)}.{each.__qualname__}" for each in kind.__mro__}:
        return []
    if issubclass(kind, torch.Tensor):
        return _tensor(thing, with_values=id(thing) not in weights)
    if kind is np.ndarray:
        values = _Object(thing.tolist()) if thing.dtype.hasobject else np.ascontiguousarray(thing).tobytes()
        return [f"{thing.dtype} {thing.shape}", values]
    if kind in (tuple, list):
        return map(_Object, thing)
    if kind in (dict, types.MappingProxyType):
        return (_Object(part) for item in thing.items() for part in item)
    if kind in (set, frozenset):
        return map(_Object, sorted(thing, key=_place_in_set))
    if issubclass(kind, types.ModuleType):
        return [thing.__name__ if is_library(thing.__name__) else source_digest([thing.__name__])]
    if kind is types.CodeType:
        return _code(thing)
    if kind is types.FunctionType:
        return _function(thing)
    if issubclass(kind, type):
        return _class(thing)
    if issubclass(kind, torch.jit.ScriptFunction):
        return [str(thing.code)]
    if issubclass(kind, nn.Module):
        return _module(thing)
    return _other(thing)


def _place_in_set(element: Any) -> str:
    """Returns a key by which the elements of a set are sorted, because they have another order in each process."""
    if type(element) in {*PLAIN, tuple}:
        named = repr(element)
    else:
        named = getattr(element, "__qualname__", None) or code_digest(element)
    return f"{type(element).__name__} {named}"


def _tensor(tensor: torch.Tensor, with_values: bool) -> Iterator[_Part]:
    if is_lazy(tensor):
        yield f"{tensor.dtype} without a shape"
        return
    yield f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} {tensor.requires_grad}"
    if with_values:
        dense = tensor.detach().cpu()
        dense = dense if dense.layout == torch.strided else dense.to_dense()
        yield dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _code(code: types.CodeType) -> Iterator[_Part]:
    yield code.co_code
    yield f"{code.co_flags & ~HAS_DOCSTRING} {code.co_argcount} {code.co_kwonlyargcount} {code.co_posonlyargcount}"
    yield " ".join([*code.co_names, "|", *code.co_varnames, "|", *code.co_freevars, "|", *code.co_cellvars])
    constants = (None, *code.co_consts[1:]) if _has_docstring(code) else code.co_consts
    yield from map(_Object, constants)


def _has_docstring(code: types.CodeType) -> bool:
    """Returns whether ``code`` is that of a function with a docstring, which is then its first constant."""
    if sys.version_info >= (3, 14):
        return bool(code.co_flags & HAS_DOCSTRING)
    # before, a function without one began with None; the code of classes and comprehensions has none
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
    return bool(is_function) and isinstance(next(iter(code.co_consts), None), str)


def _function(function: types.FunctionType) -> Iterator[_Part]:
    # not __module__, which functools.wraps copies from the wrapped function
    home = function.__globals__.get("__name__", "")
    if is_library(home):
        yield library_digest(home, function.__qualname__)
        # a library's wrapper may hold the user's function
        if "__wrapped__" in vars(function):
            yield _Object(vars(function))
        return
    code = function.__code__
    for part in (code, function.__defaults__, function.__kwdefaults__, vars(function)):
        yield _Object(part)
    for cell in function.__closure__ or ():
        try:
            yield _Object(cell.cell_contents)
        except ValueError:
            yield "empty"
    uses = _uses(code)
    yield from _globals(uses["global"], uses, function.__globals__, set())
    if uses["module"]:
        package = function.__globals__.get("__package__") or home.rpartition(".")[0]
        yield source_digest(uses["module"], package, uses["attribute"])


def _uses(code: types.CodeType) -> dict[str, set[str]]:
    """Returns the names that the code of a function and of the functions in it uses, as sets under the keys "global",
    "attribute" and "module" (an imported module), and under "whole" the globals of which it uses more than attributes.
    """
    found: dict[str, set[str]] = {kind: set() for kind in (*USES.values(), "whole")}
    steps = list(dis.get_instructions(code))
    for step, following in zip_longest(steps, steps[1:]):
        # names like __name__ only tell where the code is
        if step.opname not in USES or (step.argval.startswith("__") and step.argval.endswith("__")):
            continue
        kind = USES[step.opname]
        found[kind].add(step.argval)
        if kind == "global" and USES.get(getattr(following, "opname", "")) != "attribute":
            found["whole"].add(step.argval)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found = {kind: found[kind] | names for kind, names in _uses(each).items()}
    return found


def _globals(
    names: set[str], uses: Mapping[str, set[str]], namespace: dict[str, Any], modules: set[str]
) -> Iterator[_Part]:
    """Yields the globals in ``namespace`` that a function's code uses, ``names``, each followed by its value.

    ``uses`` are all names that the code uses (:func:`_uses`). Of a module of the user's only those members count that
    it uses as attributes, unless it does more with the module. ``modules`` collects the modules that have been counted,
    so that each counts once.
    """
    attributes = uses["attribute"]
    for name in sorted(names & namespace.keys()):
        value = namespace[name]
        home = sys.modules.get(type(value).__module__)
        yield name
        if home is not None and is_library(home.__name__) and getattr(home, name, None) is value:
            # a library's own object, such as os.environ, whose content is not the user's code
            yield library_digest(home.__name__, name)
        elif type(value) is not types.ModuleType or not attributes & vars(value).keys():
            yield _Object(value)
        elif is_library(value.__name__):
            yield value.__name__
        else:
            if name in uses["whole"]:
                yield _Object(value)
            if value.__name__ not in modules:
                modules.add(value.__name__)
                yield from _globals(attributes, uses, vars(value), modules)


METHODS = (
    types.FunctionType, staticmethod, classmethod, property, functools.singledispatchmethod, functools.partialmethod,
    functools.partial, functools.cached_property,
)  # fmt: skip
"""Types of what may be code under a name such as ``__new__``."""


def _is_code(value: Any) -> bool:
    """Returns whether ``value``, which a class has under a name such as ``__call__``, may be code of the user's."""
    if isinstance(value, METHODS) or hasattr(value, "__wrapped__"):
        return True
    return callable(value) and not is_library(_module_of(type(value)))


def _class(cls: type) -> Iterator[_Part]:
    home = _module_of(cls)
    if is_library(home):
        yield library_digest(home or "", cls.__qualname__)
        return
    yield from map(_Object, (type(cls), *cls.__bases__))
    for name, value in sorted(vars(cls).items()):
        # Python, abc and pydantic store internal data under such names
        is_note = name == "_abc_impl" or (name.startswith("__") and not _is_code(value))
        # what a named tuple is made of is in its fields
        is_note = is_note or (name == "__new__" and "_fields" in vars(cls))
        if name == "__pydantic_fields__" or not is_note:
            yield name
            yield _Object(value)


def _module(module: nn.Module) -> Iterator[_Part]:
    if "_orig_mod" in module._modules:
        # a compiled module holds the original one, and other objects that differ between processes
        yield _Object(module._modules["_orig_mod"])
        return
    if isinstance(module, torch.jit.ScriptModule):
        yield from (str(each.code) for each in module.modules() if hasattr(each, "code"))
        yield from map(_Object, (*module.parameters(), *module.buffers()))
        return
    yield _Object(type(module))
    for name, value in sorted(vars(module).items()):
        if name.endswith("_hooks") or "_hooks_" in name:
            # the keys of hooks are numbers that differ between processes
            yield from map(_Object, value.values()) if isinstance(value, dict) else ()
        elif name != "training" and not isinstance(value, torch.utils.hooks.RemovableHandle):
            # `training` only tells how the module was last used, and the number of a hook's handle means nothing
            yield name
            yield _Object(value)


def _other(thing: Any) -> Iterator[_Part]:
    """Yields the parts of an object that pickle would save, or only its type if pickle can't take the object apart."""
    if isinstance(thing, property):
        yield from map(_Object, (thing.fget, thing.fset, thing.fdel))
        return
    yield _Object(type(thing))
    # the function behind a decorator, such as a cache or a class method
    yield _Object(inspect.getattr_static(thing, "__wrapped__", None))
    if isinstance(thing, (classmethod, staticmethod)):
        yield _Object(thing.__func__)
        return
    try:
        parts = thing.__reduce_ex__(4)
    except Exception:
        return
    if isinstance(parts, str):
        # pickle saves this object by its name in a module
        home = _module_of(thing) or ""
        yield library_digest(home, parts) if is_library(home) else parts
        return
    for part in parts:
        yield _Object(list(part) if isinstance(part, Iterator) else part)


def _module_of(thing: Any) -> str | None:
    """Returns the ``__module__`` of a class or another object if that is a text. In a few classes written in C it is
    something else, and None is returned."""
    module = getattr(thing, "__module__", None)
    return module if isinstance(module, str) else None
