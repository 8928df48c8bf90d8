"""Says whether a module is the user's or a library's, and makes digests of modules' source files without importing
them."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

RECORDED = {"fedray", "torch", "torchvision", "numpy", "builtins", *sys.stdlib_module_names}
"""The packages whose code does not count in a digest of the user's code, because a run records their versions or the
version of Python."""


def with_length(part: str | bytes) -> bytes:
    """Returns ``part`` as bytes, preceded by its length (8 bytes), for hashing several parts in a row. So "ab", "c" and
    "a", "bc" give different hashes."""
    data = part.encode() if isinstance(part, str) else part
    return len(data).to_bytes(8, "big") + data


def sha256_of(*parts: str | bytes) -> bytes:
    """Returns the sha256 of several parts together, 32 bytes. It also depends on where one part ends and the next
    begins: "ab", "c" and "a", "bc" give different digests."""
    return hashlib.sha256(b"".join(map(with_length, parts))).digest()


def is_library(module: str | None) -> bool:
    """Returns whether the module with the name ``module`` belongs to Python or to an installed package, and not to the
    user's files. None, for an object without a module, counts as a library.

    ``__main__`` is the user's, even if an installed program runs it, as in a notebook.
    """
    if module == "__main__":
        return False
    if module is None or module.partition(".")[0] in RECORDED:
        return True
    return _is_installed(getattr(sys.modules.get(module), "__file__", None))


def library_digest(module: str, name: str) -> bytes:
    """Returns a digest (32 bytes) of an object that a library defines, for use in a digest of the user's code that
    refers to it. ``name`` is the object's name, and ``module`` that of its module.

    The digest covers the two names. For a library whose version is not recorded in each run (one that is not in
    :data:`RECORDED`) it also covers the content of the module's file, so that it changes with the version.
    """
    unrecorded = module.partition(".")[0] not in RECORDED and is_library(module)
    return sha256_of(module, name, _content(module) if unrecorded else b"")


@cache
def _content(module: str) -> bytes:
    path = getattr(sys.modules.get(module), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).digest() if path and Path(path).is_file() else b""


def source_digest(modules: Iterable[str], package: str = "", names: Collection[str] = ()) -> bytes:
    """Returns a digest (32 bytes) of the source code of ``modules`` and of the modules that they import, without
    importing anything.

    The digest covers only modules that are the user's, without comments, line breaks and docstrings. A name in
    ``modules`` may also be that of a submodule of ``package``, without the package's name. ``names`` are names that may
    be submodules, such as the ``b`` in code that uses ``a.b``: if ``a`` is a package whose code the digest covers, its
    submodules with these names are covered too.
    """
    found: dict[str, str] = {}
    left = [each for name in modules for each in (name, f"{package}.{name}")]
    while left:
        module = left.pop()
        file = None if module in found else _file_of(module)
        if file is None:
            continue
        found[module] = ""
        # importing a module also runs the packages around it
        left.append(module.rpartition(".")[0])
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            tree = ast.parse(file.read_bytes())
            is_package = file.name == "__init__.py"
            left += _imports_of(tree, module if is_package else module.rpartition(".")[0])
            left += [f"{module}.{name}" for name in names] if is_package else []
            for node in ast.walk(tree):
                if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
                    del node.body[0]
            found[module] = ast.dump(tree)
    return sha256_of(*(part for item in sorted(found.items()) for part in item))


_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _imports_of(tree: ast.Module, package: str) -> Iterator[str]:
    """Yields the dotted names that the code ``tree`` of a module in ``package`` imports, which may be modules or
    objects in modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):
                name = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(name, package) if node.level else name
                yield from (base, *(f"{base}.{each.name}" for each in node.names))


def _file_of(module: str) -> Path | None:
    """Returns the file of ``module`` if that is one of the user's modules, or None if it belongs to a library or does
    not exist."""
    if module in sys.modules:
        file = getattr(sys.modules[module], "__file__", None)
        return Path(file) if file and not is_library(module) else None
    if not module or is_library(module):
        return None
    parts = module.split(".")
    for folder in sys.path:
        for path in (Path(folder, *parts, "__init__.py"), Path(folder, *parts).with_suffix(".py")):
            if path.is_file():
                return None if _is_installed(str(path)) else path
    return None


def _is_installed(path: str | None) -> bool:
    return path is not None and bool({"site-packages", "dist-packages"} & set(Path(path).parts))
