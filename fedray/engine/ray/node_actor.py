"""The Ray actor that a run has on each node but the server's, for access to clients' states and sums of uploads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ray

from fedray.core.tree import Rows, TreeSum, tree_for
from fedray.engine.ray.client_actor import ASKED, Sums
from fedray.engine.state.packing import tensor_over
from fedray.engine.state.states import ENDING_SECONDS, State, StateFile, StateFolder
from fedray.experiment.experiment import Experiment


class NodeActor:
    """A Ray actor on a node other than the server's. It gives access to the files with clients' states there (what
    clients keep between rounds), for checkpoints and for client actors on other nodes. It also adds up what clients
    have uploaded on its node. It goes on when client actors there die. ``server`` is Ray's id of the server's node."""

    def __init__(self, experiment: Experiment, server: str) -> None:
        self.states = StateFolder.of_run(experiment.config, ray.get_runtime_context().get_node_id(), server)

    def read(self, file: StateFile) -> State:
        """Returns the client state in ``file``, a file on this node, as float32 arrays by name."""
        # this actor may have replaced one that died
        self.states.hold()
        return self.states.read(file)

    def drop(self, files: Sequence[StateFile]) -> None:
        """Removes ``files``, clients' states on this node that are no longer needed."""
        self.states.drop(files)

    def begin(self) -> None:
        """Makes an empty folder for this run's client states on this node. First removes what the run left there if it
        was killed before, and what other runs that have ended left beside it."""
        self.states.clear()
        self.states.clear_others()
        self.states.hold()

    def end(self) -> None:
        """Removes all files with clients' states of this run from this node. Waits for up to :data:`ENDING_SECONDS`
        until the run's client actors here are gone."""
        self.states.clear(ENDING_SECONDS)

    @ray.method(concurrency_group=ASKED)
    def alive(self) -> None:
        """Returns at once, even while the actor does something else. The server takes this as a sign of life."""

    def add_up(self, members: int, before: Sums | None, parts: Sequence[Any]) -> Sums:
        """Adds up sums of uploads that are on this node, and returns the total. ``members`` is the number of clients of
        the cohort. ``before`` is an earlier total to which the sums are added, or None. ``parts`` are Ray's references
        to the sums."""
        return added_up(members, [before or {}, *(ray.get(part) for part in parts)])


def added_up(members: int, parts: Iterable[Sums]) -> Sums:
    """Adds up sums of uploads, and returns their total. ``members`` is the number of clients of the cohort. Each of
    ``parts`` is about some of these clients, and maps the name of an upload to a dict. Its keys are nodes ``(level,
    index)`` of the summation tree, a fixed binary tree over the cohort; its values are float64 arrays, each the sum
    over the clients below the node. The total has the same form. Where it would have both children of a node, it has
    the node itself instead, with their sum. Uploads that the server gets one by one, float32, are only put together."""
    trees: dict[str, TreeSum | Rows] = {}
    for sums in parts:
        for name, nodes in sums.items():
            for node, array in nodes.items():
                value = tensor_over(array)
                trees.setdefault(name, tree_for(value, members)).add(node, value, read_only=True)
    return {name: {node: value.numpy() for node, value in tree.nodes.items()} for name, tree in trees.items()}
