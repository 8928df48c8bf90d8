"""The Ray actors of a run: those that simulate clients, and those that read clients' states on other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.exceptions import ActorDiedError, NodeDiedError, RayError, RayTaskError

from fedray.engine.clients import Clients
from fedray.engine.process import computing_process, environment, require_device
from fedray.engine.ray.cluster import NO_TASK_EVENTS, gpu_share, in_trial_group
from fedray.engine.ray.stored import StoredData
from fedray.engine.state.packing import Enclosed
from fedray.engine.state.states import ENDING_SECONDS, State, StateFile, StateFolder
from fedray.engine.tasks import Handle, PhaseResult, Task
from fedray.engine.worker import Worker
from fedray.errors import StateLost, Unreachable
from fedray.experiment.experiment import Experiment

ASKED = "asked"
"""The concurrency group of the methods that a client actor answers while it does a task."""

FETCH_SECONDS = 20.0
"""How long an actor waits for data from another node, before it gives its task back."""


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
        self.worker = Worker(Clients(experiment, self.data.get(), states, experiment.device, fetch=get))
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


class StateReader:
    """An actor on a node other than the server's, which gives access to the files with clients' states there. It sends
    states to the server for a checkpoint, and to client actors on other nodes. It survives the client actors of its
    node, so that their files stay accessible."""

    def __init__(self, experiment: Experiment, server: str) -> None:
        self.states = StateFolder.of_run(experiment.config, ray.get_runtime_context().get_node_id(), server)

    def read(self, file: StateFile) -> State:
        """Returns the arrays of the client state in ``file``, a file on this node, by name."""
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


def get(handle: Handle) -> Any:
    """Returns the data that ``handle`` refers to, a broadcast or a client's state.

    Raises :class:`StateLost` if the data are lost with the process that held them, and :class:`Unreachable` if they do
    not come, because the network fails, say.
    """
    if isinstance(handle, Enclosed):
        return handle.packed
    try:
        return ray.get(handle, timeout=FETCH_SECONDS)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, StateLost) else error from None
    except (ActorDiedError, NodeDiedError):
        raise StateLost("a client's state is gone with its node") from None
    except RayError:
        raise Unreachable from None
