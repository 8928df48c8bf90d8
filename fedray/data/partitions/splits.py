"""Helpers of several partitioners: they partition samples by given numbers of samples, round such numbers, and draw
samples that clients may share."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

Split = list[np.ndarray]
"""The sorted indices of each client's samples, as int64 arrays."""


def class_pools(labels: np.ndarray, classes: int) -> Split:
    """Returns the sorted indices of the samples of each class: a list with an int64 array for each class 0..classes-1.

    ``labels`` int64 [n] has the class of each sample.
    """
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=classes))[:-1])


def by_owner(owner: np.ndarray, clients: int) -> Split:
    """Returns the samples of each client: a list with a sorted int64 array of sample indices for each client.

    ``owner`` int64 [n] has the client of each of n samples, a number below ``clients``. Samples with a negative number
    belong to no client.
    """
    # a stable sort leaves each client's indices in order
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner, np.arange(clients + 1), sorter=order)
    return [order[start:end] for start, end in pairwise(ends)]


def partition_by_counts(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> Split:
    """Partitions samples at random, with given numbers of samples per client and class.

    Client i gets ``counts[i, c]`` samples of class c, and no two clients get the same sample. ``labels`` int64 [n] has
    the class of each sample, and ``counts`` is int64 [clients, classes]. No column of ``counts`` may have a larger sum
    than the class has samples. Returns the sorted indices of each client's samples.
    """
    owner = np.full(len(labels), -1)
    for c, pool in enumerate(class_pools(labels, counts.shape[1])):
        shuffled = rng.permutation(pool)
        owner[shuffled[: counts[:, c].sum()]] = np.repeat(np.arange(len(counts)), counts[:, c])
    return by_owner(owner, len(counts))


def largest_remainder(quotas: np.ndarray, totals: np.ndarray | int) -> np.ndarray:
    """Rounds ``quotas`` [..., k] to whole numbers, int64 [..., k], so that they sum to ``totals`` [...] along the
    last axis.

    This is Hamilton's method: every quota is rounded down, and then the quotas with the largest remainders are raised
    by one until the sum is right. In a tie the first ones are raised. Quotas 1.5, 1.5, 2.0 with total 5 become 2, 1, 2.
    """
    floors = np.floor(quotas).astype(np.int64)
    order = np.argsort(floors - quotas, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1)
    rounded: np.ndarray = floors + (rank < np.expand_dims(totals - floors.sum(axis=-1), -1))
    return rounded


def draw_each(pool: np.ndarray, clients: int, samples: int, rng: np.random.Generator) -> Split:
    """Draws sample indices for each client from the same array ``pool``. Within a client there are no repetitions, but
    different clients may draw the same index.

    ``samples`` is how many indices each client draws. Returns a list with a sorted int64 array for each client.
    """
    return [np.sort(pool[rng.choice(len(pool), samples, replace=False, shuffle=False)]) for _ in range(clients)]


def indices_and_offsets(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Joins the arrays in ``split``, which are the indices of each client's samples, into two int64 arrays.

    The two are ``indices`` and ``offsets``. Client i has the samples ``indices[offsets[i]:offsets[i + 1]]``.
    """
    offsets = np.cumsum([0, *map(len, split)], dtype=np.int64)
    return np.concatenate([np.empty(0, np.int64), *split]), offsets


def number_of_samples(count: int) -> str:
    """Returns a number of samples as text for a message: no samples, 1 sample, 2 samples.

    >>> number_of_samples(0)
    'no samples'
    """
    return f"{count or 'no'} sample{'' if count == 1 else 's'}"
