"""Which clients take part in a round, with which weights, and how they are dealt out to workers."""

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
    nodes: int = 64,
    least: float = 0,
    longest: float = math.inf,
) -> list[list[tuple[int, int]]]:
    """How a cohort is handed out: lists of blocks ``(start, stop)`` of positions, in the order in which to give them.

    ``work`` is what each position costs, in any unit. Each of the ``slots`` workers is given the part ``at_once`` of
    its even share of what is left, then again: so there are few shares, and they are small when the end is near:
    nobody waits long for the last, and a slow worker gets fewer. A share costs at least ``least``, or an even share if
    that is less, but not below a fifth of ``least``; and at most ``longest``. What costs most comes first, clients by
    themselves exactly, larger blocks by powers of two, so that neighbours stay together.

    Blocks are aligned powers of two: of ``size`` where it is given, else as large as fits; it changes no bit. Adding up
    a share's values takes no more than ``nodes`` nodes of the summation tree at a time, but for a block of ``size``.
    """
    upto = list(itertools.accumulate(work, initial=0))
    members, left = len(work), upto[-1]

    def entry(start: int, stop: int) -> tuple[float, float, int, int]:
        cost = upto[stop] - upto[start]
        return -math.frexp(cost)[1], -cost if stop - start == 1 else 0, start, stop

    heap = [entry(start, min(start + (size or members), members)) for start in range(0, members, size or members)]
    heapq.heapify(heap)
    given: list[list[tuple[int, int]]] = []
    while heap:
        if len(given) % slots == 0:
            even = left / slots
            target = min(longest, max(even * at_once, min(least, max(even, least / 5))))
        blocks: list[tuple[int, int]] = []
        room = target
        while heap:
            *_, start, stop = heap[0]
            cost, length = upto[stop] - upto[start], stop - start
            held = len(blocks) + max(1, (length - 1).bit_length()) <= nodes
            # an eighth of a share is fine enough: smaller blocks would only be more nodes
            too_large = cost > max(room, target / 8) if held else not blocks
            if too_large and size is None and length > 1:
                middle = start + (1 << (length - 1).bit_length() - 1)
                heapq.heapreplace(heap, entry(start, middle))
                heapq.heappush(heap, entry(middle, stop))
            elif not blocks or (held and cost <= 2 * room):
                # rounded to the nearest
                heapq.heappop(heap)
                blocks.append((start, stop))
                room, left = room - cost, left - cost
            else:
                break
        given.append(sorted(blocks))
    return given


def positions(blocks: Sequence[tuple[int, int]]) -> list[int]:
    """The positions in some blocks."""
    return [position for block in blocks for position in range(*block)]
