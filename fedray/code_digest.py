"""A digest of a piece of the user's code: equal while it computes the same, another when it is edited.

It serves to notice that a run folder was made by other code. A function counts by its bytecode and by whatever it
refers to: defaults, closures, global helpers and values, the user's own modules. A class counts by what is in it, an
object by its class and by what pickle would keep of it. Comments, line numbers and docstrings do not count. What
libraries define counts by its name, and by its file where the library is not one of fedray's own dependencies, whose
versions a run records anyway.

Two limits. Bytecode differs between minor versions of Python, and so do digests. An object that changes with its use
(a metric with a counter, say) counts as another once it has been used.
"""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

RECORDED = {"fedray", "torch", "torchvision", "numpy", *sys.stdlib_module_names}
"""Packages whose version belongs to a run's record."""

PLAIN = {type(None), bool, int, float, complex, str, bytes, type(...), range, slice, torch.dtype, torch.device}

MADE_BY_PYTHON = {
    "__doc__", "__module__", "__dict__", "__weakref__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__slotnames__", "__abstractmethods__", "_abc_impl", "__annotations__", "__annotate__", "__annotations_cache__",
    "__annotate_func__", "__annotations_get__", "__parameters__",
}  # fmt: skip

DEEPEST = 5000
"""Python's limit of nested calls while a digest is taken: what is followed may be a long chain."""


def code_digest(thing: Any, weights: bool = True) -> str:
    """sha256 of a function, class or object, as hexadecimal digits.

    Without ``weights``, the values of a module's parameters and buffers do not count, but only their shapes and dtypes:
    the code of a model apart from its weights.
    """
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEPEST))
    try:
        return _Walk(weights).of(thing).hex()
    finally:
        sys.setrecursionlimit(limit)


def is_library(module: str | None) -> bool:
    """Whether a module, by name, comes from an installed package and not from the user's own files."""
    if module is None or module == "builtins":
        return True
    if module.partition(".")[0] in RECORDED:
        return True
    return _is_installed(getattr(sys.modules.get(module), "__file__", None))


def _is_installed(path: str | None) -> bool:
    return path is not None and bool({"site-packages", "dist-packages"} & set(Path(path).parts))


class _Walk:
    """One walk over everything that a thing consists of or refers to."""

    def __init__(self, weights: bool) -> None:
        self.weights = weights
        # by id: the order of the first visit; and the things, so that the ids stay theirs
        self.seen: dict[int, int] = {}
        self.visited: list[Any] = []

    def of(self, thing: Any) -> bytes:
        """The digest of ``thing``; of one that is being visited already, where in the walk that was."""
        if type(thing) in PLAIN:
            return _hash(type(thing).__name__, repr(thing))
        if id(thing) in self.seen:
            return _hash("again", str(self.seen[id(thing)]))
        self.seen[id(thing)] = len(self.seen)
        self.visited.append(thing)
        return _hash(*self._parts(thing))

    def _parts(self, thing: Any) -> Iterator[str | bytes]:
        yield type(thing).__name__
        if isinstance(thing, torch.Tensor):
            yield from self._tensor(thing)
        elif type(thing) is np.ndarray:
            yield f"{thing.dtype} {thing.shape}"
            yield self.of(thing.tolist()) if thing.dtype.hasobject else np.ascontiguousarray(thing).tobytes()
        elif type(thing) in (tuple, list):
            yield from map(self.of, thing)
        elif type(thing) in (set, frozenset):
            yield from sorted(_Walk(self.weights).of(each) for each in thing)
        elif type(thing) is dict:
            yield from (self.of(part) for item in thing.items() for part in item)
        elif isinstance(thing, types.ModuleType):
            yield thing.__name__
        elif isinstance(thing, types.CodeType):
            yield from self._code(thing)
        elif isinstance(thing, types.FunctionType):
            yield from self._function(thing)
        elif isinstance(thing, type):
            yield from self._class(thing)
        elif isinstance(thing, nn.Module):
            yield from self._module(thing)
        else:
            yield from self._object(thing)

    def _tensor(self, tensor: torch.Tensor, counts: bool = True) -> Iterator[str | bytes]:
        yield f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} {tensor.requires_grad}"
        if counts:
            dense = tensor.detach().cpu().to_dense() if tensor.layout != torch.strided else tensor.detach().cpu()
            yield dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def _code(self, code: types.CodeType) -> Iterator[str | bytes]:
        yield code.co_code
        yield f"{code.co_flags} {code.co_argcount} {code.co_kwonlyargcount} {code.co_posonlyargcount}"
        yield from (self.of(names) for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        yield from map(self.of, code.co_consts)

    def _function(self, function: types.FunctionType) -> Iterator[str | bytes]:
        if is_library(function.__module__):
            yield _of_library(function.__module__, function.__qualname__)
            # a library's wrapper of the user's function
            if hasattr(function, "__wrapped__"):
                yield self.of(function.__wrapped__)
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
        used, attributes, imported = _names(code)
        for name in sorted(used):
            if name in function.__globals__:
                yield name
                yield from self._global(name, function.__globals__[name], attributes)
        for name in sorted(imported):
            yield _of_imported(name)

    def _global(self, name: str, value: Any, attributes: set[str]) -> Iterator[bytes]:
        """What a function refers to by a global ``name``; of the user's own module, what the function may use of it."""
        home = sys.modules.get(type(value).__module__)
        if home is not None and is_library(home.__name__) and getattr(home, name, None) is value:
            # something of a library's that there is once, such as os.environ: what it holds is not the user's code
            yield _of_library(home.__name__, name)
            return
        yield self.of(value)
        if isinstance(value, types.ModuleType) and not is_library(value.__name__):
            for attribute in sorted(attributes & vars(value).keys()):
                yield from self._global(attribute, vars(value)[attribute], attributes)

    def _class(self, cls: type) -> Iterator[str | bytes]:
        if is_library(cls.__module__):
            yield _of_library(cls.__module__, cls.__qualname__)
            return
        yield self.of(type(cls))
        yield from map(self.of, cls.__bases__)
        for name, value in sorted(vars(cls).items()):
            if name not in MADE_BY_PYTHON and not _is_made_by_pydantic(name):
                yield name
                yield self.of(value)

    def _module(self, module: nn.Module) -> Iterator[str | bytes]:
        yield self.of(type(module))
        for name, value in sorted(vars(module).items()):
            if name in ("_parameters", "_buffers"):
                for own, tensor in value.items():
                    yield own
                    yield _hash(*self._tensor(tensor, counts=self.weights)) if tensor is not None else "none"
            elif name.endswith("_hooks") or "_hooks_" in name:
                # their keys are numbers that the process gives out
                yield from (self.of(hook) for hook in value.values()) if isinstance(value, dict) else ()
            elif name != "training":
                # whether it was last used for training or evaluation is no part of what it computes
                yield name
                yield self.of(value)

    def _object(self, thing: Any) -> Iterator[str | bytes]:
        """Any other object, as pickle takes it apart; one that can't be pickled counts by its type."""
        if isinstance(thing, (classmethod, staticmethod, types.MethodType)):
            yield self.of(thing.__func__)
            yield self.of(getattr(thing, "__self__", None))
            return
        if isinstance(thing, property):
            yield from map(self.of, (thing.fget, thing.fset, thing.fdel))
            return
        if isinstance(thing, types.MemberDescriptorType | types.GetSetDescriptorType):
            # a slot: the name under which it stands in its class says all
            return
        if hasattr(thing, "__wrapped__"):
            yield self.of(thing.__wrapped__)
        yield self.of(type(thing))
        try:
            parts = thing.__reduce_ex__(4)
        except Exception:
            return
        if isinstance(parts, str):
            yield _of_library(getattr(thing, "__module__", None), parts)
        else:
            for part in parts:
                yield self.of(list(part) if isinstance(part, Iterator) else part)


def _is_made_by_pydantic(name: str) -> bool:
    """Whether an attribute of a class is what pydantic has compiled from its fields: it holds names and addresses."""
    return name.startswith("__pydantic_") and name != "__pydantic_fields__"


def _names(code: types.CodeType) -> tuple[set[str], set[str], set[str]]:
    """The globals that a function and the functions within it use, the attributes, and the modules that they import."""
    used, attributes, imported = set(), set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            used.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            attributes.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            imported.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for found, inner in zip((used, attributes, imported), _names(constant), strict=True):
                found |= inner
    return used - vars(builtins).keys(), attributes, imported


def _of_library(module: str | None, name: str) -> bytes:
    module = module or "builtins"
    return _hash(module, name, b"" if module.partition(".")[0] in RECORDED | {"builtins"} else _of_file(module))


@cache
def _of_file(module: str) -> bytes:
    path = getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).digest() if path and Path(path).is_file() else b""


def _of_imported(name: str) -> bytes:
    """A module that a function imports when it is called: of the user's own, what its file says but for comments."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if is_library(name) or spec is None or spec.origin is None or _is_installed(spec.origin):
        return _hash(name)
    path = Path(spec.origin)
    try:
        return _hash(name, ast.dump(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return _hash(name)


def _hash(*parts: str | bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
