"""Tells the user's own modules from libraries, and makes digests of their files without importing them."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

RECORDED = {"fedray", "torch", "torchvision", "numpy", "builtins", *sys.stdlib_module_names}
"""The packages whose code does not count in a digest, because a run records their versions, or Python's."""


def sha256_of(*parts: str | bytes) -> bytes:
    """Returns the sha256 of several parts. Each counts with its length, so that ("ab", "c") and ("a", "bc") differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()


def is_library(module: str | None) -> bool:
    """Returns whether the module of this name comes from an installed package, and not from the user's own files.

    What is in ``__main__`` is the user's, even if an installed program runs it, such as that of a notebook.
    """
    if module == "__main__":
        return False
    if module is None or module.partition(".")[0] in RECORDED:
        return True
    return _is_installed(getattr(sys.modules.get(module), "__file__", None))


def library_digest(module: str, name: str) -> bytes:
    """Returns the digest of something that a library defines.

    It is that of its name, and also of the library's file if no run records the library's version.
    """
    unrecorded = module.partition(".")[0] not in RECORDED and is_library(module)
    return sha256_of(module, name, _content(module) if unrecorded else b"")


@cache
def _content(module: str) -> bytes:
    path = getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).digest() if path and Path(path).is_file() else b""


def source_digest(modules: Iterable[str]) -> bytes:
    """Returns the digest of the code in ``modules`` and in the user's own modules that they import.

    Comments and line breaks do not count. Of libraries, and of names that are no modules, only the name counts.
    """
    parts: list[str] = []
    left, known = sorted(modules, reverse=True), set()
    while left:
        name = left.pop()
        if name in known:
            continue
        known.add(name)
        tree = None if is_library(name) else _tree(name)
        parts += [name, ast.dump(tree) if tree else ""]
        left += sorted(_imports_of(name, tree), reverse=True) if tree else []
    return sha256_of(*parts)


def possible_modules(name: str, level: int, names: Iterable[str], package: str) -> Iterator[str]:
    """Yields the modules that ``from name import names`` may run.

    The statement stands in a ``package``, and has ``level`` dots before the name.
    """
    with contextlib.suppress(ImportError):
        base = importlib.util.resolve_name("." * level + name, package) if level else name
        parts = base.split(".")
        yield from (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        if not is_library(base):
            yield from (f"{base}.{each}" for each in names if _spec(f"{base}.{each}") is not None)


def _imports_of(module: str, tree: ast.Module) -> Iterator[str]:
    spec = _spec(module)
    package = module if spec and spec.submodule_search_locations is not None else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield from possible_modules(each.name, 0, (), package)
        elif isinstance(node, ast.ImportFrom):
            yield from possible_modules(node.module or "", node.level, [each.name for each in node.names], package)


_first_read: dict[str, tuple[ModuleSpec | None, ast.Module | None]] = {}


def _tree(module: str) -> ast.Module | None:
    """Returns the syntax tree of a module's file, or None for a library.

    For a module that is imported already, it is the tree of what the file contained when this function first read it,
    because an edit after the import is not what runs.
    """
    loaded = getattr(sys.modules.get(module), "__spec__", None)
    if loaded is not None and module in _first_read:
        spec, tree = _first_read[module]
        # importlib.reload() gives a module another spec
        if spec is None or spec is loaded:
            _first_read[module] = (loaded, tree)
            return tree
    tree = None
    spec = _spec(module)
    if spec is not None and spec.has_location and not _is_installed(spec.origin):
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            tree = ast.parse(Path(str(spec.origin)).read_bytes())
    _first_read[module] = (loaded, tree)
    return tree


def _spec(module: str) -> ModuleSpec | None:
    """Returns the spec of a module, or None if it can't be found.

    Nothing is imported for it, not even the packages around it.
    """
    with contextlib.suppress(Exception):
        path, parts = None, module.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            spec = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
            if spec is None:
                return None
            path = spec.submodule_search_locations
            if path is None and depth < len(parts):
                return None
        return spec
    return None


def _is_installed(path: str | None) -> bool:
    return path is not None and bool({"site-packages", "dist-packages"} & set(Path(path).parts))
