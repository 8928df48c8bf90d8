"""Data sets that contain others: torch's Subset and ConcatDataset, and a list of data sets, one for each client.

Facts about the items (:func:`list_of`), the content (:func:`mark_of`) and the code (:func:`classes_of`) of a Dataset
are also looked for in the data sets within it.
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
    """A user's list of Datasets, one for each client, joined into one Dataset.

    ``clients``, int64 [n], has the number of the client of each item. Error messages call the list ``name``. Raises
    :class:`UserError` if one of the Datasets is empty, or has an attribute ``clients`` itself.
    """

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
    """Returns whether an object that a user hands over is a Dataset such as torch's, which has a length and indices.

    Arrays, Python sequences and dicts are not Datasets, although they have a length and indices, too.
    """
    if isinstance(data, (Sequence, Mapping, np.ndarray)) or hasattr(data, "__array__"):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def is_loader(data: Any) -> bool:
    """Returns whether an object is a torch DataLoader, which fedray can't use because it yields mini-batches, not
    items."""
    return _is(data, "DataLoader")


def list_of(dataset: Any, attribute: str, name: str) -> Any:
    """Looks for a list of values for all items of a Dataset, such as their targets, so that no item has to be read.

    The list is the Dataset's attribute ``attribute``, such as ``targets``. If the Dataset has no such attribute, but
    contains other Datasets (as torch's Subset and ConcatDataset do), their lists are combined. Returns None if there is
    no list, or not for all items. But if only some of the inner Datasets list ``clients``, :class:`UserError` is
    raised. Error messages call the Dataset ``name``.
    """
    listed = getattr(dataset, attribute, None)
    # an attribute of that name may be something else, such as a method
    if hasattr(listed, "__len__"):
        return listed
    parts = _parts(dataset)
    found = [list_of(part, attribute, name) for part in parts]
    if not parts or any(each is None for each in found):
        if attribute == "clients" and any(each is not None for each in found):
            raise UserError(f"some of the data sets that are joined in {name} have clients, and others have none")
        return None
    arrays = [as_array(name, attribute, each) for each in found]
    if any(array.shape[:1] != (len(part),) for array, part in zip(arrays, parts, strict=True)):
        return None
    return arrays[0][np.asarray(dataset.indices)] if _is_subset(dataset) else np.concatenate(arrays)


def classes_of(dataset: Any) -> list[type]:
    """Returns the Python types of a Dataset and of those that it contains (as torch's Subset does), each once. A user
    may have written these classes, so their code is sent to other processes and hashed."""
    inner = [cls for part in _parts(dataset) for cls in classes_of(part)]
    return list(dict.fromkeys([type(dataset), *inner]))


def mark_of(dataset: Any, methods: Sequence[str]) -> str | None:
    """Returns a text that changes when the items of a Dataset change, as far as its own methods can tell.

    It is the result of the first of ``methods``, such as ``digest``, that the Dataset has. If it has none, but contains
    other Datasets (as torch's Subset does), their texts are combined. Returns None if there is no text, or if one of
    these Datasets has none.
    """
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
    """Returns whether ``dataset`` is of torch's class ``name``. If torch has not been imported, it can't be."""
    kind = getattr(sys.modules.get("torch.utils.data"), name, None)
    return isinstance(kind, type) and isinstance(dataset, kind)
