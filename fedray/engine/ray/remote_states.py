"""Gives access to the clients' states that lie on other nodes than the server's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, NodeDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.numpy import save_file

from fedray.engine.ray.client_actor import StateReader
from fedray.engine.ray.cluster import NO_TASK_EVENTS, living_nodes
from fedray.engine.state.states import ENDING_SECONDS, State, StateFile, StateFolder
from fedray.engine.tasks import Handle
from fedray.errors import StateLost
from fedray.experiment.experiment import Experiment

ANSWER_SECONDS = 10.0
"""After how many seconds without an answer another node is asked again, and the user is told."""

START_SECONDS = 60.0
"""How long a reader may take to start that is needed only to remove clients' states."""


class RemoteStates:
    """The files with clients' states on all nodes of a run: those in ``here``, the folder on the server's node, and
    those on other nodes, each of which has a :class:`StateReader`. ``say`` shows a line to the user."""

    def __init__(self, experiment: Experiment, here: StateFolder, say: Callable[[str], None]) -> None:
        self.experiment, self.here, self.say = experiment, here, say
        self._readers: dict[str, Any] = {}
        self._hosts: dict[str, str] = {}

    def open(self, node: str, host: str) -> None:
        """Starts a reader on ``node``, whose host is called ``host``, unless there is one or it is the server's node.
        Clients' states that a killed run may have left there are removed."""
        if node != self.here.node and node not in self._readers:
            self._start_reader(node, host)
            self._answer(node, "begin")

    def _start_reader(self, node: str, host: str) -> None:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": place, **NO_TASK_EVENTS}
        reader: Any = ray.remote(StateReader).options(**options)
        self._hosts[node], self._readers[node] = host, reader.remote(self.experiment, self.here.node)

    def near(self, handle: Handle | None, node: str) -> Handle | None:
        """Returns a handle of a client's state that an actor on ``node`` can resolve: a file on that node, or a
        reference to an object that Ray sends there."""
        if not isinstance(handle, StateFile) or handle.node == node:
            return handle
        if handle.node == self.here.node:
            return ray.put(self.here.read(handle))
        return self._readers[handle.node].read.remote(handle)

    def store(self, file: StateFile, target: Path) -> None:
        """Writes the client's state in ``file`` to the file ``target`` on the server's node."""
        if file.node == self.here.node:
            self.here.store(file, target)
        else:
            save_file(self._answer(file.node, "read", file), target)

    def read(self, file: StateFile) -> State:
        """Returns the arrays in ``file``, which may be on any node."""
        return self.here.read(file) if file.node == self.here.node else self._answer(file.node, "read", file)

    def drop(self, files: Iterable[StateFile]) -> None:
        """Removes ``files``, which are no longer needed."""
        by_node: dict[str, list[StateFile]] = {}
        for file in files:
            by_node.setdefault(file.node, []).append(file)
        self.here.drop(by_node.pop(self.here.node, ()))
        for node, there in by_node.items():
            self._readers[node].drop.remote(there)

    def hosts_of(self, handles: Iterable[Handle | None]) -> list[str]:
        """Returns the names of the other hosts on which the states ``handles`` lie."""
        nodes = {each.node for each in handles if isinstance(each, StateFile)}
        return sorted(self._hosts[node] for node in nodes if node in self._hosts)

    def clear(self) -> None:
        """Removes all clients' states of the run from the other nodes that answer."""
        self._ask("begin", list(self._readers), ANSWER_SECONDS)

    def close(self) -> None:
        """Removes all clients' states from all nodes once the client actors, which must have been told to end, are
        gone, and ends the readers."""
        silent = self._ask("end", list(self._readers), ANSWER_SECONDS)
        # a host that was lost may be back as another node, on which no client actor has started yet
        back = {
            node["NodeID"]: node["NodeManagerHostname"]
            for node in (living_nodes() if silent else ())
            if node["NodeManagerHostname"] in silent and node["NodeID"] not in (self.here.node, *self._readers)
        }
        for node, host in back.items():
            self._start_reader(node, host)
        silent = [host for host in silent if host not in back.values()] + self._ask("end", list(back), START_SECONDS)
        if silent:
            self.say(f"clients' states are left on {', '.join(silent)}, as no answer comes: fedray clean removes them")
        self.here.clear(ENDING_SECONDS)
        for reader in self._readers.values():
            ray.kill(reader)
        self._readers = {}

    def _ask(self, method: str, nodes: Sequence[str], seconds: float) -> list[str]:
        """Calls ``method`` of the readers on ``nodes``, and returns the names of the hosts from which no answer came
        within so many ``seconds``."""
        asked = {getattr(self._readers[node], method).remote(): self._hosts[node] for node in nodes}
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)[0] if asked else []
        answered = set()
        for reference in ready:
            with contextlib.suppress(RayError):
                ray.get(reference)
                answered.add(asked[reference])
        # a node that has left and come back has two readers
        return sorted({*asked.values()} - answered)

    def _answer(self, node: str, method: str, *arguments: Any) -> Any:
        """Returns the answer of the reader on ``node`` to ``method(*arguments)``, and tells the user while it does not
        come. Raises :class:`StateLost` if the reader is lost."""
        began = said = time.monotonic()
        while True:
            asked = getattr(self._readers[node], method).remote(*arguments)
            try:
                return ray.get(asked, timeout=ANSWER_SECONDS)
            except RayTaskError as error:
                raise error.cause if isinstance(error.cause, StateLost) else error from None
            except (ActorDiedError, NodeDiedError):
                raise StateLost(f"{self._hosts[node]} was lost, with clients' states on it") from None
            except RayError as error:
                if not isinstance(error, GetTimeoutError):
                    time.sleep(1)
            now = time.monotonic()
            if now - said >= ANSWER_SECONDS:
                said = now
                self.say(
                    f"no answer from {self._hosts[node]} for {now - began:.0f} s; waiting for clients' states there"
                )
