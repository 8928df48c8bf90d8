"""Lists of what each client holds: data sets, or pairs of arrays (x, y)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedray.core.structure import leaves, map_leaves, outline
from fedray.data.sources.features import as_array
from fedray.data.sources.hf_items import is_table
from fedray.data.sources.wrapped import Joined, is_dataset, is_loader
from fedray.errors import UserError


class Pairs(NamedTuple):
    """The arrays of all clients, one after the other, and whose each sample is."""

    x: Any
    y: Any
    clients: np.ndarray


def one_per_client(data: Any, test: Any, label_column: str) -> tuple[Any, Any]:
    """Returns ``data`` and ``test``, each list of data sets or of pairs of arrays, one for each client, as one.

    Whatever else they are, they are returned as they are. Raises :class:`UserError` for a list of tables, of which
    there must be one; for what is neither an array nor a data set, such as a DataLoader, and for a Dataset among
    arrays; for pairs of arrays that may also be samples; and for lists of unequally many clients.
    """
    both = [data, test]
    for place, name in enumerate(("data", "test")):
        _check(both[place], name, label_column)
        if _is_list(both[place]) and all(map(is_dataset, both[place])):
            both[place] = Joined(both[place], name)
    found = [
        _joined(each, name) if _is_of_clients(each, name, data, test) else each
        for each, name in zip(both, ("data", "test"), strict=True)
    ]
    counts = [_clients(each) for each in found]
    if None not in counts and counts[0] != counts[1]:
        raise UserError(
            f"data=... is a list of {counts[0]} data sets, one for each client, and test=... one of {counts[1]}: give "
            "those of each client, or one data set for all"
        )
    return found[0], found[1]


def is_arrays(data: Any) -> bool:
    """Returns whether ``data`` consists of x, y and perhaps clients, and is not a short list of items (x, y)."""
    return isinstance(data, (tuple, list)) and len(data) in (2, 3) and not all(map(_is_pair, data))


def _check(data: Any, name: str, label_column: str) -> None:
    """Raises :class:`UserError` for lists that are none of data sets, arrays or items, and for a DataLoader."""
    parts = list(data) if _is_list(data) else []
    for shown, each in [(f"{name}=...", data), *((f"{name}[{place}]", each) for place, each in enumerate(parts))]:
        if is_loader(each):
            raise UserError(
                f"{shown} is a DataLoader, but fedray makes the mini-batches (train.batch_size): give its .dataset"
            )
    tables = [is_table(each) for each in parts]
    if any(tables) or (parts and all(isinstance(each, pd.DataFrame) and label_column in each for each in parts)):
        how = "datasets.concatenate_datasets" if any(tables) else "pandas.concat"
        raise UserError(
            f"{name}=... is a list of tables; join them by {how}, with a column that says whose each row is "
            "(client_column)"
        )
    datasets = [each for each in parts if is_dataset(each)]
    for place, each in enumerate(parts):
        is_array = isinstance(each, (Sequence, Mapping)) or hasattr(each, "__array__")
        if not (is_array or is_dataset(each) or each is None):
            raise UserError(
                f"{name}[{place}] is {type(each).__name__}: give arrays (x, y) or (x, y, client), a Dataset with len "
                "and indices, or a list of either, one for each client"
            )
    if 0 < len(datasets) < len(parts) and is_arrays(data):
        raise UserError(
            f"{name}=... holds a data set ({type(datasets[0]).__name__}) among arrays; give arrays (x, y) or (x, y, "
            "client), a Dataset, or a list of Datasets, one for each client"
        )


def _is_of_clients(one: Any, name: str, data: Any, test: Any) -> bool:
    """Returns whether ``one``, the ``name`` of ``data`` and ``test``, is a list of pairs of arrays, one for each
    client, and not of samples whose targets are arrays.

    Samples all have one shape, and the arrays of clients seldom equally many rows. If they do, the test set tells.
    """
    if not _are_arrays_of_clients(one):
        return False
    other = test if name == "data" else data
    shapes = {_shapes(pair) for pair in one}
    if is_arrays(other):
        # a sample has one axis less than the array that it is in
        return [_shape(leaf)[1:] for leaf in leaves(other[0])] != [_shape(leaf) for leaf in leaves(one[0][0])]
    if _are_arrays_of_clients(other):
        shapes |= {_shapes(pair) for pair in other}
        if len(shapes) == 1 and len(other) != len(one):
            return False
    if len(shapes) > 1:
        return True
    rows = len(one[0][1])
    # one row is a target in an array rather than all that each of the clients has
    if rows == 1:
        return False
    raise UserError(
        f"{name}=... is a list of {len(one)} pairs of arrays of equal shapes, which are the samples (x, y) of a data "
        f"set or the data of clients with {rows} samples each: give arrays (x, y) of all samples, or (x, y, client)"
    )


def _are_arrays_of_clients(data: Any) -> bool:
    """Returns whether ``data`` is a list of pairs, in each of which x and y have equally many rows."""
    return _is_list(data) and all(_is_pair(each) and _has_rows(*each) for each in data)


def _has_rows(x: Any, y: Any) -> bool:
    """Returns whether x is an array of samples, or several of them, and y has a target for each."""
    shapes = [_shape(each) for each in (y, *leaves(x))]
    return len(shapes) > 1 and len({shape[:1] for shape in shapes}) == 1 and min(map(len, shapes[1:])) > 1


def _joined(pairs: Sequence[Any], name: str) -> Pairs:
    """Returns the arrays of all clients as one. Raises :class:`UserError` if they do not fit together."""
    for place, (x, y) in enumerate(pairs):
        if not len(y):
            raise UserError(f"{name}[{place}] is an empty data set")
        if outline(x) != outline(pairs[0][0]):
            raise UserError(f"x of {name}[{place}] is {outline(x)}, that of {name}[0] {outline(pairs[0][0])}")
    x = map_leaves(lambda *parts: _concatenated(parts, name, "x"), *(pair[0] for pair in pairs))
    y = _concatenated([pair[1] for pair in pairs], name, "y")
    return Pairs(x, y, np.repeat(np.arange(len(pairs)), [len(pair[1]) for pair in pairs]))


def _concatenated(parts: Sequence[Any], name: str, what: str) -> Any:
    if all(isinstance(part, (pd.DataFrame, pd.Series)) for part in parts):
        # which tells columns by their names, and keeps categories
        return pd.concat(parts, ignore_index=True)
    arrays = [as_array(name, f"{what} of {name}[{place}]", part) for place, part in enumerate(parts)]
    first = arrays[0]
    for place, array in enumerate(arrays):
        if array.shape[1:] != first.shape[1:]:
            raise UserError(
                f"samples of {what} of {name}[{place}] have shape {list(array.shape[1:])}, those of {name}[0] "
                f"{list(first.shape[1:])}"
            )
        if array.dtype != first.dtype and {array.dtype.kind, first.dtype.kind} != {"U"}:
            raise UserError(
                f"{what} of {name}[{place}] is {array.dtype}, that of {name}[0] {first.dtype}; make them alike"
            )
    return np.concatenate(arrays)


def _clients(data: Any) -> int | None:
    """Returns how many clients a list was of; None for what was no such list."""
    owners = data.clients if isinstance(data, (Joined, Pairs)) else None
    return None if owners is None else int(owners[-1]) + 1


def _shapes(pair: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(_shape(each) for each in (*leaves(pair[0]), pair[1]))


def _shape(values: Any) -> tuple[int, ...]:
    """Returns the shape of an array, or of lists in lists; of lists of unequal lengths, that there is none."""
    try:
        return tuple(np.shape(values))
    except ValueError:
        return ()


def _is_list(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and len(data) > 0


def _is_pair(data: Any) -> bool:
    return isinstance(data, (tuple, list)) and len(data) == 2
