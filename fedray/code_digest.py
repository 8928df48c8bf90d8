"""A digest of a piece of the user's code: equal while it computes the same, another when it is edited.

It serves to notice that a run folder was made by other code. A function counts by its bytecode and by whatever it
refers to: defaults, closures, attributes, global helpers and values, the user's own modules. A class counts by what is
in it, an object by its class and by what pickle would keep of it. Comments, line numbers and docstrings do not count.
What libraries define counts by its name, and by its file where the library is not one of fedray's own dependencies,
whose versions a run records anyway.

What is not noticed: something of a library's that is replaced or given further attributes; a module that is imported by
a name which is only computed; an object that pickle can't take apart, such as a generator, beyond its type.

What counts although it computes nothing: Python's minor version, as bytecode differs between them; docstrings of
functions within functions; and whatever changes as it is used (a metric with a counter, a global cache).
"""

from __future__ import annotations

import dis
import inspect
import sys
import types
import weakref
from collections import ChainMap
from collections.abc import Collection, Iterator, MappingView
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedray.own_modules import is_library, library_digest, possible_modules, sha256_of, source_digest

PLAIN = {type(None), bool, int, float, complex, str, bytes, type(...), range, slice, torch.dtype, torch.device}

MADE_BY_PYTHON = {
    "__doc__", "__module__", "__dict__", "__weakref__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__slotnames__", "__abstractmethods__", "_abc_impl", "__annotations__", "__annotate__", "__annotations_cache__",
    "__annotate_func__", "__annotations_get__", "__parameters__",
}  # fmt: skip

ONLY_TELL = {"logging.Logger", "logging.Handler", "tqdm.std.tqdm", "torch.utils.tensorboard.writer.SummaryWriter"}
"""Classes of objects that show what happens and compute nothing: they count by their type, whatever they hold."""

DEEPEST = 400
"""Things within things beyond this depth count by their type."""

CALLS_OF_A_LEVEL = 12
"""Python's calls within calls while a digest goes down one level, at most."""


def code_digest(thing: Any, apart_from: Collection[torch.Tensor] = ()) -> str:
    """sha256 of a function, class or object, as hexadecimal digits.

    Of the tensors ``apart_from`` the values do not count, but only shapes and dtypes: with a model's parameters and
    buffers it is the digest of the model's code apart from its weights.
    """
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEPEST * CALLS_OF_A_LEVEL + 1000))
    try:
        return _Walk(frozenset(map(id, apart_from))).of(thing).hex()
    finally:
        sys.setrecursionlimit(limit)


class _Walk:
    """One walk over everything that a thing consists of or refers to."""

    def __init__(self, apart_from: frozenset[int], before: _Walk | None = None) -> None:
        self.apart_from = apart_from
        # by id: the number of the first visit; and the things, so that the ids stay theirs
        self.seen: ChainMap[int, int] = ChainMap({}, *([before.seen] if before else []))
        self.visited: list[Any] = []
        self.visits: int = before.visits if before else 0
        self.depth: int = before.depth if before else 0

    def of(self, thing: Any) -> bytes:
        """The digest of ``thing``; of one that was visited already, where in the walk that was."""
        if type(thing) in PLAIN:
            return sha256_of(type(thing).__name__, repr(thing))
        if id(thing) in self.seen:
            return sha256_of("again", str(self.seen[id(thing)]))
        if self.depth >= DEEPEST:
            return sha256_of("deep", type(thing).__name__)
        self.seen[id(thing)] = self.visits
        self.visited.append(thing)
        self.visits += 1
        self.depth += 1
        try:
            return sha256_of(*self._parts(thing))
        finally:
            self.depth -= 1

    def _parts(self, thing: Any) -> Iterator[str | bytes]:
        yield type(thing).__name__
        # by type(), not isinstance(): a proxy passes itself off as what it stands for, which may be gone
        if issubclass(type(thing), weakref.ProxyTypes) or ONLY_TELL & set(map(_full_name, type(thing).__mro__)):
            return
        if isinstance(thing, torch.Tensor):
            yield from self._tensor(thing)
        elif type(thing) is np.ndarray:
            yield f"{thing.dtype} {thing.shape}"
            yield self.of(thing.tolist()) if thing.dtype.hasobject else np.ascontiguousarray(thing).tobytes()
        elif type(thing) in (tuple, list) or isinstance(thing, MappingView):
            yield from map(self.of, thing)
        elif isinstance(thing, memoryview):
            yield thing.tobytes()
        elif type(thing) in (dict, types.MappingProxyType):
            yield from (self.of(part) for item in thing.items() for part in item)
        elif isinstance(thing, types.ModuleType):
            yield thing.__name__ if is_library(thing.__name__) else source_digest([thing.__name__])
        elif isinstance(thing, types.CodeType):
            yield from self._code(thing)
        elif isinstance(thing, types.FunctionType):
            yield from self._function(thing)
        elif isinstance(thing, type):
            yield from self._class(thing)
        elif isinstance(thing, torch.jit.ScriptFunction):
            yield str(thing.code)
        elif isinstance(thing, nn.Module):
            yield from self._module(thing)
        else:
            yield from self._object(thing)

    def _unordered(self, things: Collection[Any]) -> Iterator[bytes]:
        """Of the elements of a set, each as if it were the first of them."""
        yield from sorted(_Walk(self.apart_from, self).of(each) for each in things)

    def _tensor(self, tensor: torch.Tensor) -> Iterator[str | bytes]:
        yield f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} {tensor.requires_grad}"
        if id(tensor) not in self.apart_from:
            dense = tensor.detach().cpu().to_dense() if tensor.layout != torch.strided else tensor.detach().cpu()
            yield dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def _code(self, code: types.CodeType) -> Iterator[str | bytes]:
        yield code.co_code
        yield f"{code.co_flags} {code.co_argcount} {code.co_kwonlyargcount} {code.co_posonlyargcount}"
        yield from (self.of(names) for names in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        yield from map(self.of, code.co_consts)

    def _function(self, function: types.FunctionType) -> Iterator[str | bytes]:
        # not __module__, which functools.wraps takes from what is wrapped
        home = function.__globals__.get("__name__", "")
        if is_library(home):
            yield library_digest(home, function.__qualname__)
            # a library's wrapper of the user's function
            if "__wrapped__" in vars(function):
                yield self.of(vars(function))
            return
        code = function.__code__
        if function.__doc__ and code.co_consts[:1] == (function.__doc__,):
            code = code.replace(co_consts=(None, *code.co_consts[1:]))
        yield self.of(code)
        yield self.of(function.__defaults__)
        yield self.of(function.__kwdefaults__)
        yield self.of(vars(function))
        for cell in function.__closure__ or ():
            try:
                yield self.of(cell.cell_contents)
            except ValueError:
                yield "empty"
        found = _Names.of(code)
        # a name like __name__ says where the code is
        for name in sorted(name for name in found.globals & function.__globals__.keys() if not _is_special(name)):
            yield name
            yield from self._global(name, function.__globals__[name], found.attributes)
        package = function.__globals__.get("__package__") or home.rpartition(".")[0]
        imported = {name for each in found.imports for name in possible_modules(*each, package)}
        if imported:
            yield source_digest(imported)

    def _global(self, name: str, value: Any, attributes: set[str]) -> Iterator[bytes]:
        """What a function refers to by a global ``name``; of the user's own module, what the function may use of it."""
        home = sys.modules.get(type(value).__module__)
        if home is not None and is_library(home.__name__) and getattr(home, name, None) is value:
            # something of a library's that there is once, such as os.environ: what it holds is not the user's code
            yield library_digest(home.__name__, name)
        elif issubclass(type(value), types.ModuleType) and attributes & vars(value).keys():
            yield sha256_of(value.__name__)
            if not is_library(value.__name__):
                for attribute in sorted(attributes & vars(value).keys()):
                    yield from self._global(attribute, vars(value)[attribute], attributes)
        else:
            yield self.of(value)

    def _class(self, cls: type) -> Iterator[str | bytes]:
        if is_library(_module_of(cls)):
            yield library_digest(_module_of(cls) or "", cls.__qualname__)
            return
        yield self.of(type(cls))
        yield from map(self.of, cls.__bases__)
        for name, value in sorted(vars(cls).items()):
            if name not in MADE_BY_PYTHON and not _is_made_by_pydantic(name):
                yield name
                yield self.of(value)

    def _module(self, module: nn.Module) -> Iterator[str | bytes]:
        if "_orig_mod" in module._modules:
            # torch.compile keeps what it compiles, and things of the process beside it
            yield self.of(module._modules["_orig_mod"])
            return
        if isinstance(module, torch.jit.ScriptModule):
            yield from (str(each.code) for each in module.modules() if hasattr(each, "code"))
            yield from (self.of(tensor) for tensor in (*module.parameters(), *module.buffers()))
            return
        yield self.of(type(module))
        for name, value in sorted(vars(module).items()):
            if name in ("_parameters", "_buffers"):
                for own, tensor in value.items():
                    yield own
                    yield self.of(tensor)
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
        yield self.of(inspect.getattr_static(thing, "__wrapped__", None))
        yield self.of(type(thing))
        if isinstance(thing, (set, frozenset)):
            yield from self._unordered(thing)
            yield self.of(getattr(thing, "__dict__", None))
            return
        try:
            parts = thing.__reduce_ex__(4)
        except Exception:
            return
        if isinstance(parts, str):
            # a name in its module; what the user defined under it is above
            home = _module_of(thing) or ""
            yield library_digest(home, parts) if is_library(home) else parts
        else:
            for part in parts:
                yield self.of(list(part) if isinstance(part, Iterator) else part)


def _module_of(thing: Any) -> str | None:
    """The module that something says it is from; a few classes of C code say nothing that is a text."""
    module = getattr(thing, "__module__", None)
    return module if isinstance(module, str) else None


def _full_name(cls: type) -> str:
    return f"{_module_of(cls)}.{cls.__qualname__}"


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_made_by_pydantic(name: str) -> bool:
    """Whether an attribute of a class is what pydantic has compiled from its fields: it holds names and addresses."""
    return name.startswith("__pydantic_") and name != "__pydantic_fields__"


@dataclass(frozen=True)
class _Names:
    """What a function and the functions within it use by name: globals, attributes, and the modules that they import
    when they are called: name, dots before it, and what is taken from it."""

    globals: set[str]
    attributes: set[str]
    imports: set[tuple[str, int, tuple[str, ...]]]

    @classmethod
    def of(cls, code: types.CodeType) -> _Names:
        found = cls(set(), set(), set())
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for place, step in enumerate(steps):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found.globals.add(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                found.attributes.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                dots, taken = (each.argval for each in steps[place - 2 : place])
                found.imports.add((step.argval, dots, tuple(taken or ())))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                inner = cls.of(constant)
                found.globals.update(inner.globals)
                found.attributes.update(inner.attributes)
                found.imports.update(inner.imports)
        return found
