"""Adds up clients' uploads on the node where the clients were trained, so that a node sends one sum to the server."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
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
    """Returns the largest size in bytes of a result that an actor sends to its caller as soon as it has done a task.
    Ray leaves a larger result on the actor's node until somebody asks for it."""
    return int(os.environ.get("RAY_max_direct_call_object_size", 100 * 1024))  # noqa: SIM112 (Ray's own spelling)


@dataclass(eq=False)
class Group:
    """The results of a phase from the client actors of one node, whose uploads belong to one sum. The sums of the
    clients' uploads, which belong to the results, are still on that node.

    ``node`` is Ray's id of the node. ``results`` is a list of pairs: a task, and its result without the sums. ``parts``
    are Ray's references to the sums that are not added up yet, and ``partial`` is a reference to the total of those
    that are, or None if there are none. ``bytes`` is the size of the sums of all tasks together, and ``asked`` the time
    (``time.monotonic()``) when the node was asked for the total over all tasks.
    """

    node: str
    results: list[tuple[PhaseTask, PhaseResult]] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    partial: Any = None
    bytes: int = 0
    asked: float = 0.0


class HostSums:
    """Holds the results of a phase from nodes other than the server's, until the sums of the clients' uploads have
    come. The sums stay on each node until its client actors are done. Then the node adds them up, and sends one total
    to the server.

    ``nodes`` gives access to these nodes. The attribute ``groups`` has the results from nodes that were not asked for
    their totals yet. Its keys are pairs: Ray's id of the node, and the number of the sum (``PhaseTask.sum``). The
    attribute ``coming`` has the results of the nodes that were asked. Its keys are Ray's references to the totals,
    which :meth:`take` takes.
    """

    def __init__(self, nodes: OtherNodes) -> None:
        self.nodes = nodes
        self.groups: dict[tuple[str, int], Group] = {}
        self.coming: dict[Any, Group] = {}

    @property
    def pending(self) -> bool:
        """Whether results are still held here because the sums of their clients' uploads have not come from their
        nodes."""
        return bool(self.groups or self.coming)

    def owing(self) -> set[str]:
        """Returns Ray's ids of the nodes that were asked for the sum of their clients' uploads, but have not sent it
        yet."""
        return {group.node for group in self.coming.values()}

    def clear(self) -> None:
        """Forgets all results, because a new phase begins or nobody needs them any more."""
        self.groups, self.coming = {}, {}

    def hold(self, node: str, task: PhaseTask, result: PhaseResult, sums: Any, size: int) -> None:
        """Keeps a result that lacks the sums of the clients' uploads until :meth:`take` returns it with the total of
        its node.

        Args:
            node: Ray's id of the node on which the sums are.
            task: The task that was done.
            result: Its result, without the sums.
            sums: Ray's reference to the sums.
            size: The size of the sums in bytes.
        """
        group = self.groups.setdefault((node, task.sum), Group(node))
        group.results.append((task, result))
        group.parts.append(sums)
        group.bytes += size
        if len(group.parts) >= FOLD:
            self._fold(group)

    def _fold(self, group: Group) -> None:
        members = group.results[0][0].members
        group.partial = self.nodes.actor(group.node).add_up.remote(members, group.partial, group.parts)
        group.parts = []

    def ask(self, busy: Collection[str]) -> set[str]:
        """Asks each node that is not ``busy``, because its actors are done, for the sums of the uploads over all
        results held from it. Returns the nodes that were asked (Ray's ids)."""
        asked = [key for key in self.groups if key[0] not in busy]
        for key in asked:
            group = self.groups.pop(key)
            if group.parts:
                self._fold(group)
            group.asked = time.monotonic()
            self.coming[group.partial] = group
        return {node for node, _ in asked}

    def late(self, limit: float) -> Iterator[Any]:
        """Yields Ray's references (keys of ``coming``) to the totals that are overdue. A total is overdue if it has
        been waited for ``limit`` seconds longer than the slowest network (:data:`SLOWEST`) would take to send all sums
        that it adds up."""
        now = time.monotonic()
        for reference, group in self.coming.items():
            if now - group.asked > limit + group.bytes / SLOWEST:
                yield reference

    def take(self, reference: Any) -> list[tuple[PhaseTask, PhaseResult]]:
        """Fetches the total of a node's uploads, to which ``reference``, a key of ``coming``, refers. Removes the
        node's results from ``coming``, and returns them as pairs of a task and its result. The last result has the
        total over all of these tasks, and the others have no sums. If the total is lost, Ray's error is raised, and the
        results stay in ``coming``."""
        sums: Sums = ray.get(reference)
        results = self.coming.pop(reference).results
        for name, nodes in sums.items():
            results[-1][1].sums[name].nodes = nodes
        return results
