"""Describes a data set that is partitioned among clients, in lines for the user (``fedray data info``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedray.core.structure import leaves, map_leaves
from fedray.data.federated import FederatedData
from fedray.data.partitions.holdings import Holdings
from fedray.data.sources.features import form_of

BLOCKS = "▁▂▃▄▅▆▇█"

BINS = 30
"""The largest number of bars in the histogram of the clients' sizes."""


def describe(data: FederatedData, access: str) -> Iterator[str]:
    """Yields the lines about ``data`` that ``fedray data info`` prints: numbers of clients and samples, shapes,
    classes, and how much the clients' classes differ.

    ``access`` says where the samples are: ``memory``, ``mapped`` (memory-mapped files) or ``lazy`` (read one by one).
    """
    sizes = data.sizes()
    held = sizes[sizes > 0]
    empty = f", of {data.clients:,}" if len(held) < data.clients else ""
    yield f"{len(held):,} clients with samples{empty}: {_spread_of(held, 'samples')}"
    yield f"  sizes from {held.min():,} to {held.max():,}: {histogram(held)}"
    public = f", public {len(data.public):,}" if len(data.public) else ""
    validation = f", validation {len(data.validation):,}" if len(data.validation) else ""
    yield f"training samples {len(data.indices):,}, test samples {len(data.y_test):,}{public}{validation}"
    size = sum(leaf[0].nbytes for leaf in leaves(form_of(data.x))) * (len(data.x_test) + len(data.y)) / 1e9
    total = f"{size:.3g} GB" if size >= 0.1 else f"{1000 * size:.3g} MB"
    yield f"inputs {_shapes(data.x)}; {total} in all (data.access={access})"
    yield f"targets {list(data.y.shape[1:]) or 'one'} a sample ({data.y.dtype}), task.kind={data.task}"
    if data.task == "classification":
        yield from _about_classes(data)
    yield f"partition {data.partition_hash[:16]}"


def _about_classes(data: FederatedData) -> Iterator[str]:
    counts = Holdings.of(data).counts
    counts = counts[counts.sum(axis=1) > 0]
    yield f"{data.classes:,} classes: {_spread_of(counts.sum(axis=0), 'training samples')}"
    yield f"  classes of a client: {_spread_of((counts > 0).sum(axis=1), 'of them')}"
    yield (
        f"label skew {label_skew(counts):.3f}: the mean distance (total variation) between the classes of a client and "
        "those of all clients together; 0 is no skew"
    )


def label_skew(counts: np.ndarray) -> float:
    """Returns a measure of label skew: how far, on average, a client's class distribution is from that of all clients
    together.

    ``counts [N, classes]`` has the number of samples of each client and class; every client must have samples. The
    distance is the total variation, half the sum of the absolute differences between the classes' shares: 0 if they are
    equal, and 1 - s if a client has a single class, which has the share s of all samples. The mean is weighted by the
    clients' numbers of samples.
    """
    sizes = counts.sum(axis=1)
    distances = 0.5 * np.abs(counts / sizes[:, None] - counts.sum(axis=0) / sizes.sum()).sum(axis=1)
    return float((distances * sizes).sum() / sizes.sum())


def _spread_of(values: np.ndarray, what: str) -> str:
    low, median, high = int(values.min()), int(np.median(values)), int(values.max())
    return f"{low:,} {what} each" if low == high else f"{low:,} to {high:,} {what}, median {median:,}"


def histogram(values: np.ndarray) -> str:
    """Returns a histogram of the whole numbers ``values`` as a line of text, such as ``▂▅█▃ ▁``.

    Each character is a bar, which shows how many values lie in its range; a bar without values is a space. The ranges
    have equal widths, from the smallest value to the largest.
    """
    few = math.ceil(2 * math.sqrt(len(values)))
    counts, _ = np.histogram(values, bins=min(BINS, few, max(1, int(values.max() - values.min()))))
    top = max(1, counts.max())
    return "".join(" " if not count else BLOCKS[min(7, int(8 * count / top))] for count in counts)


def _shapes(x: Any) -> str:
    shapes = map_leaves(lambda leaf: f"{list(leaf.shape[1:])} {leaf.dtype}", form_of(x))
    return shapes if isinstance(shapes, str) else str(shapes).replace("'", "")
