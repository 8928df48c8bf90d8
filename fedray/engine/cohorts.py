"""Which clients take part in a round, with which weights, and how they are cut into chunks."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedray.core.seeds import Purpose, stream


def draw_cohort(
    present: NDArray[np.int64], size: int, sampling: str, seed: int, data_seed: int, round: int
) -> NDArray[np.int64]:
    """The ids of round ``round`` (from 1), sorted: a function of seed and round alone.

    ``uniform``: without replacement. ``cyclic``: one permutation from the data seed, of which round r takes positions
    (r-1)m .. rm-1 modulo N. ``present``: the clients that have samples.
    """
    if sampling == "cyclic":
        order = stream(data_seed, Purpose.COHORT).permutation(present)
        chosen = order[np.arange((round - 1) * size, round * size) % len(order)]
    elif size == len(present):
        chosen = present
    else:
        chosen = stream(seed, Purpose.COHORT, round).choice(present, size, replace=False)
    return np.sort(chosen)


def weights_of(sizes: NDArray[np.int64], weighting: str) -> list[float]:
    """p_i, normalised in the cohort: n_i / n_S, or 1 / m."""
    if weighting == "uniform":
        return [1 / len(sizes)] * len(sizes)
    total = int(sizes.sum())
    return [int(size) / total for size in sizes]


def chunks(members: int, slots: int, size: int | None) -> list[tuple[int, int]]:
    """Aligned power-of-two blocks ``(start, stop)`` of a cohort's positions.

    Blocks of ``size`` where it is given. Else it changes no bit how the cohort is cut: blocks get smaller towards the
    end, so that all ``slots`` workers finish together, and are large at first, so that there are few.
    """
    blocks, start = [], 0
    while start < members:
        if size is not None:
            block = size
        else:
            block = 1 << max(0, int(math.log2((members - start) / (2 * slots)))) if members - start > 2 * slots else 1
        stop = min(start + block, members)
        blocks.append((start, stop))
        start = stop
    return blocks
