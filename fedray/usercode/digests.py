"""A digest of a piece of the user's code, which stays the same as long as the code computes the same.

By it a run notices that a run folder was made by other code. The digest of a function depends on its bytecode and on
everything that it refers to: defaults, closures, attributes, global helpers and values, the user's own modules. That of
a class depends on what is in it, and that of an object on its class and on what pickle would keep of it. Comments, line
numbers and docstrings do not count. Of what a library defines only the name counts, and the library's file unless
fedray depends on the library itself, because then a run records its version.

Some edits do not change the digest: something of a library's that is replaced or gets further attributes; a module that
is imported by a name which is computed; and of an object that pickle can't take apart, such as a generator, everything
but its type.

Some things change the digest although they compute nothing: Python's minor version, because bytecode differs between
versions; docstrings of functions within functions; and objects that change as they are used, such as a metric with a
counter or a global cache.
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
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from fedray.usercode.modules import is_library, library_digest, possible_modules, sha256_of, source_digest

PLAIN = {type(None), bool, int, float, complex, str, bytes, type(...), range, slice, torch.dtype, torch.device}

MADE_BY_PYTHON = {
    "__doc__", "__module__", "__dict__", "__weakref__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__slotnames__", "__abstractmethods__", "_abc_impl", "__annotations__", "__annotate__", "__annotations_cache__",
    "__annotate_func__", "__annotations_get__", "__parameters__",
}  # fmt: skip

ONLY_TELL = {"logging.Logger", "logging.Handler", "tqdm.std.tqdm", "torch.utils.tensorboard.writer.SummaryWriter"}
"""Classes of objects that report what happens and compute nothing. Only their type counts, not what they hold."""

DEEPEST = 400
"""The depth of nested objects below which only an object's type counts."""

CALLS_OF_A_LEVEL = 12
"""The largest number of nested Python calls for each level of nested objects. It decides the recursion limit."""


def code_digest(thing: Any, apart_from: Collection[torch.Tensor] = ()) -> str:
    """Returns the digest of a function, class or object: a sha256 as hexadecimal digits.

    Of the tensors ``apart_from`` only shapes and dtypes count. If these are a model's parameters and buffers, the
    result is the digest of the model's code without its weights.
    """
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEEPEST * CALLS_OF_A_LEVEL + 1000))
    try:
        return _Walk(frozenset(map(id, apart_from))).of(thing).hex()
    finally:
        sys.setrecursionlimit(limit)


class _Walk:
    """A walk over everything that an object consists of or refers to, which makes the digest."""

    def __init__(self, apart_from: frozenset[int], before: _Walk | None = None) -> None:
        self.apart_from = apart_from
        # when each object was first visited, by its id; the objects are kept, so that no other object gets their ids
        self.seen: ChainMap[int, int] = ChainMap({}, *([before.seen] if before else []))
        self.visited: list[Any] = []
        self.visits: int = before.visits if before else 0
        self.depth: int = before.depth if before else 0

    def of(self, thing: Any) -> bytes:
        """Returns the digest of ``thing``.

        If the walk has visited it already, the digest says only when that was, so that the walk ends for objects that
        refer to each other.
        """
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
        # not isinstance(): a weak proxy would answer for the object behind it, which may be gone
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
        """Yields the digests of the elements of a set, sorted, because their order means nothing.

        Each is made as if the element were the first one, so that it does not depend on that order either.
        """
        yield from sorted(_Walk(self.apart_from, self).of(each) for each in things)

    def _tensor(self, tensor: torch.Tensor) -> Iterator[str | bytes]:
        yield from (self.of(hook) for hook in (tensor._backward_hooks or {}).values())
        if is_lazy(tensor):
            yield f"{tensor.dtype} without a shape"
            return
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
        # not __module__, which functools.wraps copies from the wrapped function
        home = function.__globals__.get("__name__", "")
        if is_library(home):
            yield library_digest(home, function.__qualname__)
            # a library's wrapper may hold the user's function
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
        """Yields the digests of what a function means by the global ``name``, whose value is ``value``.

        Of a module of the user's own, only what the function may use counts: the module's attributes among
        ``attributes``, which are those that the function reads of anything.
        """
        home = sys.modules.get(type(value).__module__)
        if home is not None and is_library(home.__name__) and getattr(home, name, None) is value:
            # a library's own object, such as os.environ: what it holds is not the user's code
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
            # a compiled module holds the original one, and beside it objects that differ between processes
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
                # the keys of hooks are numbers that differ between processes
                yield from (self.of(hook) for hook in value.values()) if isinstance(value, dict) else ()
            elif name != "training" and not isinstance(value, RemovableHandle):
                # `training` only says how the module was last used, and the number of a hook's handle nothing
                yield name
                yield self.of(value)

    def _object(self, thing: Any) -> Iterator[str | bytes]:
        """Yields the digests of the parts of an object that is no class, function, module or other case handled before.

        The parts are those into which pickle takes it apart. If pickle can't, only the digest of its type is yielded.
        """
        if isinstance(thing, (classmethod, staticmethod, types.MethodType)):
            yield self.of(thing.__func__)
            yield self.of(getattr(thing, "__self__", None))
            return
        if isinstance(thing, property):
            yield from map(self.of, (thing.fget, thing.fset, thing.fdel))
            return
        if isinstance(thing, types.MemberDescriptorType | types.GetSetDescriptorType):
            # a slot has nothing but its name, which its class counts already
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
            # pickle keeps only a name in a module; classes and functions, which users define, are handled above
            home = _module_of(thing) or ""
            yield library_digest(home, parts) if is_library(home) else parts
        else:
            for part in parts:
                yield self.of(list(part) if isinstance(part, Iterator) else part)


def _module_of(thing: Any) -> str | None:
    """Returns the name of the module that an object says it is from.

    Returns None for a few classes of C code, for which it is not a text.
    """
    module = getattr(thing, "__module__", None)
    return module if isinstance(module, str) else None


def _full_name(cls: type) -> str:
    return f"{_module_of(cls)}.{cls.__qualname__}"


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_made_by_pydantic(name: str) -> bool:
    """Returns whether pydantic has made an attribute of a class from the class's fields.

    Such an attribute holds names and addresses.
    """
    return name.startswith("__pydantic_") and name != "__pydantic_fields__"


@dataclass(frozen=True)
class _Names:
    """What a function, and the functions within it, use by name.

    ``imports`` are the modules that they import when they are called: the name, the number of dots before it, and the
    names that are imported from it.
    """

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
