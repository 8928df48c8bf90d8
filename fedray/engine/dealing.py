"""How a cohort is cut into tasks for the workers."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

from fedray.algorithms import Cohort
from fedray.core.local_training import LocalTraining
from fedray.engine.pool import Pool
from fedray.engine.tasks import Blocks, positions
from fedray.tracking.costs import load_of

LEAST_SECONDS = 0.015
"""Tasks are not smaller than this, at the pace of the round before, where nobody waits for it: each costs a millisecond
or two."""

LONGEST_SECONDS = 10.0
"""Tasks are not longer than this, once the pace is known: all of it is lost with an actor that dies."""

SUMS_BYTES = 128_000_000
"""How much memory a worker may use for the partial sums of a task."""


class Dealer:
    """Cuts each cohort into tasks for ``pool``, by the work of its clients and the pace of the round before.

    ``chunk``: the clients that are trained as one stack (None: cut as it is best); ``row_width``: the numbers of a
    model, of which the memory for sums depends.
    """

    def __init__(self, pool: Pool, training: LocalTraining, chunk: int | None, row_width: int) -> None:
        self.pool, self.training, self.chunk = pool, training, chunk
        # a worker may have so many nodes of the summation tree in its memory, for two uploads or so
        self._nodes = max(1, SUMS_BYTES // (2 * 8 * row_width))
        self._work: list[float] = []
        self._pace = 0.0

    def cut(self, cohort: Cohort) -> Sequence[Blocks]:
        """The tasks of a round, each as blocks of the cohort, in the order in which to give them."""
        self._work = [load_of(size, self.training).seen for size in cohort.sizes]
        return shares(
            self._work, self.pool.slots, self.pool.at_once, self.chunk, self._nodes,
            least=LEAST_SECONDS / self._pace if self._pace else 0,
            longest=LONGEST_SECONDS / self._pace if self._pace else math.inf,
        )  # fmt: skip

    @property
    def samples(self) -> float:
        """The samples in all mini-batches of the round."""
        return sum(self._work)

    def work_of(self, blocks: Blocks) -> float:
        """The samples in all mini-batches of a task's clients."""
        return sum(self._work[place] for place in positions(blocks))

    def learn(self, seconds: float) -> None:
        """Take note of what the workers took for the round, all together."""
        self._pace = seconds / self.samples


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
