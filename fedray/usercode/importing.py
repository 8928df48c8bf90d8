"""Imports user-defined objects, which a config names as ``module:Name`` or ``path/to/file.py:Name``.

It also turns exceptions of the user's code into errors of one line.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fedray.errors import UserError, near_miss
from fedray.util.files import in_home

FORMS = "file.py:Name or module:Name"
"""The two forms in which a config can name a user-defined object, as messages show them."""


PREFIXES = ("torchvision:", "transformers:", "timm:")
"""How names in a config begin that have a colon, but do not name a user-defined object."""


def is_user_defined(name: str) -> bool:
    """Returns whether a name in a config means a user-defined object (``file.py:Name`` or ``module:Name``), rather than
    one that comes with fedray."""
    return ":" in name or name.endswith(".py")


def import_object(name: str, key: str) -> Any:
    """Imports and returns the user-defined object that a config names as ``module:Name`` or ``file.py:Name``.

    A file's path is absolute or relative to the working directory. The file may have the same name as another module,
    and is read again if it has been edited. Modules that the file imports are also looked for in its folder, after all
    other places.

    Raises :class:`UserError`, whose message names the config's ``key``, if there is no such object, if importing it
    fails, or if a module of the file's folder that it imports has been edited since Python loaded it.
    """
    module, attribute = _found(name, key)
    try:
        return getattr(module, attribute)
    except AttributeError:
        where = name.rpartition(":")[0]
        defined = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        kind = "" if where.endswith(".py") else "module "
        raise UserError(f"{key}={name}: {kind}{where} has no {attribute!r}{near_miss(attribute, defined)}") from None


def check_user_object(name: str, key: str) -> None:
    """Checks the name of a user-defined object in a config, without importing anything. If ``name`` is that of an
    object that comes with fedray, it is not checked.

    Raises :class:`UserError`, whose message names the config's ``key``, if ``name`` is not of the form ``file.py:Name``
    or ``module:Name``, or if the file can't be read.
    """
    if is_user_defined(name) and not name.startswith(PREFIXES):
        where = _parts(name, key)[0]
        if where.endswith(".py"):
            _code_in(Path(where), f"{key}={name}")


def home_of(name: str, key: str) -> str:
    """Returns the name of the Python module that contains the user-defined object ``name`` (``module:Name`` or
    ``file.py:Name``), as a key of ``sys.modules``. The module is imported if necessary. ``key`` is the config's key,
    for messages."""
    return _found(name, key)[0].__name__


def _found(name: str, key: str) -> tuple[ModuleType, str]:
    """Imports the user-defined object ``name``, ``module:Name`` or ``file.py:Name``. Returns its module,
    and ``Name``."""
    where, attribute = _parts(name, key)
    with as_user_error(f"{key}={name}: can't import {where!r}"):
        read = _module_in_file if where.endswith(".py") else _module
        return read(where, f"{key}={name}"), attribute


def _parts(name: str, key: str) -> tuple[str, str]:
    """Splits ``module:Name`` or ``file.py:Name`` into the part before the colon and ``Name``. Raises :class:`UserError`
    for a name of any other form."""
    where, _, attribute = name.rpartition(":")
    if not attribute.isidentifier() or not (
        where.endswith(".py") or all(part.isidentifier() for part in where.split("."))
    ):
        raise UserError(f"{key}={name} is not of the form {FORMS}, for example mine.py:Mine or my_package.mine:Mine")
    return where, attribute


def short_name(name: str) -> str:
    """Returns a short form of an object's name in a config, for use in the name of a run's folder: ``file:Name`` for
    ``path/to/file.py:Name``. Other names stay as they are."""
    where, colon, attribute = name.rpartition(":")
    return f"{Path(where).stem}:{attribute}" if colon and where.endswith(".py") else name


def _module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name + ".").startswith(error.name + "."):
            raise UserError(f"{what}: can't import {name!r}: no such module is on the import path") from None
        raise


def _code_in(file: str | Path, what: str) -> tuple[Path, bytes]:
    """Returns the absolute path of ``file``, one of the user's files, and its content."""
    path = in_home(file).absolute()
    try:
        return path, path.read_bytes()
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        beside = [each.name for each in path.parent.glob("*.py")] if is_missing else []
        hint = near_miss(path.name, beside) if beside else ""
        raise UserError(f"{what}: can't read the file {path}: {error.strerror}{hint}") from None


def _module_in_file(file: str, what: str) -> ModuleType:
    """Imports a file of the user's and returns it as a module. The module's name depends on the file's path and
    content, and on the content of the helpers in its folder, so that no other module has this name."""
    path, code = _code_in(file, what)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    helpers = _own_helpers(path, code, what)
    content = hashlib.sha256(b"".join([bytes(path), code, *helpers.values()]))
    name = f"own_{path.stem}_{content.hexdigest()[:16]}"
    if name in sys.modules:
        _note_loaded(helpers)
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # not by the module's loader, whose cached bytecode may miss an edit within the same second
        exec(compile(code, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    _note_loaded(helpers)
    return module


_LOADED: dict[str, tuple[Any, bytes]] = {}
"""The content of files that the user's files import from their own folders, as Python has loaded it, by the module's
name. The spec, which every loading makes anew, tells whether it still counts."""


def _own_helpers(path: Path, code: bytes, what: str) -> dict[str, bytes]:
    """Returns the content of the files that a user's file imports from its own folder, and of those that these import,
    by the module's name.

    Raises :class:`UserError` if Python would take another module of the same name for one, with other code, or if one
    has been edited since it was loaded.
    """
    found: dict[str, bytes] = {}
    left = [(path, code)]
    while left:
        for name, beside in _beside(*left.pop(), what):
            if name not in found:
                found[name] = beside.read_bytes()
                _require_loaded_as_it_is(name, beside, found[name], what)
                left.append((beside, found[name]))
    return found


def _require_loaded_as_it_is(name: str, path: Path, content: bytes, what: str) -> None:
    """Raises :class:`UserError` if the user's module ``name`` was loaded from other code than its file now has."""
    spec, loaded = _LOADED.get(name, (None, content))
    if name in sys.modules and sys.modules[name].__spec__ is spec and loaded != content:
        raise UserError(
            f"{what}: {path} has been edited since Python loaded it, and Python goes on with what it has loaded: start "
            f"Python anew, or call importlib.reload({name})"
        )


def _note_loaded(helpers: Mapping[str, bytes]) -> None:
    """Notes the content of those ``helpers`` that Python has loaded since it was noted last."""
    for name, content in helpers.items():
        module = sys.modules.get(name)
        if module is not None and _LOADED.get(name, (None, b""))[0] is not module.__spec__:
            _LOADED[name] = (module.__spec__, content)


def _beside(path: Path, code: bytes, what: str) -> Iterator[tuple[str, Path]]:
    """Yields the names and the files of the modules that a user's file imports from its own folder."""
    with contextlib.suppress(SyntaxError):
        for node in _executed(ast.parse(code)):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in sorted({each.partition(".")[0] for each in names} - sys.stdlib_module_names):
                beside = path.parent / f"{name}.py"
                taken = _file_of(name) if beside.is_file() and beside != path else None
                if taken is not None and taken.read_bytes() != beside.read_bytes():
                    raise UserError(
                        f"{what}: {path} imports {name}, and Python takes {taken} for it, not {beside}: give one of "
                        "them another name"
                    )
                if taken is not None:
                    yield name, beside


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a file's syntax ``tree``, but not what is only for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node = ast.Module(node.orelse, [])
        yield node
        yield from _executed(node)


def _file_of(name: str) -> Path | None:
    """Returns the file of the user's that Python takes, or has taken, for the module ``name``, None if it is another
    kind of module or one of an installed library."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    else:
        found = importlib.util.find_spec(name)
        file = None if found is None else found.origin
    path = Path(file or "/")
    return path if path.is_file() and not {"site-packages", "dist-packages"} & {*path.parts} else None


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """A context for calling the user's code: any exception in it becomes a :class:`UserError` with a message of one
    line.

    The line begins with ``what``, which says what failed. The exception's type and message follow, and the place in the
    user's files.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what}: {error_line(error)}") from error


def error_line(error: BaseException) -> str:
    """Describes an exception in one line: its type and message, and the place in the user's files that raised it, such
    as ``ValueError: too few samples (mine.py, line 12)``.

    The place is the last line of the user's code in the traceback. It is left out if there is no such line.
    """
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    folders = (sys.prefix, sys.base_prefix, Path(__file__).parent.parent)
    libraries = (*(os.path.join(folder, "") for folder in folders), "<frozen")
    users = [frame for frame in frames if not frame.filename.startswith(libraries)]
    place = f" ({Path(users[-1].filename).name}, line {users[-1].lineno})" if users else ""
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}{place}"
