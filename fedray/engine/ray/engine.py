"""The Ray engine: a server actor runs the rounds, and the driver shows them and can stop the run."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, OutOfMemoryError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedray.core.torch_state import neutral
from fedray.data.federated import FederatedData
from fedray.engine.driver import Driver
from fedray.engine.opening import open_run
from fedray.engine.pool import Pool
from fedray.engine.process import computing_process, environment
from fedray.engine.ray.client_actor import create_actor
from fedray.engine.ray.cluster import (
    NO_TASK_EVENTS,
    TRIAL_BUNDLE,
    actor_count,
    check_resources,
    gpu_share,
    in_trial_group,
    shortage,
)
from fedray.engine.ray.gpu_sharing import shared_gpus
from fedray.engine.ray.pool import RayPool
from fedray.engine.ray.start import RayStart
from fedray.engine.ray.stored import StoredData, store
from fedray.engine.run import Run
from fedray.errors import ClientError, StateLost, UserError, first_line
from fedray.experiment.experiment import Experiment
from fedray.usercode.modules import is_library

BATCH_SECONDS = 0.1
"""If rounds take less than this many seconds, the server reports several rounds to the driver at a time."""


class ServerActor:
    """The Ray actor that runs the rounds. ``actors`` are the client actors, which the driver starts before the server
    to save time. The driver calls :meth:`run`, and meanwhile :meth:`next` repeatedly, to learn what has happened in
    the run."""

    def __init__(self, experiment: Experiment, data: StoredData, actors: list[Any]) -> None:
        self.experiment, self.data, self.actors = experiment, data, actors
        self.events: queue.Queue[list[Any] | None] = queue.Queue()
        self.answers: queue.Queue[bool] = queue.Queue()
        self.stop_asked = threading.Event()
        self.opened: Run | None = None

    def run(self, lockstep: bool) -> None:
        """Runs the experiment to its end. With ``lockstep`` the server waits for the driver's answer after each round,
        which the driver sends by :meth:`next`."""
        try:
            for events in self._run(lockstep):
                self.events.put(events)
        finally:
            self.events.put(None)

    def next(self, answer: bool | None) -> list[Any] | None:
        """Waits for the next events of the run and returns them as a list of pairs, or None at the end of the run.

        The events are ("said", line), ("started", number of rounds that are already done) and ("round", report).
        ``answer`` says whether the run must stop after the round that was returned last; it is None if the run does not
        wait for an answer.
        """
        if answer is not None:
            self.answers.put(answer)
        return self.events.get()

    def _run(self, lockstep: bool) -> Iterator[list[Any]]:
        """Opens the run and yields lists of events, as :meth:`next` returns them."""
        data = self.data.get()
        engine, here = self.experiment.config.engine, ray.get_runtime_context().get_node_id()
        notes: list[str] = []

        def make_pool(worker: Any) -> tuple[Pool, list[dict[str, Any]]]:
            pool = RayPool(self.experiment, self.data, self.actors, worker.clients.states, notes.append)
            return pool, pool.machines

        with (
            computing_process(engine.threads, engine.portable_bits, self.experiment.precision),
            open_run(self.experiment, data, make_pool, True, not lockstep, self._say, here) as run,
        ):
            if run is None:
                return
            self.opened, run.stopping = run, self.stop_asked
            record = run.recorder.note
            for line in notes:
                record(line)
            assert isinstance(run.pool, RayPool)
            lines: list[str] = []

            def note(line: str) -> None:
                record(line)
                lines.append(line)

            run.pool.note = note
            yield [("started", run.state.server.round)]
            pending: list[Any] = []
            sent = time.monotonic()
            for report in run.rounds():
                pending += [("said", line) for line in lines] + [("round", report)]
                lines.clear()
                now = time.monotonic()
                if lockstep or now - sent >= BATCH_SECONDS:
                    yield pending
                    pending, sent = [], now
                if lockstep and self.answers.get():
                    self.stop_asked.set()
            yield pending

    @neutral()
    def look(self, what: str, name: str | None = None) -> Any:
        """Returns a part of the last round for a callback, as :meth:`fedray.engine.run.Run.look` does. The driver calls
        it while the run waits for an answer."""
        assert self.opened is not None
        return self.opened.look(what, name)

    def _say(self, line: str) -> None:
        self.events.put([("said", line)])

    def stop(self) -> None:
        """Ends the run after the round in progress, when the user has asked for it."""
        self.stop_asked.set()
        self.answers.put(True)


class RayEngine:
    """Runs ``experiment`` on ``data`` on a Ray cluster, when :meth:`run` is called. The argument ``start`` is the
    :class:`RayStart` that makes the connection to the cluster.

    :meth:`run` can be called only once. It puts ``data`` into Ray's object store, which all processes of a node share,
    and then drops the instance's own reference to them.
    """

    def __init__(self, experiment: Experiment, data: FederatedData, start: RayStart) -> None:
        self.experiment, self.data, self.start = experiment, data, start

    def run(self, driver: Driver) -> None:
        """Runs the experiment to its end. ``driver`` shows the rounds to the user, and can stop the run.

        If the server actor dies, it is started again once, and the run continues from the last checkpoint. If
        clients' states are lost with their node, the run goes back to the last checkpoint, too, up to
        ``engine.max_retries`` times.
        """
        # actors have the working directory that this process had when it joined Ray
        fixed = self.experiment.config.run.with_fixed_place()
        experiment = _with_run_settings(self.experiment, {"output": fixed.output, "working_copy": fixed.working_copy})
        started_here = self.start.ready()
        check_resources(experiment, 1, started_here)
        code = [
            type(experiment.algorithm),
            *experiment.task.functions,
            *experiment.module.code,
            *self.data.user_classes,
        ]
        code += [part for change in experiment.training.augment for part in getattr(change, "code", ())]
        code += experiment.upload
        ship_user_code(code)
        stored = store(self.data)
        del self.data
        experiment = shared_gpus(experiment, stored, driver.say)
        actors = actor_count(experiment)
        check_resources(experiment, actors, started_here)
        left = {RayActorError: 1, StateLost: experiment.config.engine.max_retries}
        while True:
            try:
                return _drive(experiment, stored, actors, driver)
            except (RayActorError, OutOfMemoryError, StateLost) as error:
                kind = StateLost if isinstance(error, StateLost) else RayActorError
                left[kind] -= 1
                never_lived = "creation task" in str(error)
                if never_lived or left[kind] < 0 or not experiment.config.run.checkpoint_every:
                    raise
                what = "" if kind is StateLost else "the server actor died: "
                driver.say(f"{what}{first_line(error)}; going back to the last checkpoint")
                experiment = _with_run_settings(experiment, {"resume": "auto"})


def _with_run_settings(experiment: Experiment, values: dict[str, Any]) -> Experiment:
    settings = experiment.config.run.model_copy(update=values)
    return replace(experiment, config=experiment.config.model_copy(update={"run": settings}))


def ship_user_code(objects: Iterable[Any]) -> None:
    """Makes Ray send the user's modules to actors by value, because the actors' machines may not have these modules.
    They are the modules among ``objects``, and the modules in which the other objects were defined."""
    for thing in objects:
        home = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
        module = sys.modules.get(home or "")
        name = module.__name__ if module is not None else "builtins"
        if name != "__main__" and not is_library(name):
            pickling: Any = ray.cloudpickle
            pickling.register_pickle_by_value(module)


def _show(events: Iterable[tuple[str, Any]], driver: Driver, experiment: Experiment, server: Any) -> bool | None:
    """Passes events of the server to the driver. Returns whether the run must stop, or None if the driver has no
    callback for rounds."""

    def look(what: str, name: str | None = None) -> Any:
        return ray.get(server.look.remote(what, name))

    answer = None
    for kind, value in events:
        if kind == "started":
            driver.started(value)
        elif kind == "said":
            driver.say(value)
        else:
            answer = driver.watch(value, experiment, look)
    return answer


def _drive(experiment: Experiment, data: StoredData, actors: int, driver: Driver) -> None:
    engine = experiment.config.engine
    here = ray.get_runtime_context().get_node_id()
    driver.say(f"starting the server and {actors} client actor{'s' if actors > 1 else ''} ...")
    created = [create_actor(experiment, data, here) for _ in range(actors)]
    # in a sweep the server runs in the bundle of its trial
    group = in_trial_group(TRIAL_BUNDLE)
    server: Any = (
        ray.remote(ServerActor)
        .options(
            num_cpus=0 if group else engine.server_cpus,
            num_gpus=engine.server_gpus,
            max_concurrency=4,
            scheduling_strategy=group or NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={"env_vars": environment(engine.threads, engine.portable_bits)},
            **NO_TASK_EVENTS,
        )
        .remote(experiment, data, created)
    )
    asked = False
    try:
        ended = server.run.remote(driver.on_round is not None)
        # the driver asks for each batch of events, because a streaming generator takes milliseconds more per batch
        coming = server.next.remote(None)
        deadline = time.monotonic() + engine.start_timeout + 60
        begun = False
        while True:
            if driver.stopping.is_set() and not asked:
                server.stop.remote()
                asked = True
            try:
                batch = ray.get(coming, timeout=0.2)
            except GetTimeoutError:
                if not begun and time.monotonic() > deadline:
                    raise UserError(
                        f"the server actor did not start in {engine.start_timeout:g} s: "
                        f"{shortage(actors, {'num_cpus': engine.cpus_per_actor, 'num_gpus': gpu_share(experiment)})}"
                    ) from None
                continue
            if batch is None:
                # raises the error that ended the run
                ray.get(ended)
                return
            begun = True
            coming = server.next.remote(_show(batch, driver, experiment, server))
    except ActorUnschedulableError:
        raise UserError(
            f"engine.server_cpus={engine.server_cpus:g}, engine.server_gpus={engine.server_gpus:g}: this node, where "
            "the server must run, does not have them"
        ) from None
    except RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, (UserError, ClientError)) else error from None
    finally:
        for actor in (server, *created):
            ray.kill(actor)
