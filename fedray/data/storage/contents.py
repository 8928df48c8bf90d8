"""Digests of a data set. They show whether the results in a run's folder were made from other data.

Samples are hashed in memory, at 1.8 GB a second (SHA-256, measured). If a source was read from files, the digests are
kept in a cache under the files' sizes and times, so that samples are hashed only once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedray.core.structure import leaves, outline
from fedray.data.federated import FederatedData, array_digest
from fedray.data.sources.source import Source
from fedray.data.storage.cache import remembered
from fedray.data.storage.lazy import LazyItems

PARTS = {
    "training data": ("x_train", "y_train"),
    "test data": ("x_test", "y_test"),
    "public data": ("x_public", "y_public"),
    "client assignment": ("client_train", "client_test"),
}
"""The arrays of a source, grouped under the names that messages use for them."""


def data_digests(source: Source, data: FederatedData) -> dict[str, str]:
    """Returns digests of the parts of a data set, which show whether two runs used the same data: a dict that maps the
    name of each part to a sha256 in hexadecimal digits.

    ``source`` is the data set as it was read, and ``data`` is the same data set after it was partitioned among clients.
    The parts are ``training data``, ``test data``, ``normalisation`` (how the inputs are scaled) and ``partition``
    (which samples each client, the public set and the validation set have); and, where they exist, ``public data``,
    ``client assignment`` (the client that the source names for each sample) and ``names of classes and clients``.
    """
    found = source_digests(source)
    found["normalisation"] = _digest(source.scale, source.shift)
    if source.class_names is not None or source.client_names is not None:
        names = json.dumps([source.class_names, source.client_names])
        found["names of classes and clients"] = hashlib.sha256(names.encode()).hexdigest()
    found["partition"] = array_digest(data.indices, data.offsets, data.public, data.validation)
    return found


def source_digests(source: Source) -> dict[str, str]:
    """Returns the digests of a source's arrays, by the names of :data:`PARTS`. Those of files are hashed only once."""
    if not source.files:
        return of_arrays(source)
    # the arrays that are made of the same files depend on what was asked for
    read = [source.name, source.files, source.task, source.choices]
    return remembered(read, lambda: of_arrays(source))


def content_key(digests: Mapping[str, str], data: FederatedData) -> str:
    """Returns a digest of the samples in ``data`` (32 hexadecimal digits), after which the folder of memory-mapped
    files with these samples is named.

    ``digests`` are those of the source of ``data`` (:func:`data_digests`). Raises :class:`UserError` if samples are
    read one by one from a Dataset that can't tell whether they have changed (:meth:`LazyItems.stamp`).
    """
    parts = {name: digests[name] for name in PARTS if name in digests and name != "client assignment"}
    # the samples of a public set are in ``data`` only if it is used
    stamps = [tree.stamp() for tree in (data.x, data.x_test) if isinstance(tree, LazyItems)]
    return hashlib.sha256(json.dumps([parts, stamps, len(data.y), len(data.y_test)]).encode()).hexdigest()[:32]


def of_arrays(source: Source) -> dict[str, str]:
    """Returns the digests of a source's arrays as they are, by the names of :data:`PARTS`."""
    return {
        part: _digest(*(getattr(source, name) for name in names))
        for part, names in PARTS.items()
        if any(getattr(source, name) is not None for name in names)
    }


def _digest(*trees: Any) -> str:
    """Returns one sha256, as hexadecimal digits, of ``trees``: arrays, tuples and dicts of arrays, or items read one
    by one."""
    if any(isinstance(tree, LazyItems) for tree in trees):
        parts = [tree.digest() if isinstance(tree, LazyItems) else array_digest(tree) for tree in trees]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    outlines = [outline(tree) for tree in trees]
    if any(each != outline(None) for each in outlines):
        return hashlib.sha256(
            json.dumps([outlines, [array_digest(*leaves(tree)) for tree in trees]]).encode()
        ).hexdigest()
    return array_digest(*trees)
