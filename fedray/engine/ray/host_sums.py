"""Adds up clients' uploads on the node where the clients were trained, so that a node sends one sum to the server."""

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
    """Returns the size in bytes up to which Ray sends a result together with an actor's answer. Ray leaves a larger
    result on the actor's node until somebody asks for it."""
    return int(os.environ.get("RAY_max_direct_call_object_size", 100 * 1024))  # noqa: SIM112 (Ray's own spelling)


@dataclass(eq=False)
class Group:
    """The results of a phase from the client actors of one node, while the sums of the clients' uploads are still
    there.

    ``node`` is Ray's id of the node. ``results`` has each task with its result, which lacks the sums. ``parts`` are
    Ray's references to the sums of tasks that are not added up yet, and ``partial`` is a reference to the total of the
    others, or None. ``bytes`` is the size of all these sums, and ``asked`` the time (``time.monotonic()``) when the
    total over all tasks was asked for.
    """

    node: str
    results: list[tuple[PhaseTask, PhaseResult]] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    partial: Any = None
    bytes: int = 0
    asked: float = 0.0


class HostSums:
    """Holds the results of a phase from nodes other than the server's. The sums of the clients' uploads stay on each
    node until its client actors are done. Then the node adds them up, and sends one total to the server.

    ``nodes`` gives access to these nodes. The attribute ``groups`` has the results from each node that was not asked
    for its total yet, by Ray's id of the node. ``coming`` has the results whose total is on its way, by Ray's reference
    to the total, which :meth:`take` needs.
    """

    def __init__(self, nodes: OtherNodes) -> None:
        self.nodes = nodes
        self.groups: dict[str, Group] = {}
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
        """Asks ``node`` (Ray's id), whose actors are done, for the sum of the uploads over all results held from it."""
        group = self.groups.pop(node)
        if group.parts:
            self._fold(group)
        group.asked = time.monotonic()
        self.coming[group.partial] = group

    def late(self, limit: float) -> Iterator[Any]:
        """Yields Ray's references to sums (keys of ``coming``) that are overdue: they have been waited for ``limit``
        seconds longer than the slowest network (:data:`SLOWEST`) would take for their bytes."""
        now = time.monotonic()
        for reference, group in self.coming.items():
            if now - group.asked > limit + group.bytes / SLOWEST:
                yield reference

    def take(self, reference: Any) -> list[tuple[PhaseTask, PhaseResult]]:
        """Takes the sum of a node's uploads to which ``reference``, a key of ``coming``, refers. Returns the node's
        tasks, each with its result. The last result has the sum over all of these tasks, and the others have none.
        Raises an error of Ray's if the sum is lost; ``coming`` then still has the tasks."""
        sums: Sums = ray.get(reference)
        results = self.coming.pop(reference).results
        for name, nodes in sums.items():
            results[-1][1].sums[name].nodes = nodes
        return results
