"""The json files of LEAF, in which samples lie by user.

S. Caldas et al.: LEAF: A Benchmark for Federated Settings, 2018. A file holds ``users``, ``num_samples`` and
``user_data``, which maps each user to ``x`` and ``y``. Files lie in ``train`` and ``test``, or all in ``all_data``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedray.data.sources.find import file_stamp
from fedray.errors import UserError, first_sentence

LEAF = "https://github.com/TalwalkarLab/leaf"

HELD_OUT = 5
"""Without files of tests, the last of so many parts of each user's samples are tests."""

Encode = Callable[[list[Any], list[Any], str], tuple[np.ndarray, np.ndarray]]
"""A function that makes arrays ``[n, ...]`` of a user's x and y; its third argument begins messages."""


class LeafSets(NamedTuple):
    """Inputs, targets and users ``[n]`` of the training and the test samples, the stamps of the files, and lines for
    the user."""

    train: tuple[np.ndarray, np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray, np.ndarray]
    files: tuple[Any, ...]
    notes: tuple[str, ...]


def leaf_files(place: Path) -> dict[str, list[Path]]:
    """Returns the json files below ``place`` or ``place/data``, by the folder they lie in: ``train`` and ``test``, or
    else ``all_data``.

    Raises :class:`UserError` if there are none.
    """
    for folder in (place, place / "data"):
        found = {part: sorted((folder / part).glob("*.json")) for part in ("train", "test", "all_data")}
        if found["train"] and found["test"]:
            return {part: found[part] for part in ("train", "test")}
        if found["all_data"]:
            return {"all_data": found["all_data"]}
    raise UserError(f"data.root={place} has no json files in train and test, nor in all_data")


def read_leaf(files: dict[str, list[Path]], encode: Encode) -> LeafSets:
    """Reads the json files that :func:`leaf_files` found. Users are in the order of their names.

    Raises :class:`UserError`, which names file and user, for whatever is damaged.
    """
    stamps = tuple(file_stamp(path) for paths in files.values() for path in paths)
    read = {part: _read(paths, encode) for part, paths in files.items()}
    if "all_data" not in read:
        return LeafSets(_joined(read["train"]), _joined(read["test"]), stamps, ())
    train, test = {}, {}
    for user, (x, y) in read["all_data"].items():
        first = len(y) - len(y) // HELD_OUT
        train[user], test[user] = (x[:first], y[:first]), (x[first:], y[first:])
    if not any(len(y) for _, y in test.values()):
        raise UserError(f"no user has {HELD_OUT} samples, so that none is a test sample")
    note = "warning: LEAF's files are not divided into train and test: the last fifth of each user's samples are tests"
    return LeafSets(_joined(train), _joined(test), stamps, (note,))


def _joined(users: dict[str, tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = (np.concatenate([arrays[k] for arrays in users.values()]) for k in (0, 1))
    names = np.array(list(users), dtype=object)
    return x, y, np.repeat(names, [len(arrays[1]) for arrays in users.values()])


def _read(paths: list[Path], encode: Encode) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is damaged or no json ({first_sentence(error)}); get the file again") from None
        if not isinstance(content, dict) or not isinstance(content.get("user_data"), dict):
            raise UserError(f"{path} lacks user_data: it is no file of LEAF")
        for user, samples in content["user_data"].items():
            where = f"{path}: user {user!r}"
            x, y = (samples.get(key) if isinstance(samples, dict) else None for key in ("x", "y"))
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                raise UserError(f"{where} must have lists x and y of equal lengths")
            if user in found:
                raise UserError(f"{where} is in the files twice")
            if x:
                found[user] = encode(x, y, where)
    if not found:
        raise UserError(f"{paths[0].parent} has no samples")
    return dict(sorted(found.items()))
