"""Which clients take part in a round, with which weights, and how they are cut into chunks."""

from __future__ import annotations

import heapq
import itertools
import math
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


def shares(
    work: Sequence[float],
    slots: int,
    at_once: float = 0.5,
    size: int | None = None,
    most: int | None = None,
    least: float = 0,
) -> list[list[tuple[int, int]]]:
    """How a cohort is handed out: lists of blocks ``(start, stop)`` of positions, in the order in which to give them.

    ``work`` is what each position costs, in any unit. Each of the ``slots`` workers is given the part ``at_once`` of
    its even share of what is left, then again: so there are few shares, and they are small when the end is near:
    nobody waits long for the last, and a slow worker gets fewer. But what is worth less than ``least`` is given at
    once, if some do not get much more than others by it: even shares of a fifth of that are. What costs most comes
    first, by powers of two. No share has more than ``most`` positions.

    Blocks are aligned powers of two: of ``size`` where it is given, else as large as fits; it changes no bit.
    """
    upto = list(itertools.accumulate(work, initial=0))
    members, left = len(work), upto[-1]
    most = most or members

    def entry(start: int, stop: int) -> tuple[int, int, int]:
        return -math.frexp(upto[stop] - upto[start])[1], start, stop

    heap = [entry(start, min(start + (size or members), members)) for start in range(0, members, size or members)]
    heapq.heapify(heap)
    given: list[list[tuple[int, int]]] = []
    while heap:
        if len(given) % slots == 0:
            even = left / slots
            target = max(even * at_once, min(least, max(even, least / 5)))
        blocks: list[tuple[int, int]] = []
        room, places = target, most
        while heap:
            _, start, stop = heap[0]
            cost, length = upto[stop] - upto[start], stop - start
            fits = cost <= room and length <= places
            if not fits and size is None and length > 1 and (cost > target / 8 or length > most):
                middle = start + (1 << (length - 1).bit_length() - 1)
                heapq.heapreplace(heap, entry(start, middle))
                heapq.heappush(heap, entry(middle, stop))
            elif not blocks or (cost <= 2 * room and length <= places):
                heapq.heappop(heap)
                blocks.append((start, stop))
                room, places, left = room - cost, places - length, left - cost
            else:
                break
        given.append(sorted(blocks))
    return given
