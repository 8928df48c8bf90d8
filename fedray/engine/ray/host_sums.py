"""Adds up what clients have uploaded on the host where they were trained, so that one sum of each host travels."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray

from fedray.engine.ray.client_actor import Sums
from fedray.engine.ray.other_nodes import OtherNodes
from fedray.engine.tasks import PhaseResult, PhaseTask

FOLD = 8
"""How many results lie on a node before they are added up, so that they do not fill its memory."""

SLOWEST = 2e6
"""The bytes per second of the slowest network on which a sum is waited for."""


def inline_bytes() -> int:
    """Returns up to how many bytes Ray sends a result together with an actor's answer, instead of leaving it on the
    actor's node until somebody asks for it."""
    return int(os.environ.get("RAY_max_direct_call_object_size", 100 * 1024))  # noqa: SIM112 (Ray's own spelling)


@dataclass(eq=False)
class Group:
    """Results of a phase from the client actors of one ``node``, whose sums are still there.

    ``parts`` are references to the sums that are not added up yet, and ``partial`` one to the sum of the others.
    ``bytes`` is the size of all, and ``asked`` the time at which the sum of all was asked for.
    """

    node: str
    results: list[tuple[PhaseTask, PhaseResult]] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    partial: Any = None
    bytes: int = 0
    asked: float = 0.0


class HostSums:
    """The sums of a phase that stay on ``nodes`` until all client actors of a node are done. ``coming`` has the groups
    whose sums are on their way, by the reference that :meth:`take` needs."""

    def __init__(self, nodes: OtherNodes) -> None:
        self.nodes = nodes
        self.groups: dict[str, Group] = {}
        self.coming: dict[Any, Group] = {}

    @property
    def pending(self) -> bool:
        """Whether any results are waiting for their sums."""
        return bool(self.groups or self.coming)

    def owing(self) -> set[str]:
        """Returns the nodes whose sums are on their way."""
        return {group.node for group in self.coming.values()}

    def clear(self) -> None:
        """Forgets all results, because nobody needs them any more."""
        self.groups, self.coming = {}, {}

    def hold(self, node: str, task: PhaseTask, result: PhaseResult, sums: Any, size: int) -> None:
        """Keeps the ``result`` of ``task`` until its ``sums``, a reference to ``size`` bytes on ``node``, have been
        added to those of the node's other results."""
        group = self.groups.setdefault(node, Group(node))
        group.results.append((task, result))
        group.parts.append(sums)
        group.bytes += size
        if len(group.parts) >= FOLD:
            self._fold(group)

    def _fold(self, group: Group) -> None:
        members = group.results[0][0].members
        group.partial = self.nodes.actor(group.node).add_up.remote(members, group.partial, group.parts)
        group.parts = []

    def ask(self, node: str) -> None:
        """Asks for the sum of all results that ``node`` has, because its actors are done."""
        group = self.groups.pop(node)
        if group.parts:
            self._fold(group)
        group.asked = time.monotonic()
        self.coming[group.partial] = group

    def late(self, limit: float) -> Iterator[Any]:
        """Yields the references in ``coming`` that have been waited for by ``limit`` seconds longer than the slowest
        network would take."""
        now = time.monotonic()
        for reference, group in self.coming.items():
            if now - group.asked > limit + group.bytes / SLOWEST:
                yield reference

    def take(self, reference: Any) -> list[tuple[PhaseTask, PhaseResult]]:
        """Returns the tasks and results to which ``reference`` in ``coming`` belongs. The last result has the sums of
        all. Raises an error of Ray's if the sums are lost; ``coming`` then still has the group."""
        sums: Sums = ray.get(reference)
        results = self.coming.pop(reference).results
        for name, nodes in sums.items():
            results[-1][1].sums[name].nodes = nodes
        return results
