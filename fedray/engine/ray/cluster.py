"""Finds, joins or starts the Ray cluster of a run, and queries its nodes and resources."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import yaml
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fedray.config import EngineConfig
from fedray.core.rounding import whole_units
from fedray.engine.ray.local_cluster import private_folder, ray_folder, start_cluster
from fedray.engine.ray.tokens import has_token
from fedray.errors import UserError, first_line
from fedray.warning import as_warning

if TYPE_CHECKING:
    # imported for types only: it loads torch, which should happen while Ray starts
    from fedray.experiment.experiment import Experiment

NO_TASK_EVENTS = {"enable_task_events": False}
"""An option for actors. It stops Ray from recording the actors' tasks for its dashboard and ``ray list tasks``, for
which Ray's head keeps 5 KB for each of up to 100,000 tasks."""

RESOURCES = ("CPU", "GPU")
"""The kinds of Ray's resources that fedray asks for and reports."""

SAY_SECONDS = 10.0
"""The seconds after which the user is told what the run waits for, and between two such lines."""

WELCOME_SECONDS = 30.0
"""How long a cluster may take to say whether it asks for a token."""

TRIAL_BUNDLE = 0
"""The index of the bundle in a trial's placement group that is for the trial itself and its server."""


def in_trial_group(bundle: int = -1) -> PlacementGroupSchedulingStrategy | None:
    """Returns the scheduling strategy that makes Ray start an actor within the resources of this process's trial (one
    choice of values in a sweep), or None if the process belongs to no trial.

    Ray has reserved a placement group for each trial, with the resources for all actors of its run. Outside the group
    these actors would wait forever once trials have taken the whole cluster. ``bundle`` is the index of the part of the
    group in which the actor must run; -1 allows any part.
    """
    group = ray.util.get_current_placement_group()
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle) if group else None


def connect(engine: EngineConfig, say: Callable[[str], None], wanted: Callable[[], bool] = lambda: True) -> bool | None:
    """Connects this process to a Ray cluster, unless it is already connected: to the cluster at ``engine.address``, or
    else to the one that this node belongs to, or else to a new one, which
    :func:`~fedray.engine.ray.local_cluster.start_cluster` starts.

    ``say(line)`` shows a line to the user. ``wanted()`` returns whether the connection is still needed; if not, there
    is no second attempt to start a new cluster after a first one has failed. Returns True if the cluster was started
    here, False if it was there already, and None if the process was already connected; then a line says so if
    ``engine.address`` names another place. Raises :class:`UserError` if no
    cluster answers at the address, and :class:`RayNotStarted` if a new one does not start.
    """
    if ray.is_initialized():
        at = ray.get_runtime_context().gcs_address
        if engine.address not in (None, "auto", "local") and not _is_at(engine.address, at):
            given = f"engine.address={engine.address}"
            say(as_warning(f"{given} is not used: this process is connected to the Ray cluster at {at} already"))
        return None
    address = existing_cluster(engine, say)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is None:
        say("starting Ray on this machine ...")
        start_cluster(engine, say, wanted, **quiet)
        return True
    hidden = has_token() and "RAY_AUTH_MODE" not in os.environ
    hint = " (without a token; RAY_AUTH_MODE=token shows yours, if it asks for one)" if hidden else ""
    say(f"connecting to the Ray cluster at {address}{hint} ...")
    try:
        # ray.init may try for minutes if nobody listens at the address, or if it is refused there
        if ":" in address and "://" not in address:
            _connect(address)
            if hidden or address in (engine.address, os.environ.get("RAY_ADDRESS")):
                _require_welcome(address)
        ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster answers at engine.address={address}: {first_line(error)}") from None
    return False


def _is_at(address: str, other: str) -> bool:
    """Returns whether ``address``, which may have the name of a host, is the address ``other``, which has a number."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    if host.startswith("127."):
        host = ray.util.get_node_ip_address()
    return f"{host}:{port}" == other


def existing_cluster(engine: EngineConfig, say: Callable[[str], None] = lambda line: None) -> str | None:
    """Returns the address of the Ray cluster that :func:`connect` would join, such as ``10.0.0.1:6379``, or None if it
    would start a new cluster.

    ``say(line)`` tells the user about a cluster that is not used because it may be somebody else's. Raises
    :class:`UserError` if ``engine.address`` is ``auto`` and this node belongs to no cluster.
    """
    address = engine.address or os.environ.get("RAY_ADDRESS") or None
    if address in (None, "auto"):
        here = _address_here(say)
        if address and not here:
            raise UserError("engine.address=auto: this machine belongs to no Ray cluster of yours")
        address = here
    return None if address == "local" else address


def _address_here(say: Callable[[str], None]) -> str | None:
    """Returns the address of the Ray cluster that this node belongs to, or None.

    ``ray start`` stores the address in a file that every local user can replace, and that stays behind when the cluster
    dies. Whoever connects shows the cluster's token, so the file is believed only if a Ray process that no other user
    can have started belongs to that cluster.
    """
    for folder in dict.fromkeys((private_folder(), ray_folder())):
        file = folder / "ray_current_cluster"
        try:
            # without blocking, because it may be a pipe
            with open(file, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as text:
                address = text.read(100).strip()
            _connect(address, seconds=2)
        except (OSError, ValueError):
            continue
        if address in _clusters_of_own_processes():
            return address
        say(
            f"the Ray cluster at {address} (named by {file}) is not used, because you have no Ray process on this "
            f"machine that belongs to it; if you trust it, set engine.address={address}"
        )
    return None


def _clusters_of_own_processes() -> set[str]:
    """Returns the addresses of the Ray clusters to which Ray processes of this user, or of root, on this machine
    belong."""
    import psutil  # it comes with Ray, and is found once Ray is imported

    flag, found = "--gcs-address=", set()
    for process in psutil.process_iter(["name", "uids", "cmdline"]):
        info = process.info
        if info["name"] == "raylet" and info["uids"] and info["uids"].real in (0, os.getuid()):
            found |= {word.removeprefix(flag) for word in info["cmdline"] or () if word.startswith(flag)}
    return found


def _connect(address: str, seconds: float = 10) -> None:
    """Raises OSError or ValueError if nobody listens at ``address``, which is ``host:port``."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=seconds).close()


def _require_welcome(address: str) -> None:
    """Raises :class:`UserError` if the Ray cluster at ``address`` asks for a token that this process does not show. The
    question takes a second or two, so it is for clusters that may not be this user's."""
    asked = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=WELCOME_SECONDS).stderr
    except subprocess.TimeoutExpired:
        return
    if "AuthenticationError" in answer:
        shown = os.environ.get("RAY_AUTH_MODE") == "token"
        if shown and has_token():
            problem = "the token that you show is another one; compare ~/.ray/auth_token or RAY_AUTH_TOKEN_PATH"
        elif has_token():
            problem = "RAY_AUTH_MODE=token, set before Ray is imported, shows it yours"
        else:
            problem = "copy it from there to ~/.ray/auth_token, and set RAY_AUTH_MODE=token"
        raise UserError(f"the Ray cluster at engine.address={address} asks for a token: {problem}")


def resources(free: bool = False) -> dict[str, float]:
    """Returns how much of each resource the whole cluster has by Ray's count, such as ``{"CPU": 8.0, "GPU": 1.0}``. If
    ``free`` is true, only what nobody uses now is counted."""
    ray_: Any = ray
    found: dict[str, float] = ray_.available_resources() if free else ray_.cluster_resources()
    return found


def living_nodes() -> list[dict[str, Any]]:
    """Returns Ray's description of each node of the cluster that is alive: dicts with keys such as ``NodeID``,
    ``NodeManagerHostname`` and ``Resources``."""
    ray_: Any = ray
    return [node for node in ray_.nodes() if node["Alive"]]


def actor_count(experiment: Experiment) -> int:
    """Returns the number of client actors (processes that train clients) with which a run starts. ``engine.actors`` is
    this number, or ``per_client`` for one actor for each client of a round, or ``auto`` for as many actors as fit on
    the cluster beside the server, but at least one, and at most one for each client of a round."""
    engine, members = experiment.config.engine, experiment.cohort_size
    if engine.actors == "per_client":
        return members
    if engine.actors != "auto":
        return int(engine.actors)
    total, fits = resources(), []
    if engine.cpus_per_actor:
        fits.append((total.get("CPU", 0) - engine.server_cpus) / engine.cpus_per_actor)
    if gpu_share(experiment):
        fits.append((total.get("GPU", 0) - engine.server_gpus) / gpu_share(experiment))
    return max(1, min(whole_units(min(fits)) if fits else (os.cpu_count() or 1), members))


def is_complete() -> bool:
    """Returns whether no further machine can join the cluster, because ``ray up`` made it from a fixed list of hosts
    and all of them have joined. The list is in a file that Ray's launcher leaves on the head node; without it, False is
    returned."""
    try:
        provider = yaml.safe_load((Path.home() / "ray_bootstrap_config.yaml").read_text())["provider"]
        return provider["type"] == "local" and len(living_nodes()) > len(provider["worker_ips"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return False


def check_resources(experiment: Experiment, actors: int, complete: bool) -> None:
    """Checks that the cluster has enough CPUs and GPUs for the server and ``actors`` client actors. ``complete`` says
    that no machine can join the cluster any more. Raises :class:`UserError`, which says what is needed and what there
    is, if resources are missing and the cluster is complete."""
    engine, total = experiment.config.engine, resources()
    wanted = _wanted(experiment, actors)
    lacking = {kind: amount for kind, amount in wanted.items() if amount > total.get(kind, 0) + 1e-9}
    if complete and lacking:
        asked = " and ".join(f"{amount:g} {kind}" for kind, amount in lacking.items())
        server = {"CPU": engine.server_cpus, "GPU": engine.server_gpus}
        also = " and ".join(f"{amount:g} {kind}" for kind, amount in server.items() if amount)
        share = {"num_cpus": engine.cpus_per_actor, "num_gpus": gpu_share(experiment)}
        raise UserError(
            f"{shortage(actors, share)}; with {also or 'nothing'} for the server, {asked} are wanted: lower "
            "engine.actors, or the share of each"
        )


def _wanted(experiment: Experiment, actors: int) -> dict[str, float]:
    """Returns how many CPUs and GPUs a run with ``actors`` client actors takes, that of its server included."""
    engine = experiment.config.engine
    return {
        "CPU": actors * engine.cpus_per_actor + engine.server_cpus,
        "GPU": actors * gpu_share(experiment) + engine.server_gpus,
    }


def why_waiting(experiment: Experiment, actors: int) -> str:
    """Returns why the server or some of ``actors`` client actors of a run can't start now: ``: other jobs use the
    cluster's CPUs``, or ``: the cluster has 2 CPU, and 3 are wanted``. It is empty if they have their place, so that
    only the start itself takes so long."""
    pending = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands.ray_task_actor_demand
    bundles = [each.bundle for demand in pending for each in demand.bundles_by_count]
    asked = {kind for bundle in bundles for kind, amount in bundle.items() if amount}
    total = resources()
    for kind, wanted in _wanted(experiment, actors).items():
        if wanted and kind in asked:
            if wanted > total.get(kind, 0) + 1e-9:
                return f": the cluster has {total.get(kind, 0):g} {kind}, and {wanted:g} are wanted"
            return f": other jobs use the cluster's {kind}s"
    return ""


def gpu_share(experiment: Experiment) -> float:
    """Returns the fraction of a GPU that Ray gives to each client actor, such as 0.5. It is 0 without GPUs, and 1 with
    ``engine.actors_per_gpu=auto`` until the number of actors that can share a GPU has been measured."""
    engine = experiment.config.engine
    if engine.actors_per_gpu == "auto":
        return 1.0
    return 1 / engine.actors_per_gpu if engine.actors_per_gpu else engine.gpus_per_actor


def shortage(actors: int, share: dict[str, float]) -> str:
    """Returns a text for error messages that says what ``actors`` client actors need and what the cluster has:
    ``engine.actors=4 of 1 CPU each; the cluster has 2 CPU (1 free), 0 GPU (0 free)``. ``share`` is what one actor
    needs, a dict with Ray's options ``num_cpus`` and ``num_gpus``."""
    each = {"CPU": share.get("num_cpus", 0), "GPU": share.get("num_gpus", 0)}
    return compared_with_cluster(f"engine.actors={actors} of {in_words(each)} each")


def compared_with_cluster(request: str) -> str:
    """Returns ``request``, a text that says what is needed, followed by the total and the free resources of
    the cluster.

    ``a trial takes 2 CPU`` becomes ``a trial takes 2 CPU; the cluster has 4 CPU (1 free), 0 GPU (0 free)``.
    """
    total, free = resources(), resources(free=True)
    have = ", ".join(f"{total.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in RESOURCES)
    return f"{request}; the cluster has {have}"


def in_words(amounts: Mapping[str, float]) -> str:
    """Returns amounts of resources as a text: ``{"CPU": 1, "GPU": 0.5}`` gives ``1 CPU and 0.5 GPU``. Amounts of 0 are
    left out; if nothing remains, the text is ``no resources``."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in amounts.items() if amount) or "no resources"


def missing_on_nodes(check: Callable[[], str | None], timeout: float, say: Callable[[str], None]) -> str | None:
    """Finds out whether a node of the cluster lacks something that the run needs, such as a compiler. For this,
    ``check()`` is called on all nodes; it returns a text that says what is missing, or None.

    Returns the first text, followed by the node's name, or None if no node lacks anything. ``say(line)`` shows a line
    to the user while nodes are waited for. Raises :class:`UserError` if a node does not answer within ``timeout``
    seconds.
    """
    asked = [(node["NodeManagerHostname"], answer) for node, answer in ask_nodes(check, timeout, say)]
    if late := [name for name, answer in asked if answer is None]:
        raise UserError(f"{', '.join(late)} did not start a process in engine.start_timeout={timeout:g} s")
    return next((f"{missing} on {name}" for name, answer in asked if (missing := ray.get(answer))), None)


def ask_nodes(what: Callable[[], Any], timeout: float, say: Callable[[str], None]) -> list[tuple[dict[str, Any], Any]]:
    """Calls ``what()`` on all nodes of the cluster at the same time. ``say(line)`` shows a line to the user while nodes
    are waited for.

    Returns a pair for each node, sorted by the nodes' names: Ray's description of the node (see :func:`living_nodes`),
    and Ray's reference to the result of ``what()``, or None if the node has not answered within ``timeout`` seconds.
    """
    # Ray takes functions only, and what() may be another callable
    function = ray.remote(lambda: what())
    asked = {}
    for node in sorted(living_nodes(), key=lambda node: str(node["NodeManagerHostname"])):
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[function.options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote()] = node
    left, waited = list(asked), 0.0
    while left and waited < timeout:
        _, left = ray.wait(left, num_returns=len(left), timeout=min(SAY_SECONDS, timeout - waited))
        waited += SAY_SECONDS
        if left and waited < timeout:
            names = ", ".join(asked[each]["NodeManagerHostname"] for each in left)
            say(f"waiting for {names} to start a process ({waited:.0f} s) ...")
    return [(node, None if answer in left else answer) for answer, node in asked.items()]
