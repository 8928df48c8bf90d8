"""Merges configurations: files that extend other files, and settings that apply to one algorithm only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedray.config.section import in_message, is_section
from fedray.config.sections import Config
from fedray.errors import UserError
from fedray.util.files import in_home

EXTENDS, FOR_ALGORITHM = "extends", "for_algorithm"

Values = dict[str, Any]


def has_value(key: str) -> bool:
    """Returns whether the dotted ``key`` of a configuration is one that has a value, and not a section. The value may
    be a mapping, as that of ``task.metrics`` is, which is then replaced as a whole. Keys that only some algorithms or
    models declare are not known here."""
    found = _declared(key)
    return found is not None and not is_section(found) and key != FOR_ALGORITHM


def has_section(key: str) -> bool:
    """Returns whether the dotted ``key`` of a configuration is a section, such as ``data.partition``."""
    return is_section(_declared(key))


def _declared(key: str) -> Any:
    """Returns the type of the dotted ``key`` in the configuration's classes, or None if these do not declare it."""
    annotation: Any = Config
    for step in key.split("."):
        if not is_section(annotation) or step not in annotation.model_fields:
            return None
        annotation = annotation.model_fields[step].annotation
    return annotation


def merged(below: Mapping[str, Any], above: Mapping[str, Any], prefix: str = "") -> Values:
    """Merges two configurations, each a dict of nested sections such as ``{"train": {"lr": 0.1}}``. Returns the result,
    in which the values of ``above`` replace those of the same keys in ``below``. Sections that are in both are merged
    in turn.

    An empty section (None) in ``above`` replaces nothing. ``prefix``, such as ``train.``, is where in the configuration
    both are.
    """
    found = dict(below)
    for key, value in above.items():
        there, full = found.get(key), f"{prefix}{key}"
        if value is None and isinstance(there, Mapping) and not has_value(full):
            # an empty section replaces nothing
            continue
        if isinstance(there, Mapping) and isinstance(value, Mapping) and not has_value(full):
            value = merged(there, value, f"{full}.")
        found[key] = value
    return found


def read_extended(
    path: Path, read_one: Callable[[Path], Values], within: tuple[Path, ...] = ()
) -> tuple[Values, list[Path]]:
    """Reads a configuration file and the files that its key ``extends`` names, and merges them. The values of the file
    itself replace those of the files that it extends. These may extend others in turn.

    Args:
        path: The file. Paths in its key ``extends`` (one, or a list) are relative to its folder. Of the files in a
            list, the values of a later one replace those of an earlier one.
        read_one: ``read_one(path)`` returns the nested sections of a single file.
        within: The chain of files, from the first one on, each of which extends the next, and the last of which extends
            ``path``. It is empty for the first file, and is needed to find circles.

    Returns:
        The merged nested sections, and the paths of all files that were read, ``path`` first.

    Raises:
        UserError: ``extends`` has anything but paths, or files extend each other in a circle.
    """
    if path.resolve() in within:
        raise UserError(f"{path} extends itself, through {within[-1]}")
    values = read_one(path)
    if EXTENDS not in values:
        return values, [path]
    said = values.pop(EXTENDS)
    parents = said if isinstance(said, list) and said else [said]
    below: Values = {}
    files = [path]
    for parent in parents:
        if not isinstance(parent, str):
            raise UserError(f"{path}: {EXTENDS} must be the path of a config file, or a list, not {in_message(said)}")
        found, read = read_extended(path.parent / in_home(parent), read_one, (*within, path.resolve()))
        below, files = merged(below, found), [*files, *read]
    return merged(below, values), files


def for_algorithm(values: Values, name: str) -> Values:
    """Applies the settings that a configuration has for one algorithm only. Returns the nested sections ``values``, in
    which the keys below ``for_algorithm: <name>`` replace the keys of the same names. If there are no such settings,
    ``values`` itself is returned."""
    said = values.get(FOR_ALGORITHM)
    keys = said.get(name) if isinstance(said, Mapping) else None
    # copied, because overrides are written into the values later
    return merged(values, copy.deepcopy(keys)) if isinstance(keys, Mapping) else values
