"""Puts a data set into Ray's object store. Its samples are stored only once, even if many runs of a sweep use them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from fedray.core.structure import map_leaves
from fedray.data.federated import FederatedData
from fedray.data.sources.source import Source
from fedray.data.storage.mapped import received, shipped

SAMPLES = ("x", "y", "x_test", "y_test")
"""The names of the large arrays of a :class:`FederatedData`: the inputs and targets of the training and the
test set."""

_NONE: Any = np.empty(0)

# by the ids of arrays: the reference from which they were fetched, and the arrays, which keep their ids while alive
_fetched: dict[tuple[int, ...], tuple[Any, Any]] = {}


@dataclass(frozen=True)
class StoredData:
    """A partitioned data set (:class:`FederatedData`) in Ray's object store, in a form that is small enough to send to
    actors. ``samples`` is Ray's reference to the large arrays, which all processes of a node share, and ``rest`` is a
    reference to everything else."""

    samples: Any
    rest: Any

    def get(self) -> FederatedData:
        """Returns the data set. Its arrays are read-only views into the object store of this node, or into files on
        this node."""
        rest: FederatedData = ray.get(self.rest)
        arrays = [map_leaves(received, tree) for tree in ray.get(self.samples)]
        return replace(rest, **dict(zip(SAMPLES, arrays, strict=True)))


def store(data: FederatedData) -> StoredData:
    """Puts the data set ``data`` into Ray's object store, so that all processes of a node share its samples, and
    returns references to it. Samples that were themselves read from the object store (:meth:`StoredSource.get`) are not
    stored a second time."""
    arrays = tuple(getattr(data, name) for name in SAMPLES)
    known = _fetched.get(tuple(map(id, arrays)))
    samples = known[0] if known else ray.put(tuple(map_leaves(shipped, tree) for tree in arrays))
    return StoredData(samples, ray.put(replace(data, x=_NONE, y=_NONE, x_test=_NONE, y_test=_NONE)))


@dataclass(frozen=True)
class StoredSource:
    """A data set before it is partitioned among clients (:class:`Source`) in Ray's object store. The trials of a sweep
    share it. ``samples`` is Ray's reference to its samples, and ``rest`` is the source without samples."""

    samples: Any
    rest: Source

    def get(self) -> Source:
        """Returns the source with its samples, which are read-only arrays in the object store of this node. If
        :func:`store` later gets a data set with these arrays, it does not store them again."""
        arrays = tuple(map_leaves(received, tree) for tree in ray.get(self.samples))
        _fetched[tuple(map(id, arrays))] = self.samples, arrays
        x, y, x_test, y_test = arrays
        return replace(self.rest, x_train=x, y_train=y, x_test=x_test, y_test=y_test)


def store_source(source: Source) -> StoredSource:
    """Puts the samples of the data set ``source`` into Ray's object store. Returns the source with a reference in place
    of the samples, which is small enough to send to all trials of a sweep."""
    arrays = (source.x_train, source.y_train, source.x_test, source.y_test)
    samples = ray.put(tuple(map_leaves(shipped, tree) for tree in arrays))
    return StoredSource(samples, replace(source, x_train=_NONE, y_train=_NONE, x_test=_NONE, y_test=_NONE))
