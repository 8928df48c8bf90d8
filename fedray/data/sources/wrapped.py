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
    """A list of Datasets, one for each client, joined into one Dataset. The attribute ``clients`` (int64) has the
    client of each item."""

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
    """Returns whether ``data``, which a user hands over, is a Dataset such as torch's: an object with a length
    and indices.

    Arrays, Python sequences and dicts are not, although they have a length and indices, too.
    """
    if isinstance(data, (Sequence, Mapping, np.ndarray)) or hasattr(data, "__array__"):
        return False
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def is_loader(data: Any) -> bool:
    """Returns whether ``data`` is a torch DataLoader, which fedray can't use because it yields mini-batches instead
    of items."""
    return _is(data, "DataLoader")


def list_of(dataset: Any, attribute: str, name: str) -> Any:
    """Returns the values that a Dataset lists for all items in ``attribute``, such as ``targets``, so that items need
    not be read.

    If the Dataset has no such list, but contains other Datasets (as torch's Subset and ConcatDataset do), the values
    are taken from their lists. Returns None if it contains none, or if one of those has no list, either. But if only
    some of them list ``clients``, :class:`UserError` is raised. ``name`` is what messages call the Dataset.
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
    """Returns the Python types of a Dataset and of the Datasets within it, each once."""
    inner = [cls for part in _parts(dataset) for cls in classes_of(part)]
    return list(dict.fromkeys([type(dataset), *inner]))


def mark_of(dataset: Any, methods: Sequence[str]) -> str | None:
    """Returns a text that changes when the items of a Dataset change, as far as the Dataset can tell.

    It is the result of the first of ``methods``, such as ``digest``, that the Dataset has. If it has none, the texts
    of all Datasets within it are combined. Returns None if there is nothing to combine, or if one of these Datasets
    has no text.
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
