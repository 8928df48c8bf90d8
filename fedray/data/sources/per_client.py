"""Joins lists in which a user hands over a data set, or a pair of arrays (x, y), for each client."""

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
    """The arrays of all clients, joined along their rows: the inputs ``x``, the targets ``y``, and ``clients``, int64
    [n], the number of the client of each sample."""

    x: Any
    y: Any
    clients: np.ndarray


def one_per_client(data: Any, test: Any, label_column: str) -> tuple[Any, Any]:
    """Joins the data of all clients into one set, if a user hands over a list with one element for each client.

    Each element of such a list is a Dataset, or a pair of arrays (x, y). Returns the training set and the test set. A
    list of Datasets becomes a :class:`Joined`, a list of pairs becomes a :class:`Pairs`, and anything else is returned
    unchanged. Raises :class:`UserError` for

    * a list of tables (DataFrames with labels, or Hugging Face Datasets), which the user has to join,
    * a DataLoader, and a list with an element that is neither an array nor a Dataset,
    * two or three elements of which some are arrays and some are Datasets,
    * a list of pairs that may be single samples as well as the data of clients, and
    * a training and a test set that are lists for different numbers of clients.

    Args:
        data, test: the training and the test set, each as the user hands it over.
        label_column: the name of the column with the labels. A list of DataFrames that all have this column is a list
            of tables.
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
    """Returns whether ``data``, a training or test set that a user hands over, is a tuple or list of two or three
    arrays: (x, y) or (x, y, clients).

    A list of two or three pairs is not, because each pair (x, y) is a sample, or the data of one client. But a tuple of
    lists is: those of two samples are no pairs.
    """
    if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
        return False
    return not all(map(_is_pair, data)) or (isinstance(data, tuple) and all(isinstance(each, list) for each in data))


def _check(data: Any, name: str, label_column: str) -> None:
    """Raises :class:`UserError` for a DataLoader, a list of tables, and lists of elements of wrong or mixed types."""
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
    """Returns whether ``one`` is a list of pairs of arrays, one for each client, and not a list of samples.

    ``name`` says which of ``data`` and ``test`` it is. All samples have the same shape, but the arrays of different
    clients seldom have the same number of rows. If they do, the other set decides. Raises :class:`UserError` if that
    set does not decide either.
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
    # a y of one row is more likely one sample's target than all targets of a client
    if rows == 1:
        return False
    raise UserError(
        f"{name}=... is a list of {len(one)} pairs of arrays of equal shapes, which are the samples (x, y) of a data "
        f"set or the data of clients with {rows} samples each: give arrays (x, y) of all samples, or (x, y, client)"
    )


def _are_arrays_of_clients(data: Any) -> bool:
    """Returns whether ``data`` is a list of pairs of arrays (x, y), each with as many rows in x as in y."""
    return _is_list(data) and all(_is_pair(each) and _has_rows(*each) for each in data)


def _has_rows(x: Any, y: Any) -> bool:
    """Returns whether x, an array or several, holds samples, and y holds a target for each of them."""
    shapes = [_shape(each) for each in (y, *leaves(x))]
    return len(shapes) > 1 and len({shape[:1] for shape in shapes}) == 1 and min(map(len, shapes[1:])) > 1


def _joined(pairs: Sequence[Any], name: str) -> Pairs:
    """Joins the arrays of all clients. Raises :class:`UserError` if those of different clients do not fit together.

    ``name`` is what messages call the list of clients.
    """
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
        # pandas matches columns by their names, and keeps categories
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
    """Returns the number of clients in a list that was joined, and None for other data."""
    owners = data.clients if isinstance(data, (Joined, Pairs)) else None
    return None if owners is None else int(owners[-1]) + 1


def _shapes(pair: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(_shape(each) for each in (*leaves(pair[0]), pair[1]))


def _shape(values: Any) -> tuple[int, ...]:
    """Returns the shape of an array or of nested lists, and () for lists of unequal lengths."""
    try:
        return tuple(np.shape(values))
    except ValueError:
        return ()


def _is_list(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and len(data) > 0


def _is_pair(data: Any) -> bool:
    return isinstance(data, (tuple, list)) and len(data) == 2
