"""The Ray actors that train and evaluate clients."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import ray
from ray.exceptions import ActorDiedError, NodeDiedError, RayError, RayTaskError

from fedray.core.tree import Node
from fedray.engine.clients import Clients
from fedray.engine.environment import runtime_env
from fedray.engine.process import computing_process, require_device
from fedray.engine.ray.cluster import NO_TASK_EVENTS, gpu_share, in_trial_group
from fedray.engine.ray.stored import StoredData
from fedray.engine.state.packing import Enclosed
from fedray.engine.state.states import StateFolder
from fedray.engine.tasks import Handle, PhaseResult, PhaseTask, Task
from fedray.engine.worker import Worker
from fedray.errors import StateLost, Unreachable
from fedray.experiment.experiment import Experiment

Sums: TypeAlias = dict[str, Mapping[Node, Any]]
"""The partial sums of a phase: for each upload, by name, the values of some nodes of the summation tree."""

ASKED = "asked"
"""The concurrency group of the methods that a client actor answers while it does a task."""

FETCH_SECONDS, LONGEST_FETCH_SECONDS = 15.0, 600.0
"""How long an actor waits for data from another node, before it gives its task back: at first, and at most."""


class ClientActor:
    """A Ray process that trains and evaluates clients. The server sends it tasks, which name the clients. Any client
    actor can do any task. :meth:`start` must be called before the first one.

    ``data`` is the data set in Ray's object store, and ``server`` the id that Ray gives the server's node.
    """

    def __init__(self, experiment: Experiment, data: StoredData, server: str) -> None:
        self.experiment, self.data, self.server = experiment, data, server
        self._running: int | None = None

    def start(self) -> tuple[str, dict[str, Any]]:
        """Prepares the process for its tasks: checks the device, gets the data, and builds the model. It is called
        once. This is no part of ``__init__``, because torch's settings belong to a thread, and Ray runs ``__init__`` in
        another thread than the other methods.

        Returns Ray's id of the actor's node, and a description of the process as a dict
        (:meth:`fedray.engine.worker.Worker.describe`), which has everything that the bits of its results depend on.
        Raises :class:`UserError` if the node lacks something that the run needs, such as a usable GPU.
        """
        experiment, engine = self.experiment, self.experiment.config.engine
        self._settled = computing_process(engine.threads, engine.portable_bits, experiment.precision)
        self._settled.__enter__()
        node = ray.get_runtime_context().get_node_id()
        states = StateFolder.of_run(experiment.config, node, self.server)
        require_device(experiment.device, experiment.precision)
        self.worker = Worker(Clients(experiment, self.data.get(), states, experiment.device, fetch=Fetcher()))
        return node, self.worker.describe()

    def run(self, number: int, task: Task) -> Any:
        """Does ``task`` and returns its result: a :class:`PhaseResult` for training, an :class:`EvalResult` or a
        :class:`ScoreResult`. The sums in a :class:`PhaseResult` are NumPy arrays, so that Ray can send them to the
        server. ``number`` identifies the task; each task that is sent to this actor has a greater one than those
        before."""
        self._running = number
        if self.experiment.keeps_states and isinstance(task, PhaseTask):
            # or else the folder could be removed at the end of the run, and be made anew by a state of this task; if it
            # can't be made now, writing the state says so
            with contextlib.suppress(OSError):
                self.worker.clients.states.hold()
        try:
            result = self.worker.run(task)
            if isinstance(result, PhaseResult):
                for partial in result.sums.values():
                    partial.pack()
            return result
        finally:
            self._running = None

    def run_apart(self, number: int, task: Task) -> tuple[tuple[Any, int], Sums]:
        """Does ``task`` as :meth:`run` does, but returns the sums of the clients' uploads as a separate object, which
        Ray can leave on this node.

        Returns ``((result, size), sums)``: the result without its sums, the size of the sums in bytes, and the sums
        themselves (:data:`Sums`). The sums are empty if the task trains no clients.
        """
        result, sums = self.run(number, task), Sums()
        for name, partial in result.sums.items() if isinstance(result, PhaseResult) else ():
            sums[name], partial.nodes = partial.nodes, {}
        return (result, sum(value.nbytes for nodes in sums.values() for value in nodes.values())), sums

    @ray.method(concurrency_group=ASKED)
    def progress(self) -> int | None:
        """Returns the number (see :meth:`run`) of the task that the actor is doing, or None if it is doing nothing. The
        actor answers at once, even while it does a task, so the server takes the answer as a sign of life."""
        return self._running


def create_actor(experiment: Experiment, data: StoredData, server: str) -> Any:
    """Creates a :class:`ClientActor` and returns Ray's handle of it, without waiting for it to run. It runs wherever
    the cluster has room or, in a trial of a sweep, within the resources that Ray has reserved for the trial (a
    placement group). ``data`` is the data set in Ray's object store, and ``server`` is Ray's id of the server's
    node."""
    engine, remote = experiment.config.engine, cast(Any, ray.remote)
    return (
        remote(concurrency_groups={ASKED: 1})(ClientActor)
        .options(
            num_cpus=engine.cpus_per_actor,
            num_gpus=gpu_share(experiment),
            scheduling_strategy=in_trial_group() or "SPREAD",
            max_restarts=0,
            # otherwise a request that the network has lost holds up those that follow it
            allow_out_of_order_execution=True,
            runtime_env=runtime_env(engine.threads, engine.portable_bits),
            **NO_TASK_EVENTS,
        )
        .remote(experiment, data, server)
    )


class Fetcher:
    """Gets the data to which a task only refers, such as a broadcast, for a client actor. It is called like a function,
    with a handle (a reference to the data), and returns the data. ``patience`` is the number of seconds for which a
    call waits for data from another node."""

    def __init__(self) -> None:
        self.patience = FETCH_SECONDS

    def __call__(self, handle: Handle) -> Any:
        """Returns the data that ``handle`` refers to: a broadcast as a :class:`Packed`, or a client's state as a dict
        of arrays.

        Raises :class:`StateLost` if the data are lost with the process that held them. Raises :class:`Unreachable` if
        they do not come within ``patience`` seconds or the network fails. As the network may only be slow, the next
        calls then wait twice as long, but at most :data:`LONGEST_FETCH_SECONDS`.
        """
        if isinstance(handle, Enclosed):
            return handle.packed
        try:
            return ray.get(handle, timeout=self.patience)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, StateLost) else error from None
        except (ActorDiedError, NodeDiedError):
            raise StateLost("a client's state is gone with its node") from None
        except RayError:
            self.patience = min(2 * self.patience, LONGEST_FETCH_SECONDS)
            raise Unreachable from None
