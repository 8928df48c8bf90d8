"""A data set in Ray's object store: its samples once, however many runs of a sweep use them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from fedray.data.federated import FederatedData
from fedray.data.source import Source

SAMPLES = ("x", "y", "x_test", "y_test")
"""The large arrays of a :class:`FederatedData`."""

_NONE: Any = np.empty(0)

# by the arrays' ids: the reference that they came from, and the arrays, so that the ids stay theirs
_fetched: dict[tuple[int, ...], tuple[Any, Any]] = {}


@dataclass(frozen=True)
class StoredData:
    """``rest`` refers to a :class:`FederatedData` without its samples, ``samples`` to those."""

    samples: Any
    rest: Any

    def get(self) -> FederatedData:
        """The data; the arrays are read-only views into the store of this node."""
        rest: FederatedData = ray.get(self.rest)
        return replace(rest, **dict(zip(SAMPLES, ray.get(self.samples), strict=True)))


def store(data: FederatedData) -> StoredData:
    """Put ``data`` into the store; samples that came out of it are there already."""
    arrays = tuple(getattr(data, name) for name in SAMPLES)
    known = _fetched.get(tuple(map(id, arrays)))
    samples = known[0] if known else ray.put(arrays)
    return StoredData(samples, ray.put(replace(data, x=_NONE, y=_NONE, x_test=_NONE, y_test=_NONE)))


@dataclass(frozen=True)
class StoredSource:
    """``rest`` is a :class:`Source` without its samples, ``samples`` refers to those."""

    samples: Any
    rest: Source

    def get(self) -> Source:
        """The source; what :func:`store` puts into the store of it is nothing new."""
        arrays = ray.get(self.samples)
        _fetched[tuple(map(id, arrays))] = self.samples, arrays
        x, y, x_test, y_test = arrays
        return replace(self.rest, x_train=x, y_train=y, x_test=x_test, y_test=y_test)


def store_source(source: Source) -> StoredSource:
    """Put the samples of ``source`` into the store."""
    samples = ray.put((source.x_train, source.y_train, source.x_test, source.y_test))
    return StoredSource(samples, replace(source, x_train=_NONE, y_train=_NONE, x_test=_NONE, y_test=_NONE))
