"""Samples grouped by user, as in LEAF's json files. Each user becomes a client.

S. Caldas et al.: LEAF: A Benchmark for Federated Settings, 2018. A file holds ``users``, ``num_samples`` and
``user_data``, which maps each user to ``x`` and ``y``. The files are in the folders ``train`` and ``test``, or all in
``all_data``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedray.data.sources.columns import HELD_OUT
from fedray.data.sources.find import Layout, find_files, reading
from fedray.errors import UserError

Encode = Callable[[list[Any], list[Any], str], tuple[np.ndarray, np.ndarray]]
"""A function that turns a user's x and y into arrays ``[n, ...]``. Its third argument is the beginning of messages."""


def last_fifth(samples: Any) -> tuple[Any, Any]:
    """Divides the samples of one user into training and test samples, for data that come without test samples.

    ``samples`` is a list or array. Returns two slices of it: the training samples, and the last fifth, which are the
    test samples. A user with fewer than five samples has no test samples.
    """
    first = len(samples) - len(samples) // HELD_OUT
    return samples[:first], samples[first:]


def fields_by_user(
    train: Mapping[Any, tuple[np.ndarray, np.ndarray]], test: Mapping[Any, tuple[np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    """Joins the samples of all users into the fields of a :class:`Source`, in which each user is a client.

    ``train`` and ``test`` have a pair of arrays (x, y) for each user, by the user's name or number. The result has the
    fields ``x_train``, ``y_train``, ``x_test``, ``y_test``, and ``client_train`` and ``client_test`` (the user of each
    sample).
    """
    fields: dict[str, Any] = {}
    for part, users in (("train", train), ("test", test)):
        fields[f"x_{part}"], fields[f"y_{part}"] = map(np.concatenate, zip(*users.values(), strict=True))
        names = np.array(list(users), dtype=object if any(isinstance(user, str) for user in users) else np.int64)
        fields[f"client_{part}"] = np.repeat(names, [len(y) for _, y in users.values()])
    return fields


def read_leaf(name: str, root: str | None, encode: Encode, more: str = "") -> dict[str, Any]:
    """Reads the json files of a data set of LEAF, and returns the fields of a :class:`Source` by name. Each user is a
    client.

    The fields are those of :func:`fields_by_user`, ``files`` and ``notes``. Users are sorted by name. Raises
    :class:`UserError`, which names file and user, for files that are missing or damaged.

    Args:
        name: the name of the data set in LEAF, such as ``femnist``.
        root: the folder with the files. If it is None, they are looked for on this machine.
        encode: a function ``encode(x, y, where)`` that turns the lists x and y of one user into a pair of arrays
            ``[n, ...]``; ``where`` is the beginning of error messages.
        more: a text that is added to the message about missing files.
    """
    folders = (name, f"{name}/data", ".", "data")
    layouts = [Layout(folders, ("train/*.json", "test/*.json")), Layout(folders, ("all_data/*.json",))]
    wanted = f"the json files that LEAF's data/{name}/preprocess.sh writes (folder data with train and test){more}"
    found = find_files(name, root, layouts, wanted, "https://github.com/TalwalkarLab/leaf")
    notes: tuple[str, ...] = ()
    read = [_read(paths, encode) for paths in found.files]
    if len(read) == 1:
        halves = {user: (last_fifth(x), last_fifth(y)) for user, (x, y) in read[0].items()}
        read = [{user: (x[k], y[k]) for user, (x, y) in halves.items()} for k in (0, 1)]
        notes = ("warning: LEAF's files are not divided into train and test: the last fifth of each user's samples are "
                 "tests",)  # fmt: skip
        if not any(len(y) for _, y in read[1].values()):
            raise UserError(f"no user has {HELD_OUT} samples, so that none is a test sample")
    return {**fields_by_user(*read), "files": found.stamps, "notes": notes}


def _read(paths: list[Path], encode: Encode) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path in paths:
        with reading(path, "json file", ValueError, RecursionError):
            content = json.loads(path.read_bytes())
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
