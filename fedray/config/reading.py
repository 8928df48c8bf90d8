"""Reads a configuration from YAML files and ``key=value`` overrides, and says in one line what is wrong with it.

The keys themselves are defined in :mod:`fedray.config.sections`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from fedray.config.files import FOR_ALGORITHM, for_algorithm, has_section, has_value, merged, read_extended
from fedray.config.keys import choices, literals, members, unknown_key
from fedray.config.section import in_message, is_section
from fedray.config.sections import ALGORITHM, Config
from fedray.config.yaml_text import comment_after, parse_yaml, problem_of
from fedray.errors import UserError, closest
from fedray.usercode.importing import short_name
from fedray.util.arguments import override_texts
from fedray.util.files import is_there
from fedray.util.uris import is_uri

OPTION = r"(algorithm|model)\.\w+"
"""The form of keys that an algorithm or model may add. This module does not know which keys those are."""

MOST_PROBLEMS = 5
"""How many wrong values a message names."""


def check_words(words: list[str], keys: Sequence[str]) -> None:
    """Checks that keys on a command line are written as key=value, and not, for example, as ``train.lr 0.1`` or
    ``--train.lr=0.1``.

    Raises :class:`UserError` for the first wrong word, with the right form. ``words`` are the words of the command line
    after the command. ``keys`` are the keys that the command accepts, without those that algorithms and models add.
    """
    for number, word in enumerate(words):
        key, sign, value = word.lstrip("-").partition("=")
        is_option = word.startswith("-")
        if sign and not is_option and value:
            continue
        value = value or _value_after(words[number + 1 :])
        meant = [] if is_there(word) or (is_option and "." not in key) else _probable_keys(key, keys, bool(value))
        if meant and (value or not sign):
            choice = " or ".join(f"{each}={value or '...'}" for each in meant)
            raise UserError(f"{word}: a key and its value are one word, key=value (did you mean {choice}?)")


def _value_after(words: list[str]) -> str:
    """Returns the value at the beginning of ``words``, which follow a key: ``0.1`` for ``0.1``, ``= 0.1`` or ``=0.1``.

    Returns an empty text if there is no value.
    """
    text = "".join(words[1:2]) if words[:1] == ["="] else "".join(words[:1]).removeprefix("=")
    is_none = "=" in text or text.startswith("--") or text.endswith((".yaml", ".yml")) or is_there(text)
    return "" if is_none else text


def _probable_keys(key: str, keys: Sequence[str], has_value: bool) -> list[str]:
    """Returns the keys that the user may have meant by the word ``key`` of a command line; empty if it is probably no
    key.

    A word that is not exactly one of ``keys`` counts as a key only if a value follows it.
    """
    if key in keys:
        return [key]
    if not has_value:
        return []
    if "." not in key:
        return [each for each in keys if each.rpartition(".")[2] == key]
    if re.fullmatch(OPTION, key):
        return [key]
    close = closest(key, keys)
    return [close] if close else []


def read(config: Mapping[str, Any] | str | Path | None) -> tuple[dict[str, Any], str]:
    """Reads a configuration without checking its keys.

    ``config`` is a mapping with nested or dotted keys, the path of a YAML file, the URI of a run's config.yaml, or None
    for an empty configuration. Returns two things. The first is the configuration as a dict of nested sections, such as
    ``{"train": {"lr": 0.1}}``. The second is the text with which error messages about it begin. It names the file and
    the files that it extends, and is empty if ``config`` is not a file. Raises :class:`UserError` if a file can't be
    read, or ``config`` is something else.
    """
    if config is None:
        return {}, ""
    if isinstance(config, Mapping):
        return _expand_all(config), ""
    if not isinstance(config, str | os.PathLike):
        raise UserError(
            f"a configuration is a mapping or the name of a YAML file, not a {type(config).__name__}; "
            "overrides=['key=value', ...] takes what a command has"
        )
    if isinstance(config, str) and is_uri(config):
        # imported here because few configurations are at a URI
        from fedray.remote.fetching import as_path

        config = as_path(config)
    try:
        values, (_, *extended) = read_extended(Path(config), lambda path: _expand_all(_said_once(path)))
    except RecursionError:
        raise UserError(f"{config} is nested too deeply for a config") from None
    others = f", which extends {' and '.join(map(str, extended))}" if extended else ""
    return values, f"{config}{others}: "


def _said_once(path: Path) -> dict[str, Any]:
    """Reads a single YAML file of a configuration (:func:`read_file`). Raises :class:`UserError` if the file says a key
    twice, once with dots and once within a section: ``train.lr: 0.1`` and ``train: {lr: 0.2}``. What it takes over from
    an anchor may be replaced."""
    values = read_file(path)
    counts = Counter(_named(read_file(path, own=True)))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UserError(f"{path} says {twice[0]} twice, with dots and within a section")
    return values


def _named(values: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted keys of the values in a configuration that may have dotted keys itself."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and not has_value(name):
            yield from _named(value, f"{name}.")
        else:
            yield name


def _expand_all(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns a copy of a configuration in which dotted keys have become nested sections. The names of algorithms below
    ``for_algorithm`` keep their dots, as in ``mine.py:Mine``."""
    values = dict(values)
    said = values.pop(FOR_ALGORITHM, None)
    if isinstance(said, Mapping):
        said = {name: expand(keys or {}) if isinstance(keys, Mapping | None) else keys for name, keys in said.items()}
    return expand(values) | ({} if said is None else {FOR_ALGORITHM: said})


ASIDE = "x-"
"""The beginning of the names of sections that only define YAML anchors: ``x-common: &common {train.lr: 0.1}``."""


def read_file(path: Path, own: bool = False) -> dict[str, Any]:
    """Reads a single YAML file of a configuration, and returns its content as a dict. Sections whose names begin with
    ``x-`` are left out, because they only define YAML anchors. Dotted keys stay as they are. With ``own`` the result
    lacks what sections take over from anchors.

    Raises :class:`UserError` if the file can't be read, is not YAML, or has something else than sections.
    """
    try:
        loaded = parse_yaml(path.read_text(encoding="utf-8"), own)
    except OSError as error:
        raise UserError(f"can't read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file: a config is YAML in UTF-8") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {problem_of(error)}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply for a config") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise UserError(f"{path} must hold sections (run, data, ...), not {in_message(loaded)}")
    return {key: value for key, value in (loaded or {}).items() if not str(key).startswith(ASIDE)}


def expand(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a copy of a configuration in which dotted keys have become nested sections: ``{"train": {"lr": 0.1}}``
    for ``{"train.lr": 0.1}``. A mapping that is the value of a key, such as ``task.metrics``, stays as it is.

    ``prefix``, such as ``train.``, is where in the configuration ``values`` are. A section that is said at two
    places, as by ``train.lr`` and ``train: {momentum: 0.9}``, has the keys of both, and a later value replaces an
    earlier one. Raises :class:`UserError` if a key is below another key that has a value, as ``train.lr.x`` is if
    ``train.lr`` is 0.1.
    """
    nested: dict[str, Any] = {}
    for key, value in values.items():
        whole = has_value(f"{prefix}{key}")
        value = expand(value, f"{prefix}{key}.") if isinstance(value, Mapping) and not whole else _of_python(value)
        section = nested
        *path, last = str(key).split(".")
        for step in path:
            if section.get(step) is None:
                section[step] = {}
            section = section[step]
            if not isinstance(section, dict):
                raise UserError(f"{key} is below {step}, which has a value already")
        section[last] = _joined(section.get(last), value, f"{prefix}{key}")
    return nested


def _of_python(value: Any) -> Any:
    """Returns the value of a key with numbers and arrays of NumPy and torch, also within it, as Python's own."""
    if isinstance(value, Mapping):
        return {key: _of_python(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_of_python, value)) if type(value) in (list, tuple) else value
    library = type(value).__module__.partition(".")[0]
    return value.tolist() if library in ("numpy", "torch") and hasattr(value, "tolist") else value


def _joined(one: Any, other: Any, key: str) -> Any:
    """Returns what ``key`` is if it is said at two places, the ``other`` one later: a section has the keys of both, and
    an empty one replaces nothing."""
    if not isinstance(one, dict) or has_value(key):
        return other
    return one if other is None else merged(one, other, f"{key}.") if isinstance(other, dict) else other


def plain(name: str) -> str:
    """Turns ``name`` into a name for a file or folder: letters, digits and ``-_.`` are kept, and all other characters
    become underscores."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns nested sections such as ``{"train": {"lr": 0.1}}`` into a dict of their values by dotted key,
    ``{"train.lr": 0.1}``. A mapping that is the value of a key, such as ``task.metrics``, stays as it is.

    ``prefix`` is put in front of every key, such as ``train.`` if ``values`` are the content of that section.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        full = f"{prefix}{key}"
        found |= flat(value, f"{full}.") if isinstance(value, Mapping) and not has_value(full) else {full: value}
    return found


def assign(values: dict[str, Any], override: str) -> None:
    """Applies an override such as ``train.lr=0.1`` to a configuration: sets the key that it names in the nested
    sections ``values``, which are changed in place. The value is read as YAML.

    Raises :class:`UserError` if ``override`` is not of the form key=value, or the key is below a key that has a value.
    """
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{override!r} is not of the form key=value, for example train.lr=0.1")
    try:
        value = parse_yaml(text)
        if "#" in text and (comment := comment_after(text)):
            raise UserError(
                f"{override!r}: YAML takes {comment!r} for a comment; put the value in quotes, key='\"...\"'"
            )
    except RecursionError:
        raise UserError(f"the value of {override!r} is nested too deeply") from None
    except yaml.YAMLError as error:
        raise UserError(f"the value of {override!r} is not valid YAML: {problem_of(error)}") from None
    section = values
    *path, last = key.strip().split(".")
    for step in path:
        below = section.setdefault(step, {})
        if below is None:
            below = section[step] = {}
        if not isinstance(below, dict):
            raise UserError(f"{key.strip()}: {step} holds a value, not a section")
        section = below
    there, name = section.get(last), key.strip()
    if isinstance(value, Mapping) and has_section(name):
        value = expand(value, f"{name}.")
    if isinstance(there, dict) and isinstance(value, Mapping | None) and has_section(name):
        # as in a file that extends another
        value = merged(there, value or {}, f"{name}.")
    section[last] = value


def check(model: type[Any], values: Mapping[str, Any], where: str = "", prefix: str = "", before: Any = None) -> Any:
    """Checks the ``values`` of a section of the configuration, given by key, and returns them as an instance of the
    section's class ``model``, such as :class:`TrainConfig`.

    Raises :class:`UserError` with a message of one line if a key is unknown or a value is not allowed. The message
    begins with ``where``, such as the name of the file that has the values; not if the values ``before``, which are
    those of the file where ``values`` have others in their place, are right. In the message, ``prefix``, such as
    ``algorithm.``, is put in front of the keys.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        with contextlib.suppress(ValidationError):
            if before is not None and model.model_validate(dict(before)):
                where = ""
        lines: dict[Any, str] = {}
        for problem in error.errors():
            of_a_key = problem["type"] != "extra_forbidden"
            # pydantic reports a problem for each member of a union; the user gets one for the value
            value = _key_of(model, problem["loc"])[0] if of_a_key else problem["loc"]
            lines.setdefault(value, _explain(model, problem, prefix))
        found = [*dict.fromkeys(lines.values())]
        more = [f"and {len(found) - MOST_PROBLEMS} more"] if len(found) > MOST_PROBLEMS else []
        raise UserError(where + "; ".join(found[:MOST_PROBLEMS] + more)) from None


BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def _explain(model: type[BaseModel], problem: Any, prefix: str) -> str:
    key, annotation = _key_of(model, problem["loc"])
    value = problem.get("input")
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if problem["type"] == "extra_forbidden":
        return unknown_key(str(problem["loc"][-1]), annotation.model_fields, f"{prefix}{key}." if key else prefix)
    if is_section(annotation):
        # the section's own validators write complete messages
        example = next(iter(annotation.model_fields), "...")
        meant = value if example == "kind" and isinstance(value, str) else "..."
        kind = f"{prefix}{key} is a section, as in {prefix}{key}.{example}: {meant}, not {in_message(value)}"
        if problem["type"] in ("model_type", "model_attributes_type"):
            return kind
        # a section that is used in several places does not know its own name
        return message if "." not in key or key in message else f"{prefix}{key}: {message}"
    key = prefix + key
    if problem["type"] == "missing":
        return f"{key} must be given: {choices(annotation)}"
    if problem["type"] == "value_error":
        return f"{key} {message}"
    if problem["type"].startswith(("greater", "less")):
        # not pydantic's own message, which rounds large limits
        ((bound, limit),) = problem["ctx"].items()
        range = f"{BOUNDS[bound]} {f'{limit:g}' if isinstance(limit, float) else limit}"
        text = f"must be {' or '.join([*map(repr, literals(annotation)), range])}"
    elif problem["type"].startswith("finite"):
        text = message.replace("Input should be", "must be")
    else:
        text = f"must be {choices(annotation) or message.removeprefix('Input should be ')}"
    hint = closest(value, literals(annotation)) if isinstance(value, str) else None
    quote = ": put it in quotes" if problem["type"] == "string_type" and isinstance(value, (int, float)) else ""
    return f"{key} {text}, not {in_message(value)}{quote}" + (f" (did you mean {hint!r}?)" if hint else "")


def _key_of(model: type[BaseModel], location: Iterable[Any]) -> tuple[str, Any]:
    """Returns the dotted key to which a location in a pydantic error belongs, and the key's annotation.

    If there is no such key, the annotation is that of the section. The location of a problem in a union ends with the
    name of the member that failed, which is not part of the key.
    """
    key, annotation = "", typing.cast(Any, model)
    for part in location:
        if is_section(annotation) and part in annotation.model_fields:
            key += f".{part}" if key else str(part)
            annotation = annotation.model_fields[part].annotation
        elif isinstance(part, int):
            key += f"[{part}]"
            annotation = next(
                (typing.get_args(m)[0] for m in members(annotation) if typing.get_origin(m) is list), None
            )
    return key, annotation


def run_name(config: Config, source: str) -> str:
    """Returns the name of a run's folder: ``run.name`` if it is set, or else a name such as ``fedavg-mnist``.

    That name is made of the names of the algorithm and of the data set, ``source`` (as in ``data.source``).
    """
    return config.run.name or plain(f"{short_name(config.algorithm.name)}-{short_name(source)}")


def load(config: Mapping[str, Any] | str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads the configuration of a run, checks it, and returns it as a :class:`Config`.

    Args:
        config: A mapping with nested or dotted keys, the path of a YAML file, or None for the defaults.
        overrides: Texts ``key=value``, such as ``train.lr=0.1``, that replace keys of ``config``.

    Raises:
        UserError: A key is unknown, or a value has a wrong type or is out of range. The message is one line.
    """
    values, where = read(config)
    overrides = override_texts(overrides)
    asked: dict[str, Any] = {}
    for override in overrides:
        assign(asked, override)
    if FOR_ALGORITHM in asked:
        raise UserError(f"{FOR_ALGORITHM} is for config files: give the run's own keys, as in train.lr=0.1")
    said = values.get(FOR_ALGORITHM)
    for other, keys in said.items() if isinstance(said, Mapping) else ():
        of_it = for_algorithm(values, other)
        if _algorithm_of(of_it) != _algorithm_of(values):
            raise UserError(f"{where}{FOR_ALGORITHM}: {other}: algorithm.name can't be set here")
        if isinstance(keys, Mapping) and FOR_ALGORITHM in keys:
            raise UserError(f"{where}{FOR_ALGORITHM}: {other}: {FOR_ALGORITHM} can't be nested")
        check(Config, of_it, f"{where}{FOR_ALGORITHM}: {other}: ")
    values = for_algorithm(values, _algorithm_of(asked) or _algorithm_of(values) or ALGORITHM)
    before = copy.deepcopy(values)
    for override in overrides:
        assign(values, override)
    checked: Config = check(Config, values, where, before=before)
    return checked


def _algorithm_of(values: Mapping[str, Any]) -> Any:
    section = values.get("algorithm")
    name = section.get("name") if isinstance(section, Mapping) else None
    return name if isinstance(name, str) else None
