"""Finds the objects that a config names, whether they come with fedray or are user-defined.

Where a config has a name, a call from Python may have the object itself.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from fedray.errors import UserError, near_miss
from fedray.usercode.importing import FORMS, as_user_error, check_user_object, import_object, is_user_defined

Entry: TypeAlias = str | dict[str, Any]
"""How a config names an object: by a name alone, or by a mapping with the key ``name`` and options for the class of
that name, such as ``{name: file.py:Name, option: 1}``. For an object that comes with fedray also by a mapping with its
name as the only key, and its first option or all of them: ``{clip: 1.0}``, ``{topk: {k: 0.1, error_feedback: no}}``."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""The kinds of parameters that an option can be."""


def is_object(entry: Any) -> bool:
    """Returns whether ``entry`` is an object that was passed from Python, and no entry of a config."""
    return not isinstance(entry, (str, Mapping))


def recorded_name(thing: Any) -> str:
    """Returns the name under which a config records an object that was passed from Python: that of the function, the
    class, or the class of the instance, with its module, such as ``__main__:Half``."""
    named = thing if isinstance(thing, type) or inspect.isroutine(thing) else type(thing)
    module = getattr(named, "__module__", None) or "builtins"
    # a module of a file or a lambda may have a name that no import could have
    return ":".join((re.sub(r"[^\w.]", "_", module), re.sub(r"\W", "_", named.__name__)))


def check_entry(entry: Any, key: str, known: Mapping[str, Any] = NOTHING, label: str = "name") -> str:
    """Checks, without importing anything, whether the value of a config's key properly names an object, such as a
    model. Returns the name.

    Args:
        entry: The value: a name, or a mapping with the key ``name`` and options; or the object itself, which is not
            checked, and whose name is the recorded one (:func:`recorded_name`).
        key: The config's key, for messages.
        known: The objects that come with fedray, by name.
        label: The key of the mapping that has the name, if that is not ``name``.

    Raises:
        UserError: There is no name, or the name is neither in ``known`` nor of the form of a user-defined object
            (``file.py:Name`` or ``module:Name``), or the object's file can't be read.
    """
    name, _, _ = _parts(entry, known, label)
    if is_object(entry):
        return recorded_name(entry)
    if not isinstance(name, str):
        raise UserError(f"{key}: {entry} must have the key {label}, as in {{{label}: file.py:Name, option: 1}}")
    if is_user_defined(name):
        check_user_object(name, key)
    elif name not in known:
        raise UserError(f"{key}: there is no {name!r}{near_miss(name, known)}; your own is given as {FORMS}")
    return name


def find(name: Any, key: str, known: Mapping[str, Any] = NOTHING) -> Any:
    """Returns the object that a config names: one that comes with fedray, or a user-defined one, which is imported.

    Args:
        name: The name in the config: a key of ``known``, or ``file.py:Name`` or ``module:Name``. An object that was
            passed from Python is returned.
        key: The config's key, for messages.
        known: The objects that come with fedray, by name.

    Raises:
        UserError: There is no such object, or importing its module fails.
    """
    check_entry(name, key, known)
    if is_object(name):
        return name
    return import_object(name, key) if is_user_defined(name) else known[name]


def make(entry: Any, key: str, known: Mapping[str, Any] = NOTHING, label: str = "name") -> Any:
    """Returns the object that a config names. If it is a class, an instance is made with the options in the config.

    Args:
        entry: The name, as in :func:`find`, or a mapping with the key ``name`` and options for a class; or the object
            itself. An object that is no class is copied, so that a run does not change what the next one gets.
        key: The config's key, for messages.
        known: The objects that come with fedray, by name.
        label: The key of a mapping that has the name, if that is not ``name``.

    Raises:
        UserError: There is no such object, the class can't be instantiated with these options, or options are given for
            an object that is no class.
    """
    check_entry(entry, key, known, label)
    name, first, options = _parts(entry, known, label)
    return instance(name, key, known, first, options)


def instance(
    name: Any,
    key: str,
    known: Mapping[str, Any] = NOTHING,
    first: Sequence[Any] = (),
    options: Mapping[str, Any] = NOTHING,
) -> Any:
    """Returns the object of the ``name`` in a config, or a copy of the object itself, as :func:`make` does. If it is a
    class, its instance gets the arguments ``first`` by position and ``options`` by name."""
    found, what = find(name, key, known), f"{key}={check_entry(name, key, known)}"
    if not isinstance(found, type):
        if options or first:
            raise UserError(f"{what}: only a class takes options, such as {next(iter(options or first))}")
        with as_user_error(f"{what} can't be copied"):
            return copy.deepcopy(found) if is_object(name) else found
    _check_options(found, first, options, what)
    with as_user_error(f"{what} can't be made"):
        return found(*first, **options)


def _check_options(cls: type, first: Sequence[Any], options: Mapping[str, Any], what: str) -> None:
    """Raises :class:`UserError` if ``cls`` has no parameter of the name of an option, or needs one that is neither
    among ``options`` nor the ``first``. Classes whose parameters Python can't tell are not checked."""
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):
        return
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for option in () if takes_all else options:
        if option not in parameters:
            hint = near_miss(option, parameters) or " (it has none)"
            raise UserError(f"{what} has no option {option!r}{hint}")
    needed = [name for name, each in parameters.items() if each.default is each.empty and each.kind in BY_NAME]
    if missing := [name for name in needed[len(first) :] if name not in options]:
        raise UserError(f"{what} needs the option{'s' if len(missing) > 1 else ''} {' and '.join(missing)}")


def _parts(entry: Any, known: Mapping[str, Any], label: str = "name") -> tuple[Any, list[Any], Mapping[str, Any]]:
    """Returns the name in an entry, and what the class of that name gets, by position and by name. The name is None if
    there is none."""
    if isinstance(entry, str) or is_object(entry):
        return entry, [], {}
    if label not in entry and len(entry) == 1 and (name := next(iter(entry))) in known:
        (value,) = entry.values()
        return (name, [], value) if isinstance(value, Mapping) else (name, [] if value is None else [value], {})
    return entry.get(label), [], {option: value for option, value in entry.items() if option != label}
