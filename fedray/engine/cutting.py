"""Cuts a cohort, the clients of a round, into tasks for the workers.

If a task is too large, the other workers wait at the end of a round for the worker that got it; if it is too small,
sending it takes longer than doing it. So workers get large tasks first and small ones at the end.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedray.algorithms import Cohort
from fedray.client.phase import stacks
from fedray.core.local_training import LocalTraining
from fedray.core.tree import subtrees
from fedray.engine.pool import Pool
from fedray.engine.state.run import RunState
from fedray.engine.tasks import Blocks, Handle, PhaseTask, positions
from fedray.experiment.experiment import Experiment
from fedray.tracking.costs import load_of

LEAST_SECONDS = 0.015
"""The shortest time that a task should take, estimated from the time per sample in the round before. Sending a task
takes one or two milliseconds."""

LONGEST_SECONDS = 10.0
"""The longest time that a task should take, once the time per sample is known. If an actor dies, its work on the task
is lost."""

SUMS_BYTES = 128_000_000
"""The bytes of memory that a worker may use for the partial sums of a task."""


@dataclass(frozen=True)
class Part:
    """The part of a cohort that makes one task. ``blocks`` has its clients, as ranges ``(start, stop)`` of positions in
    the cohort, such as ``[(0, 4), (8, 10)]``. ``work`` is the number of samples in all local mini-batches of these
    clients. ``region`` is the number of a group of workers that are near each other (:attr:`Pool.regions`), one of
    which should do the task."""

    blocks: Blocks
    work: float
    region: int = 0


class TaskCutter:
    """Cuts the cohort of each round into tasks for the workers. The size of a task depends on how many samples its
    clients train on, and on the time that a sample took in the round before.

    Args:
        pool: The workers.
        training: The settings of local training, which say on how many samples a client trains.
        chunk: The largest number of clients in a stack (a group of clients that are trained together as one tensor). A
            stack is never divided between tasks. None if there are no such groups, so that a task may end after any
            client.
        row_width: The number of floats in a model, on which the memory of the partial sums of uploads depends.
        lanes: The number of clients that a GPU can train side by side. So many neighbours stay in one task if the
            cohort has enough clients for all workers.
    """

    def __init__(self, pool: Pool, training: LocalTraining, chunk: int | None, row_width: int, lanes: int = 1) -> None:
        self.pool, self.training, self.chunk, self.lanes = pool, training, chunk, lanes
        # how many nodes of the summation tree fit into SUMS_BYTES if there are two uploads
        self._nodes = max(1, SUMS_BYTES // (2 * 8 * row_width))
        self._work: list[float] = []
        self._pace = 0.0

    def cut(self, cohort: Cohort) -> Sequence[Part]:
        """Divides ``cohort`` into parts that make a task each. Returns the parts in the order in which workers should
        get the tasks.

        Each region of the pool, a group of workers that are near each other, gets clients at neighbouring positions of
        the cohort, so that the sums over these clients can be added up within the region. The regions get so many
        clients each that all are expected to need the same time.
        """
        seen = {size: load_of(size, self.training).seen for size in set(cohort.sizes)}
        self._work = [seen[size] for size in cohort.sizes]
        members, regions = len(cohort.ids), self.pool.regions
        undivided = None if self.chunk is None else stacks(members, self.chunk)
        ranges = split_by_work(self._work, [region.speed for region in regions], undivided)
        parts = [
            Part(blocks, sum(self._work[place] for place in positions(blocks)), number)
            for number, (region, within) in enumerate(zip(regions, ranges, strict=True))
            for blocks in cut_into_tasks(
                self._work, region.workers, self.pool.task_fraction, undivided, self._nodes,
                least=LEAST_SECONDS / self._pace if self._pace else 0,
                longest=LONGEST_SECONDS / self._pace if self._pace else math.inf,
                together=max(1, min(self.lanes, members // self.pool.slots)),
                within=within,
            )
        ]  # fmt: skip
        return parts if len(regions) == 1 else sorted(parts, key=lambda part: -part.work)

    @property
    def samples(self) -> float:
        """The work of the cohort that :meth:`cut` divided last: the number of samples in all its clients' local
        mini-batches."""
        return sum(self._work)

    def learn(self, seconds: float, samples: float) -> None:
        """Takes note of how long training takes: clients with so many ``samples`` in all their local mini-batches took
        ``seconds``, added up over all workers. The time per sample decides how large the tasks of the next rounds
        are."""
        self._pace = seconds / samples


def cut_into_tasks(
    work: Sequence[float],
    slots: int,
    task_fraction: float = 0.5,
    undivided: Blocks | None = None,
    nodes: int = 64,
    least: float = 0,
    longest: float = math.inf,
    together: int = 1,
    within: tuple[int, int] | None = None,
) -> list[list[tuple[int, int]]]:
    """Cuts a cohort into tasks for workers, and returns each task as a list of blocks, which are ranges
    ``(start, stop)`` of positions in the cohort (a client's place in it, from 0). How the cohort is cut changes no bit
    of the sums over clients.

    The first tasks are large, so that there are few, and the last ones small, so that nobody waits long for the worker
    that got the last one. For example, 16 clients of work 1, two workers and a ``task_fraction`` of 1/2 give tasks of
    4, 4, 2, 2, 1, 1, 1 and 1 clients. The most expensive blocks come first. The costs of blocks with several clients
    are compared only by their powers of two (4 and 7 are equal), so that neighbouring clients stay together.

    Args:
        work: The cost of the client at each position, in any unit.
        slots: The number of workers.
        task_fraction: The target size of a task as a fraction of an even share, which is the remaining work divided by
            ``slots``.
        undivided: All blocks of the cohort, if the caller divides it, such as groups of clients that are trained
            together. They are not cut. If it is None, the function chooses blocks that are as large as fit into a task:
            their sizes are powers of two, and they begin at multiples of their sizes (the last block may be shorter).
        nodes: How many nodes of the summation tree (partial sums over clients) a worker may need at a time to add up a
            task. A single block that is not cut may need more.
        least: The smallest target size, in the unit of ``work``. When so little work is left that an even share is less
            than ``least``, the smallest target size is the even share, but not less than a fifth of ``least``.
        longest: The largest target size, in the unit of ``work``.
        together: Blocks of at most this number of clients are not cut further.
        within: The range ``(start, stop)`` of positions that is cut; None means the whole cohort.
    """
    blocks = _Blocks(work, undivided, nodes, together, within or (0, len(work)))
    tasks: list[list[tuple[int, int]]] = []
    while blocks.left:
        if len(tasks) % slots == 0:
            even = blocks.cost / slots
            target = min(longest, max(even * task_fraction, min(least, max(even, least / 5))))
        tasks.append(sorted(blocks.take(target)))
    return tasks


class _Blocks:
    """The blocks of a cohort that are not yet in a task: a heap ``left`` with the most expensive block first, and the
    ``cost`` of all of them together. The arguments are those of :func:`cut_into_tasks`."""

    def __init__(
        self, work: Sequence[float], undivided: Blocks | None, nodes: int, together: int, within: tuple[int, int]
    ) -> None:
        self._upto = list(itertools.accumulate(work, initial=0))
        self._members, self._undivided, self._nodes, self._together = len(work), undivided, nodes, together
        start, stop = within
        self.cost = self._upto[stop] - self._upto[start]
        whole = subtrees(start, stop, len(work)) if undivided is None else undivided
        self.left = [self._entry(*block) for block in whole if start <= block[0] < stop]
        heapq.heapify(self.left)

    def take(self, target: float) -> list[tuple[int, int]]:
        """Returns blocks for the next task, whose costs add up to about ``target``, and removes them from those that
        are left. Blocks that are too large are cut first."""
        blocks: list[tuple[int, int]] = []
        room, added, deepest = target, 0, 0
        while self.left:
            *_, start, stop = self.left[0]
            cost, length = self._upto[stop] - self._upto[start], stop - start
            count, depth = self._nodes_of(start, stop)
            # blocks are added up from left to right, so the deepest may come last, when all other nodes are held
            held = added + max(deepest, depth) <= self._nodes
            # blocks below an eighth of a task are not cut further, because that would only add nodes
            too_large = cost > max(room, target / 8) if held else not blocks
            if too_large and self._undivided is None and length > self._together:
                middle = start + (1 << (length - 1).bit_length() - 1)
                heapq.heapreplace(self.left, self._entry(start, middle))
                heapq.heappush(self.left, self._entry(middle, stop))
            elif not blocks or (held and cost <= 2 * room):
                # at most half of the block lies beyond the target, so the task is rounded to the nearest size
                heapq.heappop(self.left)
                blocks.append((start, stop))
                room, self.cost = room - cost, self.cost - cost
                added, deepest = added + count, max(deepest, depth)
            else:
                break
        return blocks

    def _entry(self, start: int, stop: int) -> tuple[float, float, int, int]:
        return *_priority(self._upto[stop] - self._upto[start], stop - start), start, stop

    def _nodes_of(self, start: int, stop: int) -> tuple[int, int]:
        """Returns how many nodes of the summation tree a worker holds for the block of the positions start .. stop - 1:
        after it has added up the block, and at most while it does so."""
        if self._undivided is None:
            return 1, max(1, (stop - start - 1).bit_length())
        count = len(list(subtrees(start, stop, self._members)))
        return count, count


def _priority(cost: float, length: int) -> tuple[float, float]:
    """Returns the key by which blocks are sorted, the smallest key first. The block has ``length`` clients and
    costs ``cost``."""
    return -math.frexp(cost)[1], -cost if length == 1 else 0


def split_by_work(
    work: Sequence[float], shares: Sequence[float], undivided: Blocks | None = None
) -> list[tuple[int, int]]:
    """Divides a cohort among groups of workers: returns for each group a range ``(start, stop)`` of positions in the
    cohort. The ranges follow each other, and a range may be empty.

    ``work`` has the cost of the client at each position, in any unit. ``shares`` has a number for each group, such as
    its speed; the work in its range is about proportional to that number. Blocks ``(start, stop)`` in ``undivided`` are
    not divided. If it is None, a range begins at a multiple of a power of two, so that few nodes of the summation tree
    (partial sums over clients) cover it.
    """
    members, upto = len(work), list(itertools.accumulate(work, initial=0))
    step = 1 << max(0, (members // (8 * len(shares))).bit_length() - 1)
    edges = [*range(0, members, step), members] if undivided is None else [*(start for start, _ in undivided), members]
    bounds = [0]
    for share in itertools.accumulate(shares):
        wanted = upto[-1] * share / sum(shares)
        bounds.append(max(bounds[-1], min(edges, key=lambda edge: abs(upto[edge] - wanted))))
    bounds[-1] = members
    return list(itertools.pairwise(bounds))


@dataclass(frozen=True)
class Sent:
    """What the server has sent to the clients at the start of a phase of the round. ``shared`` is a handle, a reference
    by which tasks name the models and vectors that all clients get. ``scalars`` has the numbers that differ from client
    to client: it maps the name of each to a list with an entry for each client of the cohort."""

    shared: Handle
    scalars: Mapping[str, Sequence[float]]


def task_of(part: Part, sent: Sequence[Sent], state: RunState, experiment: Experiment) -> PhaseTask:
    """Returns the task that makes a worker run one phase of the algorithm for the clients in ``part``, a part of the
    round's cohort.

    A round has one or more phases, each of which begins with a broadcast of the server. ``sent`` has the broadcasts of
    all phases of the round so far, and the task is for the last of these phases. The rest of the task, such as the
    clients' weights and states, comes from ``state`` and ``experiment``.
    """
    server, places, algorithm = state.server, positions(part.blocks), experiment.algorithm
    cohort = server.cohort

    def of_task(values: Sequence[Any]) -> list[Any]:
        return [values[place] for place in places]

    ids, gaps = of_task(cohort.ids), of_task(cohort.gaps)
    run, keep = experiment.config.run, state.order.keep
    asked = set(ids if keep is True else keep or ())
    asked |= set(run.local_models_of if server.round in run.local_models_in else ())
    asked |= set(ids if experiment.evaluates_local_models(server.round) else ())
    return PhaseTask(
        round=server.round,
        phase=len(sent) - 1,
        blocks=part.blocks,
        members=len(cohort.ids),
        work=part.work,
        region=part.region,
        lr=server.lr,
        ids=ids,
        weights=of_task(cohort.weights),
        steps=of_task(cohort.steps),
        gaps=gaps,
        broadcasts=[each.shared for each in sent],
        scalars=[{name: of_task(values) for name, values in each.scalars.items()} for each in sent],
        states=[state.clients.get(client) for client in ids] if experiment.keeps_states else (),
        received=[state.earlier.received(server.round, gap) for gap in gaps] if algorithm.needs_received else (),
        attempt=state.attempt,
        models_of=[client for client in ids if client in asked] if asked else [],
    )
