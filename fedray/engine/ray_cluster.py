"""The Ray cluster of a run: found, joined or started, and asked what it has."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedray.config import EngineConfig
from fedray.core.rounding import whole
from fedray.errors import UserError, first_line

if TYPE_CHECKING:
    # it imports torch, and Ray is started meanwhile
    from fedray.experiment import Experiment

INLINE_BYTES = 4 << 20
"""Results up to this size come with an actor's answer. Ray's limit is 100 kB: beyond it the object store is asked
several times for each, and while all cores train it is slow to answer. Only a cluster that is started here has it."""

UNRECORDED = {"enable_task_events": False}
"""The option with which actors are created: of each task that is recorded, for its dashboard and the command ``ray list
tasks``, Ray's head keeps 5 KB, of up to 100,000 tasks."""

RESOURCES = ("CPU", "GPU")
"""The kinds of Ray's resources that fedray asks for and reports."""

OWN_BUNDLE = 0
"""The bundle of a trial's placement group in which the trial itself is, and the server beside it."""


def in_group(bundle: int = -1) -> PlacementGroupSchedulingStrategy | None:
    """Within the placement group that this process is part of, if it is part of one: a trial's, which holds what the
    actors of its run need. They would wait for ever for anything else where trials have taken all that there is."""
    group = ray.util.get_current_placement_group()
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle) if group else None


def connect(engine: EngineConfig, say: Callable[[str], None]) -> bool | None:
    """Connect to a Ray cluster: ``engine.address``, this node's, or a new one, if this process is connected to none.

    Gives whether it was started here, or None if there was a connection.
    """
    if ray.is_initialized():
        return None
    address = engine.address or os.environ.get("RAY_ADDRESS") or _address_here() or "local"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == "local":
        say("starting Ray on this machine ...")
        # the client actors are the work: Ray would start them at a lower priority than whatever else runs here
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_max_direct_call_object_size", str(INLINE_BYTES))
        try:
            ray.init(address="local", include_dashboard=False, object_spilling_directory=engine.spill_dir, **quiet)
        except (OSError, ValueError) as error:
            if engine.spill_dir is None:
                raise
            raise UserError(
                f"Ray did not start with engine.spill_dir={engine.spill_dir}: {first_line(error)}"
            ) from None
    else:
        say(f"connecting to the Ray cluster at {address} ...")
        try:
            # ray.init may try for minutes where nobody listens
            if ":" in address and "://" not in address:
                _connect(address)
            ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"no Ray cluster answers at engine.address={address}: {first_line(error)}") from None
    return address == "local"


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
    return max(1, min(whole(min(fits)) if fits else (os.cpu_count() or 1), members))


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


def gpu_share(experiment: Experiment) -> float:
    """The GPU fraction of a client actor; all of one while it is not yet known how many can share it."""
    engine = experiment.config.engine
    if engine.actors_per_gpu == "auto":
        return 1.0
    return 1 / engine.actors_per_gpu if engine.actors_per_gpu else engine.gpus_per_actor


def shortage(actors: int, share: dict[str, float]) -> str:
    """What so many client actors need and what the cluster has, in words. ``share`` has Ray's options num_cpus and
    num_gpus of one actor."""
    each = {"CPU": share.get("num_cpus", 0), "GPU": share.get("num_gpus", 0)}
    return compared_with_cluster(f"engine.actors={actors} of {in_words(each)} each")


def compared_with_cluster(request: str) -> str:
    """``request``, and after it what the cluster has in all and what of it is free.

    ``a trial takes 2 CPU`` becomes ``a trial takes 2 CPU; the cluster has 4 CPU (1 free), 0 GPU (0 free)``.
    """
    total, free = ray.cluster_resources(), ray.available_resources()
    have = ", ".join(f"{total.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in RESOURCES)
    return f"{request}; the cluster has {have}"


def in_words(amounts: Mapping[str, float]) -> str:
    """Amounts of resources by their kind, without those that are 0: ``1 CPU and 0.5 GPU``, or ``no resources``."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in amounts.items() if amount) or "no resources"
