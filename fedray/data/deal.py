"""What the partitioners share: dealing out samples by counts, rounding shares, and draws that may overlap."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

Split = list[np.ndarray]
"""One sorted int64 index array per client."""


def class_pools(labels: np.ndarray, classes: int) -> Split:
    """The sorted indices of each class 0..classes-1."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=classes))[:-1])


def by_owner(owner: np.ndarray, clients: int) -> Split:
    """The split in which sample j belongs to client ``owner[j]``, or to nobody if that is negative."""
    # a stable sort leaves each client's indices in order
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner, np.arange(clients + 1), sorter=order)
    return [order[start:end] for start, end in pairwise(ends)]


def deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> Split:
    """Client i gets ``counts[i, c]`` random samples of class c; counts is [clients, classes], within the supply."""
    owner = np.full(len(labels), -1)
    for c, pool in enumerate(class_pools(labels, counts.shape[1])):
        shuffled = rng.permutation(pool)
        owner[shuffled[: counts[:, c].sum()]] = np.repeat(np.arange(len(counts)), counts[:, c])
    return by_owner(owner, len(counts))


def largest_remainder(quotas: np.ndarray, totals: np.ndarray | int) -> np.ndarray:
    """Whole numbers int64 [..., k] near ``quotas`` [..., k] whose last axis sums to ``totals`` [...] (Hamilton's
    method): quotas rounded down, and the rest to the largest remainders, the first ones in a tie."""
    floors = np.floor(quotas).astype(np.int64)
    order = np.argsort(floors - quotas, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1)
    return floors + (rank < np.expand_dims(totals - floors.sum(axis=-1), -1))


def draw_each(pool: np.ndarray, clients: int, samples: int, rng: np.random.Generator) -> Split:
    """``samples`` of ``pool`` for each client: without replacement within a client, but clients may overlap."""
    return [np.sort(pool[rng.choice(len(pool), samples, replace=False, shuffle=False)]) for _ in range(clients)]


def indices_and_offsets(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """(indices, offsets) of a split, int64: client i's are ``indices[offsets[i]:offsets[i + 1]]``."""
    offsets = np.cumsum([0, *map(len, split)], dtype=np.int64)
    return np.concatenate([np.empty(0, np.int64), *split]), offsets
