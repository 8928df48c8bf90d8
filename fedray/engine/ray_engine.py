"""The Ray engine: a cluster found or started, a server actor beside the driver, and the driver's end of it."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedray.config import EngineConfig
from fedray.data.federated import FederatedData
from fedray.engine.opening import opened
from fedray.engine.pool import Pool
from fedray.engine.process import environment, settled
from fedray.engine.ray_pool import RayPool, gpu_share, shortage
from fedray.engine.server import Report
from fedray.errors import ClientError, UserError
from fedray.resolve import Experiment, Seeded

BATCH_SECONDS = 0.1
"""Reports of rounds are handed to the driver together when rounds are shorter than this."""


class ServerActor:
    """Runs the simulation; its client actors are its own, and end with it."""

    def __init__(self, experiment: Experiment, data: list[Any], actors: int) -> None:
        # the reference comes in a list, since Ray would replace a bare one by what it refers to
        self.experiment, (self.data,), self.actors = experiment, data, actors
        self.answers: queue.Queue[bool] = queue.Queue()
        self.stop_asked = threading.Event()

    def run(self, lockstep: bool) -> Iterator[list[Any]]:
        """Open the run, then yield lists of events: what was said, where it starts, and its rounds.

        With ``lockstep`` each round waits for the driver's :meth:`answer`.
        """
        data: FederatedData = ray.get(self.data)
        engine = self.experiment.config.engine
        notes: list[str] = []

        def make_pool(worker: Any) -> tuple[Pool, list[dict[str, Any]]]:
            pool = RayPool(self.experiment, self.data, self.actors, notes.append)
            return pool, pool.machines

        with (
            settled(engine.threads, engine.portable_bits),
            opened(self.experiment, data, make_pool, True) as simulation,
        ):
            simulation.stopping = self.stop_asked
            record = simulation.recorder.note
            for line in notes:
                record(line)
            assert isinstance(simulation.pool, RayPool)
            lines: list[str] = []

            def note(line: str) -> None:
                record(line)
                lines.append(line)

            simulation.pool.note = note
            yield [("started", simulation.server.round)]
            pending: list[Any] = []
            sent = time.monotonic()
            for report in simulation.rounds():
                pending += [("said", line) for line in lines] + [("round", report)]
                lines.clear()
                now = time.monotonic()
                if lockstep or now - sent >= BATCH_SECONDS:
                    yield pending
                    pending, sent = [], now
                if lockstep and self.answers.get():
                    self.stop_asked.set()
            yield pending

    def answer(self, stop: bool) -> None:
        """The driver has dealt with a round of a lockstep run."""
        self.answers.put(stop)

    def stop(self) -> None:
        """Stop after the round in progress."""
        self.stop_asked.set()
        self.answers.put(True)


@contextlib.contextmanager
def cluster(engine: EngineConfig, say: Callable[[str], None]) -> Iterator[bool]:
    """Connected to a Ray cluster: one that this process is connected to, ``engine.address``, this node's, or a new one.

    Gives whether it was started here, so that nobody else can join it.
    """
    if ray.is_initialized():
        yield False
        return
    address = engine.address or os.environ.get("RAY_ADDRESS") or _address_here() or "local"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == "local":
        say("starting Ray on this machine ...")
        # the client actors are the work: Ray would start them at a lower priority than whatever else runs here
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            ray.init(address="local", include_dashboard=False, object_spilling_directory=engine.spill_dir, **quiet)
        except (OSError, ValueError) as error:
            if engine.spill_dir is None:
                raise
            raise UserError(f"Ray did not start with engine.spill_dir={engine.spill_dir}: {_line(error)}") from None
    else:
        say(f"connecting to the Ray cluster at {address} ...")
        try:
            # ray.init may try for minutes where nobody listens
            if ":" in address and "://" not in address:
                _connect(address)
            ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"no Ray cluster answers at engine.address={address}: {_line(error)}") from None
    try:
        yield address == "local"
    finally:
        ray.shutdown()


def _address_here() -> str | None:
    """The address of the cluster that this node belongs to, if it still answers: a dead one leaves its file behind."""
    from ray._private import utils

    address = utils.read_ray_address()
    if not address:
        return None
    try:
        _connect(address, seconds=2)
    except (OSError, ValueError):
        return None
    return address


def _connect(address: str, seconds: float = 10) -> None:
    """Raises OSError or ValueError if nobody listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=seconds).close()


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def actor_count(experiment: Experiment) -> int:
    """``engine.actors`` as a number: ``auto`` fills the cluster, and nobody needs more actors than clients."""
    engine, members = experiment.config.engine, experiment.cohort_size
    if engine.actors == "per_client":
        return members
    if engine.actors != "auto":
        return int(engine.actors)
    resources = ray.cluster_resources()
    fits = []
    if engine.cpus_per_actor:
        fits.append((resources.get("CPU", 0) - engine.server_cpus) / engine.cpus_per_actor)
    if gpu_share(experiment):
        fits.append((resources.get("GPU", 0) - engine.server_gpus) / gpu_share(experiment))
    return max(1, min(int(min(fits) + 1e-9) if fits else (os.cpu_count() or 1), members))


def check_resources(experiment: Experiment, actors: int, started_here: bool) -> None:
    """Refuse at once what a cluster that nobody can join will never have."""
    engine, total = experiment.config.engine, ray.cluster_resources()
    wanted = {
        "CPU": actors * engine.cpus_per_actor + engine.server_cpus,
        "GPU": actors * gpu_share(experiment) + engine.server_gpus,
    }
    lacking = {kind: amount for kind, amount in wanted.items() if amount > total.get(kind, 0) + 1e-9}
    if started_here and lacking:
        asked = " and ".join(f"{amount:g} {kind}" for kind, amount in lacking.items())
        server = {"CPU": engine.server_cpus, "GPU": engine.server_gpus}
        also = " and ".join(f"{amount:g} {kind}" for kind, amount in server.items() if amount)
        share = {"num_cpus": engine.cpus_per_actor, "num_gpus": gpu_share(experiment)}
        raise UserError(
            f"{shortage(actors, share)}; with {also or 'nothing'} for the server, {asked} are wanted: lower "
            "engine.actors, or the share of each"
        )


def run(
    experiment: Experiment,
    data: FederatedData,
    say: Callable[[str], None],
    started: Callable[[int], None],
    on_round: Callable[[Report], bool] | None,
    show: Callable[[Report], None],
    stopping: threading.Event,
) -> None:
    """Run to the end. ``on_round`` is waited for after each round and may stop the run by returning true."""
    with cluster(experiment.config.engine, say) as started_here:
        actors = actor_count(experiment)
        check_resources(experiment, actors, started_here)
        _ship_own_code(experiment)
        reference = ray.put(data)
        for attempt in (1, 2):
            try:
                return _drive(experiment, reference, actors, say, started, on_round, show, stopping)
            except RayActorError as error:
                never_lived = "creation task" in str(error)
                if never_lived or attempt == 2 or not experiment.config.run.checkpoint_every:
                    raise
                say(f"the server actor died ({str(error).splitlines()[0]}); going back to the last checkpoint")
                settings = experiment.config.run.model_copy(update={"resume": "auto"})
                config = experiment.config.model_copy(update={"run": settings})
                experiment = Experiment(**{**vars(experiment), "config": config})


def _ship_own_code(experiment: Experiment) -> None:
    """Let modules of the user's travel to the actors as they are, where their files may not exist."""
    own = [type(experiment.algorithm), experiment.module, experiment.loss, *experiment.metrics.values()]
    if isinstance(experiment.module, Seeded):
        own.append(experiment.module.model)
    for thing in own:
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
        name = module.__name__ if module is not None else "builtins"
        if name.partition(".")[0] not in ("fedray", "torch", "torchvision", "builtins", "__main__"):
            ray.cloudpickle.register_pickle_by_value(module)


def _drive(
    experiment: Experiment,
    data: Any,
    actors: int,
    say: Callable[[str], None],
    started: Callable[[int], None],
    on_round: Callable[[Report], bool] | None,
    show: Callable[[Report], None],
    stopping: threading.Event,
) -> None:
    engine = experiment.config.engine
    say(f"starting the server and {actors} client actor{'s' if actors > 1 else ''} ...")
    server: Any = (
        ray.remote(ServerActor)
        .options(
            num_cpus=engine.server_cpus,
            num_gpus=engine.server_gpus,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
            runtime_env={"env_vars": environment(engine.threads, engine.portable_bits)},
        )
        .remote(experiment, [data], actors)
    )
    asked = False
    try:
        events = server.run.options(num_returns="streaming").remote(on_round is not None)
        deadline = time.monotonic() + engine.start_timeout + 60
        begun = False
        while True:
            ready, _ = ray.wait([events], timeout=0.2)
            if stopping.is_set() and not asked:
                server.stop.remote()
                asked = True
            if not ready:
                if not begun and time.monotonic() > deadline:
                    raise UserError(
                        f"the server actor did not start in {engine.start_timeout:g} s: "
                        f"{shortage(actors, {'num_cpus': engine.cpus_per_actor, 'num_gpus': gpu_share(experiment)})}"
                    )
                continue
            try:
                batch = ray.get(next(events))
            except StopIteration:
                return
            begun = True
            for kind, value in batch:
                if kind == "started":
                    started(value)
                elif kind == "said":
                    say(value)
                else:
                    show(value)
                    if on_round is not None:
                        server.answer.remote(on_round(value))
    except ActorUnschedulableError:
        raise UserError(
            f"engine.server_cpus={engine.server_cpus:g}, engine.server_gpus={engine.server_gpus:g}: this node, where "
            "the server must run, does not have them"
        ) from None
    except RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, (UserError, ClientError)) else error from None
    finally:
        ray.kill(server)
