"""Decides where the samples of a run are read from (``data.access``): memory, memory-mapped files, or a Dataset, item
by item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedray.core.structure import leaves, map_leaves
from fedray.data.federated import FederatedData
from fedray.data.storage.lazy import LazyItems, memory_of_machine
from fedray.data.storage.mapped import is_mapped
from fedray.data.storage.mapping import folder_of, map_arrays
from fedray.errors import UserError

MapAll = Callable[[dict[str, Any], Path], dict[str, Any]]
"""A function that maps arrays from the files of a folder, which it first writes if they do not exist
(:func:`fedray.data.storage.mapping.map_arrays`)."""

LARGE = 0.5
"""The fraction of a machine's memory above which ``data.access: auto`` maps samples from files."""


def arrays_of(data: FederatedData) -> dict[str, Any]:
    """Returns those arrays of a data set that ``data.access`` may move to memory-mapped files. They are the inputs and
    targets: a dict with the keys ``x`` and ``y`` (training samples), ``x_test`` and ``y_test``."""
    return {name: getattr(data, name) for name in ("x", "y", "x_test", "y_test")}


def with_access(
    data: FederatedData, asked: str, key: Callable[[], str], map_all: MapAll = map_arrays
) -> tuple[FederatedData, str, tuple[str, ...]]:
    """Moves the samples of a run to where ``data.access`` says: into memory, or into files that are mapped into memory.

    Returns three things: ``data`` with its samples moved; where they are now (``memory``, ``mapped``, or ``lazy`` for
    samples that are still read one by one); and lines to show to the user.

    Args:
        data: the data set, with samples in memory or in mapped files, or samples that are read one by one.
        asked: the value of ``data.access``: ``memory``, ``mapped``, ``lazy`` or ``auto``. ``auto`` moves only arrays
            that take more than a fraction :data:`LARGE` of the machine's memory, which become mapped files.
        key: ``key()`` returns a digest of the samples, after which the folder of their files is named.
        map_all: ``map_all(arrays, folder)`` maps the arrays from files in ``folder``, which it writes if necessary.

    Raises:
        UserError: samples can't be read or written, or ``lazy`` is asked for samples that are in arrays.
    """
    arrays = arrays_of(data)
    lazy = any(isinstance(tree, LazyItems) for tree in arrays.values())
    if lazy and asked in ("auto", "lazy"):
        return data, "lazy", (f"data.access=lazy: {len(data.x):,} items are read when they are used",)
    if asked == "lazy":
        raise UserError(
            "data.access=lazy is for a torch Dataset, data.source=hf or a source of image files; use mapped or memory"
        )
    every = [] if lazy else [leaf for tree in arrays.values() for leaf in leaves(tree)]
    mapped = bool(every) and all(map(is_mapped, every))
    is_large = sum(leaf.nbytes for leaf in every) > LARGE * memory_of_machine()
    if not mapped and (lazy or asked == "mapped" or (asked == "auto" and is_large)):
        data, mapped = replace(data, **map_all(arrays, folder_of(key()))), True
    if mapped and asked == "memory":
        data = replace(data, **{name: map_leaves(np.array, getattr(data, name)) for name in arrays})
    if not mapped or asked == "memory":
        line = (
            f"data.access=memory: {len(data.y):,} items were read into files of the cache, and from there into memory"
        )
        return data, "memory", (line,) if lazy else ()
    size = sum(leaf.nbytes for name in arrays for leaf in leaves(getattr(data, name))) / 1e9
    return data, "mapped", (f"data.access=mapped: {size:.3g} GB of samples are read from files",)
