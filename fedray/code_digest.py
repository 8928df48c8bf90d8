"""A digest of a piece of the user's code: equal while it computes the same, another when it is edited.

It serves to notice that a run folder was made by other code. Functions count by their bytecode and by whatever of the
user's own they refer to (defaults, closures, global helpers), classes by what is in them, objects by their class and
attributes. Comments, line numbers and docstrings do not count. What libraries define counts by its name, and by its
file where the library is not one of fedray's own dependencies, whose versions a run records anyway. Bytecode differs
between minor versions of Python, and so do digests.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

RECORDED = {"fedray", "torch", "torchvision", "numpy", *sys.stdlib_module_names}
"""Packages whose version belongs to a run's record."""

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(...),
    range,
    slice,
    torch.dtype,
    torch.device,
    np.dtype,
)

MADE_BY_PYTHON = {"__doc__", "__module__", "__dict__", "__weakref__", "__qualname__", "__firstlineno__", "_abc_impl"}
MADE_BY_PYTHON |= {"__static_attributes__", "__slotnames__", "__abstractmethods__", "__annotations__", "__annotate__"}
MADE_BY_PYTHON |= {"__annotations_cache__", "__annotate_func__", "__annotations_get__", "__parameters__"}


def code_digest(thing: Any, tensors: bool = True) -> str:
    """sha256 of a function, class or object, as hexadecimal digits.

    Without ``tensors``, of tensors only shape and dtype count: the code of a model apart from its weights.
    """
    return _Walk(tensors).of(thing).hex()


def is_library(module: str | None) -> bool:
    """Whether a module, by name, comes from an installed package and not from the user's own files."""
    if module is None or module == "builtins":
        return True
    if module.partition(".")[0] in RECORDED:
        return True
    path = getattr(sys.modules.get(module), "__file__", None)
    return path is not None and bool({"site-packages", "dist-packages"} & set(Path(path).parts))


class _Walk:
    """One walk over everything that a thing consists of or refers to."""

    def __init__(self, tensors: bool) -> None:
        self.tensors = tensors
        # by id: the order of the first visit; and the things, so that the ids stay theirs
        self.seen: dict[int, int] = {}
        self.visited: list[Any] = []

    def of(self, thing: Any) -> bytes:
        """The digest of ``thing``; of one that is being visited already, where in the walk that was."""
        if isinstance(thing, PLAIN):
            return _hash(type(thing).__name__, repr(thing))
        if id(thing) in self.seen:
            return _hash("again", str(self.seen[id(thing)]))
        self.seen[id(thing)] = len(self.seen)
        self.visited.append(thing)
        return _hash(*self._parts(thing))

    def _parts(self, thing: Any) -> Iterator[str | bytes]:
        yield type(thing).__name__
        if isinstance(thing, (torch.Tensor, np.ndarray)):
            yield from self._array(thing)
        elif isinstance(thing, (tuple, list)):
            yield from map(self.of, thing)
        elif isinstance(thing, (set, frozenset)):
            yield from sorted(_Walk(self.tensors).of(each) for each in thing)
        elif isinstance(thing, dict):
            yield from (self.of(part) for item in thing.items() for part in item)
        elif isinstance(thing, types.ModuleType):
            yield thing.__name__
        elif isinstance(thing, types.CodeType):
            yield from self._code(thing)
        elif isinstance(thing, types.FunctionType):
            yield from self._function(thing)
        elif isinstance(thing, type):
            yield from self._class(thing)
        else:
            yield from self._object(thing)

    def _array(self, array: Any) -> Iterator[str | bytes]:
        yield f"{array.dtype} {tuple(array.shape)}"
        if not self.tensors:
            return
        if isinstance(array, torch.Tensor):
            array = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield self.of(array.tolist()) if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()

    def _code(self, code: types.CodeType) -> Iterator[str | bytes]:
        yield code.co_code
        yield f"{code.co_flags} {code.co_argcount} {code.co_kwonlyargcount} {code.co_posonlyargcount}"
        yield from (self.of(names) for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        yield from map(self.of, code.co_consts)

    def _function(self, function: types.FunctionType) -> Iterator[str | bytes]:
        if is_library(function.__module__):
            yield _of_library(function)
            return
        code = function.__code__
        if function.__doc__ and code.co_consts[:1] == (function.__doc__,):
            code = code.replace(co_consts=(None, *code.co_consts[1:]))
        yield self.of(code)
        yield self.of(function.__defaults__)
        yield self.of(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                yield self.of(cell.cell_contents)
            except ValueError:
                yield "empty"
        for name in sorted(_names(code)):
            if name in function.__globals__:
                yield name
                yield from self._global(function.__globals__[name], code)

    def _global(self, value: Any, code: types.CodeType) -> Iterator[bytes]:
        """What a function refers to; of a module of the user's, what the function may use of it."""
        yield self.of(value)
        if isinstance(value, types.ModuleType) and not is_library(value.__name__):
            for name in sorted(_names(code)):
                if name in vars(value):
                    yield self.of(vars(value)[name])

    def _class(self, cls: type) -> Iterator[str | bytes]:
        if is_library(cls.__module__):
            yield _of_library(cls)
            return
        yield from map(self.of, cls.__bases__)
        for name, value in sorted(vars(cls).items()):
            if name not in MADE_BY_PYTHON and not _is_made_by_pydantic(name):
                yield name
                yield self.of(value)

    def _object(self, thing: Any) -> Iterator[str | bytes]:
        if isinstance(thing, (classmethod, staticmethod, types.MethodType)):
            yield self.of(thing.__func__)
            yield self.of(getattr(thing, "__self__", None))
        elif isinstance(thing, property):
            yield from map(self.of, (thing.fget, thing.fset, thing.fdel))
        elif isinstance(thing, functools.partial):
            yield from map(self.of, (thing.func, thing.args, thing.keywords))
        elif isinstance(thing, enum.Enum):
            yield str(thing)
        elif isinstance(thing, nn.Module) or not is_library(type(thing).__module__):
            yield self.of(type(thing))
            for name, value in sorted(getattr(thing, "__dict__", {}).items()):
                # whether a module was last used for training or evaluation is no part of what it computes
                if name != "training":
                    yield name
                    yield self.of(value)
        elif isinstance(thing, Callable) and hasattr(thing, "__qualname__"):  # type: ignore[arg-type]
            yield _of_library(thing)
        else:
            yield self.of(type(thing))
            yield repr(thing) if type(thing).__repr__ is not object.__repr__ and " at 0x" not in repr(thing) else ""


def _is_made_by_pydantic(name: str) -> bool:
    """Whether an attribute of a class is what pydantic has compiled from its fields: it holds names and addresses."""
    return name.startswith("__pydantic_") and name != "__pydantic_fields__"


def _names(code: types.CodeType) -> set[str]:
    """The global names and attributes that a function uses, and the functions within it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _of_library(thing: Any) -> bytes:
    module = getattr(thing, "__module__", None) or "builtins"
    file = b"" if module.partition(".")[0] in RECORDED | {"builtins"} else _of_file(module)
    return _hash(module, thing.__qualname__, file)


@cache
def _of_file(module: str) -> bytes:
    path = inspect.getsourcefile(sys.modules[module])
    return hashlib.sha256(Path(path).read_bytes()).digest() if path else b""


def _hash(*parts: str | bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
