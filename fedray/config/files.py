"""What configurations take from others: files that extend files, and what is said for single algorithms."""

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
    """Returns nested sections ``below`` with the values of ``above`` instead of theirs."""
    found = dict(below)
    for key, value in above.items():
        there = found.get(key)
        if value is None and isinstance(there, Mapping):
            # a section that holds nothing says nothing
            continue
        found[key] = merged(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return found


def read_extended(
    path: Path, read_one: Callable[[Path], Values], within: tuple[Path, ...] = ()
) -> tuple[Values, list[Path]]:
    """Returns the nested sections of the file ``path``, on top of those of the file that its key ``extends`` names, and
    so on; and the files that were read, ``path`` first.

    The path there is relative to the folder of the file. ``read_one(path)`` returns the sections of a file alone, and
    ``within`` are the files that have led to this one. Raises :class:`UserError` if ``extends`` is no path, or leads in
    a circle.
    """
    if path.resolve() in within:
        raise UserError(f"{path} extends itself, through {within[-1]}")
    values = read_one(path)
    if EXTENDS not in values:
        return values, [path]
    parent = values.pop(EXTENDS)
    if not isinstance(parent, str):
        raise UserError(f"{path}: {EXTENDS} must be the path of a config file, not {in_message(parent)}")
    below, files = read_extended(path.parent / parent, read_one, (*within, path.resolve()))
    return merged(below, values), [path, *files]


def for_algorithm(values: Values, name: str) -> Values:
    """Returns ``values`` with what their section ``for_algorithm`` says for the algorithm ``name`` on top."""
    said = values.get(FOR_ALGORITHM)
    keys = said.get(name) if isinstance(said, Mapping) else None
    # a copy, because what is asked for besides is written into the values
    return merged(values, copy.deepcopy(keys)) if isinstance(keys, Mapping) else values
