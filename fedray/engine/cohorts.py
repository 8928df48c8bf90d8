"""Which clients take part in a round, with which weights, and how they are cut into chunks."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

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


def chunks(
    work: Sequence[float], slots: int, size: int | None, most: int | None = None, least: float = 0
) -> list[tuple[int, int]]:
    """Aligned power-of-two blocks ``(start, stop)`` of a cohort's positions, in the order in which to hand them out.

    ``work`` is what each position costs, in any unit. Blocks of ``size`` where it is given, the largest work first.
    Else it changes no bit how the cohort is cut: no block has more than its share of what is left, of which there are
    two for each of the ``slots`` workers, nor more than ``most`` positions. So there are few blocks, and they are small
    when the end is near: nobody waits long for the last, and a slow worker gets fewer. What is no more work than
    ``least`` is not divided.
    """
    upto = list(itertools.accumulate(work, initial=0))
    members, left = len(work), upto[-1]

    def entry(start: int, stop: int) -> tuple[float, int, int]:
        return upto[start] - upto[stop], start, stop

    if size is not None:
        blocks = (entry(start, min(start + size, members)) for start in range(0, members, size))
        return [(start, stop) for _, start, stop in sorted(blocks)]
    order, heap = [], [entry(0, members)]
    while heap:
        negated, start, stop = heapq.heappop(heap)
        too_much = -negated * 2 * slots > left and -negated > least
        if stop - start > (most or members) or (stop - start > 1 and too_much):
            middle = start + (1 << (stop - start - 1).bit_length() - 1)
            heapq.heappush(heap, entry(start, middle))
            heapq.heappush(heap, entry(middle, stop))
        else:
            order.append((start, stop))
            left += negated
    return order
