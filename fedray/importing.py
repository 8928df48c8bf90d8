"""The user's own code: objects named ``module:attribute`` in a config, and calls of them."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedray.errors import UserError, near_miss


def import_object(name: str, key: str) -> Any:
    """What ``module:attribute`` names; a :class:`UserError` naming the config's ``key`` if there is no such thing."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise UserError(f"{key}={name} is not of the form module:Name, for example my_package.my_module:MyClass")
    with blamed(f"{key}={name}: can't import {module_name!r}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name + ".").startswith(error.name + "."):
                raise UserError(
                    f"{key}={name}: can't import {module_name!r}: no such module is on the import path"
                ) from None
            raise
    try:
        return getattr(module, attribute)
    except AttributeError:
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise UserError(f"{key}={name}: module {module_name} has no {attribute!r}{near_miss(attribute, own)}") from None


@contextlib.contextmanager
def blamed(what: str) -> Iterator[None]:
    """Around a call of the user's code: whatever it raises becomes a :class:`UserError` of one line, with its place."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what}: {_told(error)}") from error


def _told(error: BaseException) -> str:
    """Type, message and place of an error, in one line."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (sys.prefix, sys.base_prefix, str(Path(__file__).parent), "<frozen")
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}{place}"
