"""The Ray engine: a server actor runs the rounds, and the driver shows them and can stop the run."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedray.data.federated import FederatedData
from fedray.engine.driver import Driver, Event, Events, Order, Started, copying
from fedray.engine.environment import runtime_env
from fedray.engine.ray.client_actor import create_actor
from fedray.engine.ray.cluster import (
    NO_TASK_EVENTS,
    SAY_SECONDS,
    TRIAL_BUNDLE,
    actor_count,
    check_resources,
    gpu_share,
    in_trial_group,
    is_complete,
    shortage,
    why_waiting,
)
from fedray.engine.ray.gpu_sharing import shared_gpus
from fedray.engine.ray.server import ServerActor
from fedray.engine.ray.start import RayStart
from fedray.engine.ray.stored import StoredData, store
from fedray.errors import EXPLAINED, ClientError, UserError
from fedray.experiment.experiment import Experiment
from fedray.tracking.failure import write_failure
from fedray.tracking.folder import RunFolder
from fedray.usercode.modules import is_library


class RayEngine:
    """The engine that runs an experiment on a Ray cluster, when :meth:`run` is called. ``experiment`` says what is
    computed, ``data`` has the samples and says which client holds each, and ``start`` makes the connection to the
    cluster.

    :meth:`run` can be called only once. It puts the data into Ray's object store, which all processes of a node share,
    and then gives up this object's own reference to them.
    """

    def __init__(self, experiment: Experiment, data: FederatedData, start: RayStart) -> None:
        self.experiment, self.data, self.start = experiment, data, start

    def computing(self) -> AbstractContextManager[None]:
        """Returns a context in which the events of :meth:`run` must be asked for: any, as other processes compute."""
        return contextlib.nullcontext()

    def user_code(self) -> AbstractContextManager[None]:
        """Returns a context for code of the user's that the run waits for: any, as other processes compute."""
        return contextlib.nullcontext()

    def run(self, driver: Driver) -> Events:
        """Runs the experiment to its end, or until ``driver`` asks for a stop. Yields the run's events.

        If the server actor (the Ray process that runs the rounds) dies, it is started again once, and the run continues
        from the last checkpoint. If it dies again, or the run has no checkpoints, :class:`ClientError` is raised.
        Raises :class:`UserError` if the cluster lacks the resources for the actors.
        """
        experiment = self.experiment.with_fixed_place()
        complete = self.start.ready() or is_complete()
        check_resources(experiment, 1, complete)
        code = [
            type(experiment.algorithm),
            *experiment.task.functions,
            *experiment.module.code,
            *self.data.user_classes,
        ]
        code += [part for change in experiment.training.augment for part in getattr(change, "code", ())]
        code += [experiment.selection, *experiment.upload]
        code += experiment.robust.user_code.values() if experiment.robust is not None else ()
        ship_user_code(code)
        stored = store(self.data)
        del self.data
        experiment = shared_gpus(experiment, stored, driver.say)
        actors = actor_count(experiment)
        check_resources(experiment, actors, complete)
        for again in (True, False):
            server = _Server(experiment, stored, actors, driver)
            try:
                return (yield from server.drive())
            except (RayActorError, OutOfMemoryError, ServerLost) as error:
                if "creation task" in str(error):
                    raise
                full = isinstance(error, OutOfMemoryError) or "low on memory" in str(error)
                failure = ClientError(
                    f"the server actor on {platform.node()} {'ran out of memory' if full else 'died'}"
                )
                if not again or not experiment.config.run.checkpoint_every:
                    server.record(failure)
                    raise failure from None
                driver.say(f"{failure}; going back to the last checkpoint")
                experiment = experiment.with_run_settings(resume="auto")
            except GeneratorExit:
                raise
            except BaseException as error:
                # of a callback, for example; the server writes its own errors itself
                server.record(error)
                raise


def ship_user_code(objects: Iterable[Any]) -> None:
    """Makes Ray send the code of the user's modules to actors, because the actors' machines may not have these modules.
    ``objects`` are modules, or classes, functions and instances that stand for the modules in which they were defined.
    Modules of installed packages are left out."""
    for thing in objects:
        home = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
        module = sys.modules.get(home or "")
        name = module.__name__ if module is not None else "builtins"
        if name != "__main__" and not is_library(name):
            pickling: Any = ray.cloudpickle
            pickling.register_pickle_by_value(module)


class ServerLost(ClientError):
    """Raised if something is asked of a server whose process has died. The run can go on."""


def _known_cause(error: RayTaskError) -> Exception:
    """Returns the error that ended a call of an actor, without Ray's traceback if it is one of fedray's."""
    cause = error.cause
    return cause if isinstance(cause, EXPLAINED) else error


class _Server:
    """The server actor of a run, as the driver sees it, and the client actors that the driver starts with it."""

    def __init__(self, experiment: Experiment, data: StoredData, actors: int, driver: Driver) -> None:
        self.experiment, self.data, self.actors, self.driver = experiment, data, actors, driver
        self.begun = False

    def drive(self) -> Events:
        """Starts the actors, and yields what the server reports until the run has ended."""
        experiment, driver, engine = self.experiment, self.driver, self.experiment.config.engine
        here = ray.get_runtime_context().get_node_id()
        driver.say(f"starting the server and {self.actors} client actor{'s' if self.actors > 1 else ''} ...")
        created = [create_actor(experiment, self.data, here) for _ in range(self.actors)]
        server = self._create(here, created)
        try:
            ended = server.run.remote(driver.lockstep)
            yield from self._follow(server)
            # raises the error that ended the run
            ray.get(ended)
        except ActorUnschedulableError:
            raise UserError(
                f"engine.server_cpus={engine.server_cpus:g}, engine.server_gpus={engine.server_gpus:g}: this node, "
                "where the server must run, does not have them"
            ) from None
        except RayTaskError as error:
            raise _known_cause(error) from None
        finally:
            for actor in (server, *created):
                ray.kill(actor)

    def _create(self, here: str, created: list[Any]) -> Any:
        engine = self.experiment.config.engine
        # in a sweep the server runs in the bundle of its trial
        group = in_trial_group(TRIAL_BUNDLE)
        return (
            ray.remote(ServerActor)
            .options(
                num_cpus=0 if group else engine.server_cpus,
                num_gpus=engine.server_gpus,
                max_concurrency=4,
                scheduling_strategy=group or NodeAffinitySchedulingStrategy(here, soft=False),
                runtime_env=runtime_env(engine.threads, engine.portable_bits),
                **NO_TASK_EVENTS,
            )
            .remote(self.experiment, self.data, created)
        )

    def _follow(self, server: Any) -> Events:
        """Yields the events of ``server`` until the run has ended, and passes the driver's orders to the server."""
        # the driver asks for each batch of events, because a streaming generator takes milliseconds more per batch
        coming = server.next.remote(None)
        asked, began = False, time.monotonic()
        heard = said = began
        while True:
            if self.driver.stopping.is_set() and not asked:
                server.stop.remote()
                asked = True
            try:
                batch = ray.get(coming, timeout=0.2)
            except GetTimeoutError:
                now = time.monotonic()
                if heard == began:
                    self._check_start(now - began)
                if not self.begun and now - max(heard, said) >= SAY_SECONDS:
                    said = now
                    why = why_waiting(self.experiment, self.actors)
                    self.driver.say(f"waiting for the server to start ({now - began:.0f} s){why} ...")
                continue
            if batch is None:
                return
            heard = time.monotonic()
            coming = server.next.remote((yield from self._events(batch, server)))

    def _events(self, batch: Iterable[tuple[str, Any]], server: Any) -> Generator[Event, Order | None, Order | None]:
        """Yields the events of a batch, and shows its lines. Returns the order for the next round, or None if the
        server waits for none."""

        def ask(method: str, *arguments: Any) -> Any:
            try:
                return ray.get(server.ask.remote(method, *arguments))
            except RayTaskError as error:
                raise _known_cause(error) from None
            except RayActorError as error:
                raise ServerLost("the server's process has died; the next step goes back to a checkpoint") from error

        order, event = None, None
        for kind, value in batch:
            if kind == "said":
                self.driver.say(value)
                continue
            if kind == "started":
                self.begun = True
            event = Started(value, ask) if kind == "started" else replace(value, look=copying(self.experiment, ask))
            order = yield event
        if event is None or not self.driver.lockstep:
            return None
        return replace(order or Order(), stop=self.driver.stopping.is_set())

    def _check_start(self, waited: float) -> None:
        engine = self.experiment.config.engine
        if waited > engine.start_timeout + 60:
            share = {"num_cpus": engine.cpus_per_actor, "num_gpus": gpu_share(self.experiment)}
            raise UserError(
                f"the server actor did not start in {engine.start_timeout:g} s: {shortage(self.actors, share)}"
            )

    def record(self, failure: BaseException) -> None:
        """Writes into the run folder that ``failure`` has ended the run, unless the server actor, which is gone now,
        has written there already how the run ended."""
        if not self.begun:
            return
        folder = RunFolder(self.experiment.config, self.experiment.inputs, self.experiment.defaults)
        # another run may already have the folder
        with contextlib.suppress(UserError), folder.lock(lambda line: None, patience=SAY_SECONDS):
            if not (folder.path / "summary.json").exists():
                write_failure(folder.path, failure)
