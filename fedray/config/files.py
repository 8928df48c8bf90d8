"""Merges configurations: files that extend other files, and settings that hold for one algorithm only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedray.config.section import in_message
from fedray.errors import UserError

EXTENDS, FOR_ALGORITHM = "extends", "for_algorithm"

Values = dict[str, Any]


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Values:
    """Returns nested sections in which the values of ``above`` replace those of ``below``, section by section.

    A section of ``above`` that is empty (null) replaces nothing.
    """
    found = dict(below)
    for key, value in above.items():
        there = found.get(key)
        if value is None and isinstance(there, Mapping):
            # an empty section replaces nothing
            continue
        found[key] = merged(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return found


def read_extended(
    path: Path, read_one: Callable[[Path], Values], within: tuple[Path, ...] = ()
) -> tuple[Values, list[Path]]:
    """Reads the configuration file ``path``, and merges it over the file, or the list of files, that its key
    ``extends`` names, if there is one.

    These may extend others in turn. Of several, each is merged over those before it. Returns the merged nested
    sections, and the files that were read, ``path`` first. The paths in ``extends`` are relative to the folder of the
    file. ``read_one(path)`` returns the sections of a single file, and ``within`` are the files that led to this one.
    Raises :class:`UserError` if ``extends`` has anything but paths, or the files extend each other in a circle.
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
        found, read = read_extended(path.parent / parent, read_one, (*within, path.resolve()))
        below, files = merged(below, found), [*files, *read]
    return merged(below, values), files


def for_algorithm(values: Values, name: str) -> Values:
    """Returns the nested sections ``values`` with the settings for one algorithm in effect.

    These are what the section ``for_algorithm`` of ``values`` has for the algorithm ``name``. They replace the values
    of the same keys.
    """
    said = values.get(FOR_ALGORITHM)
    keys = said.get(name) if isinstance(said, Mapping) else None
    # copied, because overrides are written into the values later
    return merged(values, copy.deepcopy(keys)) if isinstance(keys, Mapping) else values
