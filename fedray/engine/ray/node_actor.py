"""What a run needs once on each node besides the server's: access to clients' states, and sums over clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ray

from fedray.core.tree import TreeSum
from fedray.engine.ray.client_actor import ASKED, Sums
from fedray.engine.state.packing import tensor_over
from fedray.engine.state.states import ENDING_SECONDS, State, StateFile, StateFolder
from fedray.experiment.experiment import Experiment


class NodeActor:
    """An actor on a node other than the server's. It gives access to the files with clients' states there, for
    checkpoints and for client actors on other nodes, and adds up what the client actors of its node have uploaded. It
    survives these client actors."""

    def __init__(self, experiment: Experiment, server: str) -> None:
        self.states = StateFolder.of_run(experiment.config, ray.get_runtime_context().get_node_id(), server)

    def read(self, file: StateFile) -> State:
        """Returns the arrays of the client state in ``file``, a file on this node, by name."""
        # this actor may have replaced one that died
        self.states.hold()
        return self.states.read(file)

    def drop(self, files: Sequence[StateFile]) -> None:
        """Removes ``files``, clients' states on this node that are no longer needed."""
        self.states.drop(files)

    def begin(self) -> None:
        """Makes an empty folder for clients' states on this node. What this run left there before it was killed, and
        what others left that are over, is removed."""
        self.states.clear()
        self.states.clear_others()
        self.states.hold()

    def end(self) -> None:
        """Removes all files with clients' states of this run from this node, once its client actors here are gone."""
        self.states.clear(ENDING_SECONDS)

    @ray.method(concurrency_group=ASKED)
    def alive(self) -> None:
        """Answers at once, whatever the actor does."""

    def add_up(self, members: int, before: Sums | None, parts: Sequence[Any]) -> Sums:
        """Returns the sum of ``before`` and of ``parts``, references to sums that lie on this node, for a cohort with
        ``members`` clients."""
        return added_up(members, [before or {}, *(ray.get(part) for part in parts)])


def added_up(members: int, parts: Iterable[Sums]) -> Sums:
    """Returns the sums ``parts`` over some of a cohort's ``members`` clients, added up along the summation tree: two
    neighbouring nodes become the node above them."""
    trees: dict[str, TreeSum] = {}
    for sums in parts:
        for name, nodes in sums.items():
            tree = trees.setdefault(name, TreeSum(members))
            for node, value in nodes.items():
                tree.add(node, tensor_over(value), read_only=True)
    return {name: {node: value.numpy() for node, value in tree.nodes.items()} for name, tree in trees.items()}
