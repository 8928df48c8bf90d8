"""The Ray actors of a run: those that simulate clients, and those that read clients' states on other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from fedray.engine.clients import Clients
from fedray.engine.process import computing_process, environment, require_device
from fedray.engine.ray.cluster import NO_TASK_EVENTS, gpu_share, in_trial_group
from fedray.engine.ray.stored import StoredData
from fedray.engine.state.packing import Enclosed
from fedray.engine.state.states import State, StateFile, StateFolder
from fedray.engine.tasks import Handle, PhaseResult, Task
from fedray.engine.worker import Worker
from fedray.errors import StateLost, UserError, first_line
from fedray.experiment.experiment import Experiment


class ClientActor:
    """A Ray process that does tasks, such as training the clients that a task names. Any client actor can simulate
    any client."""

    def __init__(self, experiment: Experiment, data: StoredData, server: str) -> None:
        engine = experiment.config.engine
        self._settled = computing_process(engine.threads, engine.portable_bits, experiment.precision)
        self._settled.__enter__()
        self.device, self.node = experiment.device, ray.get_runtime_context().get_node_id()
        states = StateFolder.of_run(experiment.config, self.node, server)
        self._refusal: UserError | None = None
        try:
            require_device(self.device, experiment.precision)
            self.worker = Worker(Clients(experiment, data.get(), states, self.device, fetch=get))
        except UserError as error:
            # if __init__ raised the error, Ray would report a dead actor, with the cause only as text
            self._refusal = error

    def describe(self) -> tuple[str, dict[str, Any]]:
        """Returns Ray's name of the actor's node, and a description of the process
        (:func:`fedray.engine.process.describe`) with everything that the bits of its results depend on. Raises
        :class:`UserError` if the actor could not be set up."""
        if self._refusal is not None:
            raise self._refusal
        return self.node, self.worker.describe()

    def run(self, task: Task) -> Any:
        """Does ``task`` and returns its result, in a form that Ray can send to the server."""
        result = self.worker.run(task)
        if isinstance(result, PhaseResult):
            for partial in result.sums.values():
                partial.pack()
        return result


def create_actor(experiment: Experiment, data: StoredData, server: str) -> Any:
    """Starts a :class:`ClientActor` and returns Ray's handle of it. The actor runs wherever the cluster has room, or,
    in a sweep, within the placement group of this process's trial. ``server`` is Ray's name of the server's node."""
    engine = experiment.config.engine
    return (
        ray.remote(ClientActor)
        .options(
            num_cpus=engine.cpus_per_actor,
            num_gpus=gpu_share(experiment),
            scheduling_strategy=in_trial_group() or "SPREAD",
            max_restarts=0,
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

    def clear(self) -> None:
        """Removes all files with clients' states of this run from this node."""
        self.states.clear()


def get(handle: Handle) -> Any:
    """Returns the data that ``handle`` refers to, a broadcast or a client's state. Raises :class:`StateLost` if the
    data were lost with their node."""
    if isinstance(handle, Enclosed):
        return handle.packed
    try:
        return ray.get(handle)
    except RayError as error:
        raise StateLost(f"a client's state is gone with its node: {first_line(error)}") from None
