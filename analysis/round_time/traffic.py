"""What is sent in a round, predicted from the configuration by the rules of fedray itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from fedray.algorithms import Cohort
from fedray.client.phase import stacks
from fedray.core.local_training import LocalTraining
from fedray.core.tree import TreeSum, subtree, subtrees
from fedray.engine.cutting import TaskCutter
from fedray.engine.pool import Region
from fedray.engine.ray.host_sums import inline_bytes
from fedray.engine.ray.pool import ENCLOSED_BYTES, MARGIN
from fedray.experiment.backend import LEAST_VMAP_CHUNK, VMAP_CHUNK
from round_time.points import Point


@dataclass(frozen=True)
class Known:
    """What is known of a model before a round is predicted: its ``parameters``, and the ``seconds_per_sample`` that a
    worker takes to train it, by which fedray sizes tasks."""

    parameters: int
    seconds_per_sample: float


@dataclass(frozen=True)
class Sent:
    """What is sent in a round: the number of ``tasks``; of the nodes of the tree of additions, vectors in double
    precision, that reach the server (``nodes``), and that do from other hosts than its own (``nodes_from_others``); and
    how often the model is sent to another host (``models_to_others``)."""

    tasks: int
    nodes: int
    nodes_from_others: int
    models_to_others: int


@dataclass(frozen=True)
class _EqualActors:
    """What fedray's :class:`TaskCutter` asks a pool, for ``slots`` actors of equal speed that are spread over
    ``hosts``."""

    slots: int
    hosts: int
    task_fraction: float = 1 / MARGIN

    @property
    def regions(self) -> Sequence[Region]:
        each = [self.slots // self.hosts + (place < self.slots % self.hosts) for place in range(self.hosts)]
        return [Region(count, count) for count in each]


@functools.cache
def sent(point: Point, known: Known) -> Sent:
    """Returns what is sent in a round of ``point``, in which all actors are equally fast."""
    members, pool = point.cohort, cast(Any, _EqualActors(point.actors, point.hosts))
    training = LocalTraining(seed=0, batch_size=point.work.batch, local_steps=point.steps)
    cutter = TaskCutter(pool, training, _chunk(point), known.parameters)
    cohort = Cohort(ids=range(members), sizes=[point.work.batch] * members)
    cutter.cut(cohort)
    # from the second round on tasks are sized by the time per sample
    cutter.learn(known.seconds_per_sample * cutter.samples, cutter.samples)
    tasks = own = others = enclosed = 0
    on_hosts = {host: TreeSum(members) for host in range(1, point.hosts)}
    for part in cutter.cut(cohort):
        tree, ranges = TreeSum(members), [each for block in part.blocks for each in subtrees(*block, members)]
        _add(tree, ranges)
        tasks += 1
        enclosed += part.region > 0
        if part.region == 0:
            own += len(tree.nodes)
        elif 8 * known.parameters * len(tree.nodes) <= inline_bytes():
            others += len(tree.nodes)
        else:
            # it waits for those of the other tasks of its host
            _add(on_hosts[part.region], ranges)
    others += sum(len(tree.nodes) for tree in on_hosts.values())
    models = enclosed if 4 * known.parameters <= ENCLOSED_BYTES else point.hosts - 1
    return Sent(tasks, own + others, others, models)


def _add(tree: TreeSum, ranges: Sequence[tuple[int, int]]) -> None:
    for start, stop in ranges:
        tree.add(subtree(start, stop - start), torch.zeros(0))


def _chunk(point: Point) -> int | None:
    """Returns the largest number of clients in a stack on a CPU with ``engine.chunk=auto``, or None if clients are
    trained one by one."""
    chunk = min(VMAP_CHUNK, (point.cohort + 1) // 2)
    return chunk if point.work.stacked and chunk >= LEAST_VMAP_CHUNK else None


def clients_in_turn(point: Point, processors: int) -> int:
    """Returns how many clients the processor trains that has most of them, if all are equally fast."""
    workers, chunk = min(point.actors, processors), _chunk(point)
    if chunk is None:
        return -(-point.cohort // workers)
    in_stacks = stacks(point.cohort, chunk)
    return -(-len(in_stacks) // workers) * max(stop - start for start, stop in in_stacks)
