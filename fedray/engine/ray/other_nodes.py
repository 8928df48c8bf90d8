"""Gives the server access to what is on the other nodes of a run: clients' states, and sums of uploads."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import ActorDiedError, NodeDiedError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.numpy import save_file

from fedray.engine.ray.client_actor import ASKED
from fedray.engine.ray.cluster import NO_TASK_EVENTS, SAY_SECONDS, living_nodes
from fedray.engine.ray.node_actor import NodeActor
from fedray.engine.state.states import ENDING_SECONDS, StateFile, StateFolder
from fedray.engine.tasks import Handle, PhaseTask, ScoreTask, Task
from fedray.errors import StateLost
from fedray.experiment.experiment import Experiment

ANSWER_SECONDS = 5.0
"""An actor that has not answered for so many seconds is asked for a sign of life."""

LOST_SECONDS = 12.0
"""A request may have been lost in the network if there was no sign of life for so many seconds, and is made again."""

LIFE_SECONDS = 2.0
"""How long a sign of life may take of a node whose client actors give none."""

START_SECONDS = 60.0
"""How long an actor may take to start that is needed only to remove clients' states."""


class OtherNodes:
    """The nodes of a run besides the server's, through which the server reaches the clients' states (what clients keep
    between rounds) there. Each has a :class:`NodeActor`, a Ray process that is started when it is first needed.

    ``here`` is the folder with clients' states on the server's node. ``say(line)`` shows a line to the user, and
    ``note(line)`` writes one into the run's log. The attribute ``saved_at``, which the server sets, is a function that
    returns the time (``time.monotonic()``) of the run's last checkpoint, or minus infinity if there is none.
    """

    def __init__(
        self, experiment: Experiment, here: StateFolder, say: Callable[[str], None], note: Callable[[str], None]
    ) -> None:
        self.experiment, self.here, self.say, self.note = experiment, here, say, note
        self.saved_at: Callable[[], float] = lambda: -math.inf
        self._actors: dict[str, Any] = {}
        self._starting = threading.Lock()
        self._hosts: dict[str, str] = {}

    def add(self, node: str, host: str) -> None:
        """Notes that a client actor of the run has started on ``node`` (Ray's id), a machine with the name ``host``. If
        clients keep states between rounds, states that this run left there when it was killed before are removed."""
        if node == self.here.node or node in self._hosts:
            return
        self._hosts[node] = host
        if self.experiment.keeps_states:
            self._answer(node, "begin", patient=True)

    def actor(self, node: str) -> Any:
        """Returns Ray's handle of the :class:`NodeActor` on ``node`` (Ray's id), which is started if there is none."""
        # a checkpoint asks from several threads
        with self._starting:
            if node not in self._actors:
                place = NodeAffinitySchedulingStrategy(node, soft=False)
                options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": place, **NO_TASK_EVENTS}
                remote: Any = cast(Any, ray.remote)(concurrency_groups={ASKED: 1})(NodeActor)
                self.note(f"node actor: on {self._hosts[node]}")
                self._actors[node] = remote.options(**options).remote(self.experiment, self.here.node)
            return self._actors[node]

    def forget(self, node: str) -> None:
        """Ends the :class:`NodeActor` on ``node`` (Ray's id) after it has failed. :meth:`actor` starts a new one when
        it is needed."""
        actor = self._actors.pop(node, None)
        if actor is not None:
            ray.kill(actor)

    def near(self, handle: Handle | None, node: str) -> Handle | None:
        """Returns a handle (a reference to data) by which a client actor on ``node`` (Ray's id) can read the data of
        ``handle``. If ``handle`` is a file on another node, with a client's state or an earlier model, the result is
        Ray's reference to the file's content. Any other handle, and None, is returned as it is."""
        if not isinstance(handle, StateFile) or handle.node == node:
            return handle
        if handle.node == self.here.node:
            return ray.put(self.here.read(handle))
        return self.actor(handle.node).read.remote(handle)

    def within_reach(self, task: Task, node: str, copies: dict[Any, Any]) -> Task:
        """Returns ``task`` with its handles replaced by handles that an actor on ``node`` can resolve. ``copies`` has
        those that Ray's store has already, and gets the new ones."""
        if isinstance(task, ScoreTask):
            return replace(task, states=[self.near(state, node) for state in task.states])
        if not isinstance(task, PhaseTask):
            return task
        # several clients may have received the same model
        received = {each: copies.get(each) or self.near(each, node) for each in set(task.received)}
        copies |= {each: there for each, there in received.items() if there is not each}
        states = [self.near(state, node) for state in task.states]
        return replace(task, states=states, received=[received[each] for each in task.received])

    def store(self, file: StateFile, target: Path) -> None:
        """Writes the client's state in ``file``, on any node, to the file ``target`` on the server's node."""
        if file.node == self.here.node:
            self.here.store(file, target)
        else:
            save_file(self._answer(file.node, "read", file), target)

    def drop(self, files: Iterable[StateFile]) -> None:
        """Removes ``files``, which are no longer needed, on whatever nodes they are. Does not wait for other nodes."""
        by_node: dict[str, list[StateFile]] = {}
        for file in files:
            by_node.setdefault(file.node, []).append(file)
        self.here.drop(by_node.pop(self.here.node, ()))
        for node, there in by_node.items():
            self.actor(node).drop.remote(there)

    def hosts_of(self, files: Iterable[StateFile]) -> list[str]:
        """Returns the names of the machines, other than the server's, on which ``files`` are."""
        nodes = {file.node for file in files}
        return sorted(self._hosts[node] for node in nodes if node in self._hosts)

    def check(self, node: str, heard: float, asks: bool = False) -> None:
        """Gives up the clients' states on ``node`` (Ray's id) if it has been silent for too long: raises
        :class:`StateLost`, by which the run goes back to its last checkpoint. ``heard`` is the time
        (``time.monotonic()``) of the node's last sign of life. If ``asks`` is true, the node is asked for another one
        first, and nothing is raised if it answers.

        The silence is too long if it has lasted for ``engine.answer_timeout`` seconds, and for as long as the time from
        the last checkpoint to the last sign of life. By then waiting has cost as much as doing the work of that time
        again. Without checkpoints states are never given up.
        """
        waited = time.monotonic() - heard
        if waited >= max(self.experiment.config.engine.answer_timeout, heard - self.saved_at()):
            if asks and ray.wait([self.actor(node).alive.remote()], timeout=LIFE_SECONDS)[0]:
                return
            raise StateLost(f"no answer from {self._hosts[node]} for {waited:.0f} s, and clients' states are on it")

    def clear(self, nodes: Iterable[str]) -> None:
        """Removes the run's client states from ``nodes`` (Ray's ids), as far as they answer within seconds."""
        if self.experiment.keeps_states:
            self._ask("begin", [node for node in nodes if node in self._actors], SAY_SECONDS)

    def close(self, silent: Collection[str] = ()) -> None:
        """Removes all clients' states of the run, also from the server's node, and ends the actors on other nodes. It
        is called after the client actors were told to end. The nodes ``silent`` (Ray's ids) give no answer, and are not
        waited for. If states stay there, the user is told."""
        if self.experiment.keeps_states:
            self._remove_states(silent)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}

    def _remove_states(self, skipped: Collection[str]) -> None:
        silent = self._ask("end", [node for node in self._actors if node not in skipped], SAY_SECONDS)
        silent += [self._hosts[node] for node in self._actors if node in skipped]
        # a host that was lost may be back as another node, on which no client actor has started yet
        back = {
            node["NodeID"]: node["NodeManagerHostname"]
            for node in (living_nodes() if silent else ())
            if node["NodeManagerHostname"] in silent and node["NodeID"] not in (self.here.node, *self._actors)
        }
        self._hosts |= back
        silent = [host for host in silent if host not in back.values()] + self._ask("end", list(back), START_SECONDS)
        if silent:
            self.say(f"clients' states are left on {', '.join(silent)}, as no answer comes: fedray clean removes them")
        self.here.clear(ENDING_SECONDS)

    def _ask(self, method: str, nodes: Sequence[str], seconds: float) -> list[str]:
        """Calls ``method`` of the actors on ``nodes``, and returns the names of the hosts from which no answer came
        within so many ``seconds``."""
        asked = {getattr(self.actor(node), method).remote(): self._hosts[node] for node in nodes}
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)[0] if asked else []
        answered = set()
        for reference in ready:
            with contextlib.suppress(RayError):
                ray.get(reference)
                answered.add(asked[reference])
        # a node that has left and come back has two actors
        return sorted({*asked.values()} - answered)

    def _answer(self, node: str, method: str, *arguments: Any, patient: bool = False) -> Any:
        """Returns the answer of the actor on ``node`` to ``method(*arguments)``, however long it works on it. Raises
        :class:`StateLost` if the node is lost, or, unless this method is ``patient``, gives no sign of life until it is
        given up (:meth:`check`); the user is told meanwhile."""
        asked: Any = None
        question: Any = None
        heard = said = time.monotonic()
        while True:
            actor = self.actor(node)
            try:
                asked = asked or getattr(actor, method).remote(*arguments)
                ready, _ = ray.wait([asked, *([question] if question else [])], timeout=ANSWER_SECONDS)
                if asked in ready:
                    return ray.get(asked)
                now = time.monotonic()
                if question in ready:
                    ray.get(question)
                    if now - heard > LOST_SECONDS:
                        asked = None
                    question, heard = None, now
                else:
                    question = actor.alive.remote()
            except RayTaskError as error:
                raise error.cause if isinstance(error.cause, StateLost) else error from None
            except (ActorDiedError, NodeDiedError):
                if node not in {each["NodeID"] for each in living_nodes()}:
                    raise StateLost(f"{self._hosts[node]} was lost, with clients' states on it") from None
                # the actor alone has died: another one finds the files; another thread may have started it already
                with self._starting:
                    if self._actors.get(node) is actor:
                        del self._actors[node]
                asked = question = None
            except RayError:
                asked = question = None
                time.sleep(1)
            if not patient:
                self.check(node, heard)
            silence = time.monotonic() - max(heard, said)
            if silence >= SAY_SECONDS:
                said = time.monotonic()
                line = f"no answer from {self._hosts[node]} for {said - heard:.0f} s; waiting for clients' states there"
                self.say(line)


def files_of(task: Task) -> list[StateFile]:
    """Returns the files that ``task`` needs: clients' states, and models that clients received in earlier rounds."""
    handles = [*getattr(task, "states", ()), *getattr(task, "received", ())]
    return [handle for handle in handles if isinstance(handle, StateFile)]
