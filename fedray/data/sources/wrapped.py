"""Data sets that consist of others: torch's Subset and ConcatDataset, and a list of data sets, one for each client.

What a Dataset says of its items (:func:`list_of`), of its content (:func:`mark_of`) and of its code
(:func:`classes_of`) is looked for in the data sets within it, too.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedray.data.sources.features import as_array
from fedray.errors import UserError


class Joined:
    """Several data sets, one after the other, as one Dataset. Each is what one client holds: ``clients`` says whose
    each item is."""

    def __init__(self, datasets: Sequence[Any], name: str) -> None:
        self.datasets = list(datasets)
        sizes = np.array([len(each) for each in self.datasets], dtype=np.int64)
        if not sizes.all():
            raise UserError(f"{name}[{int(np.argmin(sizes))}] is an empty data set")
        for place, each in enumerate(self.datasets):
            if list_of(each, "clients", name) is not None:
                raise UserError(
                    f"{name}[{place}] lists clients, but in a list each data set is one client: join them by "
                    "torch's ConcatDataset"
                )
        self.ends = np.cumsum(sizes)
        self.clients = np.repeat(np.arange(len(sizes)), sizes)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, i: int) -> Any:
        place = int(self.clients[i])
        return self.datasets[place][i - int(self.ends[place] - len(self.datasets[place]))]


def is_dataset(data: Any) -> bool:
    """Returns whether ``data`` has items, and is neither an array nor a list of Python's."""
    if isinstance(data, (Sequence, Mapping, np.ndarray)) or hasattr(data, "__array__"):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def is_loader(data: Any) -> bool:
    """Returns whether ``data`` is a DataLoader of torch, which gives mini-batches in place of items."""
    return _is(data, "DataLoader")


def list_of(dataset: Any, attribute: str, name: str) -> Any:
    """Returns what a Dataset, or else the data sets within it, list of each item in ``attribute``; None if they do not.

    ``name`` stands for the Dataset in messages. Raises :class:`UserError` if some of the data sets that are joined in
    it list the attribute ``clients``, and others do not.
    """
    listed = getattr(dataset, attribute, None)
    if listed is not None:
        return listed
    parts = _parts(dataset)
    found = [list_of(part, attribute, name) for part in parts]
    if not parts or any(each is None for each in found):
        if attribute == "clients" and any(each is not None for each in found):
            raise UserError(f"some of the data sets that are joined in {name} have clients, and others have none")
        return None
    arrays = [as_array(name, attribute, each) for each in found]
    # an attribute of that name may be something else, such as a method
    if any(array.shape[:1] != (len(part),) for array, part in zip(arrays, parts, strict=True)):
        return None
    return arrays[0][np.asarray(dataset.indices)] if _is_subset(dataset) else np.concatenate(arrays)


def classes_of(dataset: Any) -> list[type]:
    """Returns the class of a Dataset, and those of the data sets within it."""
    inner = [cls for part in _parts(dataset) for cls in classes_of(part)]
    return list(dict.fromkeys([type(dataset), *inner]))


def mark_of(dataset: Any, methods: Sequence[str]) -> str | None:
    """Returns the text by which a Dataset tells that its items have changed: what the first of ``methods`` that it has
    returns, or else those of all data sets within it; None if there are none."""
    for name in methods:
        method = getattr(dataset, name, None)
        if callable(method):
            return str(method())
    marks = [mark_of(part, methods) for part in _parts(dataset)]
    if not marks or None in marks:
        return None
    chosen = np.asarray(dataset.indices, dtype=np.int64).tobytes() if _is_subset(dataset) else b""
    return f"{marks} {hashlib.sha256(chosen).hexdigest()}"


def _parts(dataset: Any) -> list[Any]:
    if _is_subset(dataset):
        return [dataset.dataset]
    return list(dataset.datasets) if isinstance(dataset, Joined) or _is(dataset, "ConcatDataset") else []


def _is_subset(dataset: Any) -> bool:
    return _is(dataset, "Subset")


def _is(dataset: Any, name: str) -> bool:
    """Returns whether ``dataset`` is of the class ``name`` of torch, which whoever has one has imported."""
    kind = getattr(sys.modules.get("torch.utils.data"), name, None)
    return isinstance(kind, type) and isinstance(dataset, kind)
