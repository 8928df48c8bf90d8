"""The Ray actors that simulate clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import ray
from ray.exceptions import ActorDiedError, NodeDiedError, RayError, RayTaskError

from fedray.core.tree import Node
from fedray.engine.clients import Clients
from fedray.engine.process import computing_process, environment, require_device
from fedray.engine.ray.cluster import NO_TASK_EVENTS, gpu_share, in_trial_group
from fedray.engine.ray.stored import StoredData
from fedray.engine.state.packing import Enclosed
from fedray.engine.state.states import StateFolder
from fedray.engine.tasks import Handle, PhaseResult, Task
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
    """A Ray process that does tasks, such as training the clients that a task names. Any client actor can simulate
    any client."""

    def __init__(self, experiment: Experiment, data: StoredData, server: str) -> None:
        self.experiment, self.data, self.server = experiment, data, server
        self._running: int | None = None

    def start(self) -> tuple[str, dict[str, Any]]:
        """Sets the actor up. This is no part of ``__init__``, because torch's settings belong to a thread, and Ray runs
        ``__init__`` in another thread than tasks.

        Returns Ray's name of the actor's node, and a description of the process
        (:func:`fedray.engine.process.describe`) with everything that the bits of its results depend on. Raises
        :class:`UserError` if the node lacks something that the run needs.
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
        """Does ``task`` and returns its result, in a form that Ray can send to the server. ``number`` is greater than
        those of the tasks that the actor was sent before."""
        self._running = number
        try:
            result = self.worker.run(task)
            if isinstance(result, PhaseResult):
                for partial in result.sums.values():
                    partial.pack()
            return result
        finally:
            self._running = None

    def run_apart(self, number: int, task: Task) -> tuple[tuple[Any, int], Sums]:
        """Does ``task`` as :meth:`run` does, but returns the partial sums over clients separately, so that they can
        stay on this node. Returns the result without them with their bytes, and the sums by the upload's name."""
        result, sums = self.run(number, task), Sums()
        for name, partial in result.sums.items() if isinstance(result, PhaseResult) else ():
            sums[name], partial.nodes = partial.nodes, {}
        return (result, sum(value.nbytes for nodes in sums.values() for value in nodes.values())), sums

    @ray.method(concurrency_group=ASKED)
    def progress(self) -> int | None:
        """Returns the number of the task that the actor does now, or None. It answers at once, whatever the
        actor does."""
        return self._running


def create_actor(experiment: Experiment, data: StoredData, server: str) -> Any:
    """Starts a :class:`ClientActor` and returns Ray's handle of it. The actor runs wherever the cluster has room, or,
    in a sweep, within the placement group of this process's trial. ``server`` is Ray's name of the server's node."""
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
            runtime_env={"env_vars": environment(engine.threads, engine.portable_bits)},
            **NO_TASK_EVENTS,
        )
        .remote(experiment, data, server)
    )


class Fetcher:
    """Fetches the data that tasks refer to, for one actor."""

    def __init__(self) -> None:
        self.patience = FETCH_SECONDS

    def __call__(self, handle: Handle) -> Any:
        """Returns the data that ``handle`` refers to, a broadcast or a client's state.

        Raises :class:`StateLost` if the data are lost with the process that held them, and :class:`Unreachable` if they
        do not come, because the network fails, say. As it may also be slow, data are waited for twice as long from then
        on.
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
