"""Determines which resources (CPUs, GPUs) a trial of a sweep needs, and how many trials the cluster runs at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from fedray.config import EngineConfig, load
from fedray.core.rounding import whole_units
from fedray.engine.ray.cluster import RESOURCES, compared_with_cluster, in_words, resources
from fedray.engine.ray.gpu_sharing import fitting
from fedray.engine.ray.start import RayStart
from fedray.engine.ray.stored import store
from fedray.errors import UserError
from fedray.experiment.custom import CustomObjects
from fedray.experiment.placement import Device, device_of_cluster
from fedray.experiment.resolve import resolve
from fedray.tracking.folder import device_of

Bundles = list[dict[str, float]]
"""The resources of a trial's placement group: the first bundle is for the trial's process with its server, and each
further one for a client actor."""

RELEASE_SECONDS = 3.0
"""The time to wait for resources that are not free: Ray needs a moment to release those of an earlier sweep."""

SMALLEST = 0.0001
"""The smallest amount of a resource that Ray can count."""

HERE = 0.001
"""A trial's share of the resource ``node:<address>``, of which each node has 1. It keeps the processes of trials on
this node, whose disk has the sweep's folder."""


OF_MEMORY = ("algorithm.", "model.", "train.batch_size", "train.local_", "train.optimizer", "train.precision")
"""The beginnings of keys on which depends how much of a GPU's memory a trial takes."""

MOST_ON_A_GPU = 8
"""The most trials that share a GPU unless the user says how many. This is a guess: it has not been measured."""


@dataclass(frozen=True)
class Placed:
    """How trials are placed on a cluster: what it adds to their ``settings``, the resources of each as ``bundles``, how
    many run at the same time (``concurrent``), and for how many seconds the first may wait for its start."""

    settings: Mapping[str, Any]
    bundles: Bundles
    concurrent: int
    start_timeout: float


def placed(
    bases: Sequence[Mapping[str, Any]],
    runs: Iterable[Path],
    custom: CustomObjects,
    start: RayStart,
    limit: int | None,
    say: Callable[[str], None],
) -> Placed:
    """Decides how trials are placed on the cluster to which ``start`` has connected.

    ``bases`` are settings of trials, which have the same keys ``engine.*``. If trials share a GPU, the one that takes
    most of its memory counts. ``runs`` are the folders of their runs, of which some may have begun. ``custom`` has the
    data set and the user's objects, ``limit`` is how many trials may run at the same time (None: as many as fit), and
    ``say`` shows a line.
    """
    started_here, base = start.ready(), bases[0]
    asked = load(base).engine
    device = device_of_trials(runs, start.gpus(), started_here)
    settings = engine_of_trials(asked, base, limit, device)
    if settings.get("engine.actors_per_gpu", asked.actors_per_gpu) == "auto":
        sizes = {repr([(key, each[key]) for key in sorted(each) if key.startswith(OF_MEMORY)]): each for each in bases}
        settings["engine.actors_per_gpu"] = min(
            trials_per_gpu({**each, **settings}, custom, say) for each in sizes.values()
        )
    engine = load({**base, **settings}).engine
    bundles = bundles_of(engine)
    concurrent, fewer = count_concurrent_trials(bundles, limit, started_here)
    if fewer:
        say(fewer)
    return Placed(settings, bundles, concurrent, engine.start_timeout)


def device_of_trials(runs: Iterable[Path], gpus: float, is_this_machine: bool) -> Device:
    """Returns the device, ``cpu`` or ``cuda``, that ``engine.device=auto`` stands for in all trials that one command,
    or one call of :func:`fedray.tune`, runs.

    ``runs`` are the folders of the runs of these trials. If some have begun, the result is the device on which they
    run. Otherwise it depends on the cluster: ``gpus`` is its number of GPUs, and ``is_this_machine`` says whether the
    cluster is this machine alone.
    """
    begun = next((device for folder in runs if (device := device_of(folder))), None)
    return begun or device_of_cluster(gpus, is_this_machine)


def engine_of_trials(
    engine: EngineConfig, base: Mapping[str, Any], max_concurrent_trials: int | None, device: Device = "cpu"
) -> dict[str, Any]:
    """Decides with which processes, and on which device, each trial of a sweep is computed. Returns settings
    ``engine.*`` as a dict with dotted keys; they replace those of the configuration in all trials.

    If the user did not set ``engine.kind``, a trial on a cluster of one node is a single process. On a cluster of
    several nodes it is a server on this node and one client actor (a process that trains clients) on any node. With
    ``engine.kind=ray`` and ``engine.actors=auto``, the client actors of all concurrent trials fill the cluster.

    If trials use GPUs and the user did not say how many trials share a GPU, ``engine.actors_per_gpu`` is ``auto``,
    which the caller then replaces by the result of :func:`trials_per_gpu`.

    Args:
        engine: The section ``engine`` of the configuration.
        base: The settings that the user made, by dotted key.
        max_concurrent_trials: The number of concurrent trials; None means one.
        device: The device that replaces ``engine.device=auto``. It is ``cuda`` instead if the user set
            ``engine.actors_per_gpu`` or ``engine.gpus_per_actor``.

    Raises:
        UserError: A setting is not possible in a sweep, such as a GPU for the server.
    """
    several = len([node for node in ray.nodes() if node["Alive"]]) > 1
    kind = base.get("engine.kind") or ("ray" if several else "local")
    if engine.server_gpus:
        raise UserError(f"engine.server_gpus={engine.server_gpus:g}: in a sweep the servers have no GPU; use 0")
    if kind != "ray" and engine.portable_bits:
        raise UserError("engine.portable_bits=true: in a sweep use engine.kind=ray with it")
    has_share = bool(engine.actors_per_gpu or engine.gpus_per_actor)
    settings: dict[str, Any] = {"engine.kind": kind}
    if engine.device == "auto":
        settings["engine.device"] = "cuda" if has_share else device
    if settings.get("engine.device", engine.device) == "cuda" and not has_share:
        settings["engine.actors_per_gpu"] = "auto"
    if kind != "ray":
        return settings
    if engine.actors == "per_client":
        raise UserError("engine.actors=per_client: in a sweep, give a number of client actors")
    if engine.actors == "auto":
        cpus, each = ray.cluster_resources().get("CPU", 0), engine.cpus_per_actor
        fill = whole_units(cpus / (max_concurrent_trials or 1) / each) if each else 1
        settings["engine.actors"] = 1 if several and "engine.kind" not in base else max(1, fill)
    return settings


def trials_per_gpu(settings: Mapping[str, Any], custom: CustomObjects, say: Callable[[str], None]) -> int:
    """Returns how many trials (runs with different hyper-parameters) share a GPU: as many as fit into its memory, but
    no more than :data:`MOST_ON_A_GPU`. If a trial has client actors (processes that train clients), the result is how
    many client actors share a GPU.

    ``settings`` is the configuration of a trial by dotted key, and ``custom`` has the data set and the user's objects.
    The memory that one process takes is measured on the cluster, and ``say`` is called with lines that tell the user
    the result. Raises :class:`UserError` if not even one process fits, or if there is no GPU.
    """
    if not resources().get("GPU"):
        raise UserError("the cluster has no GPU for the trials: use engine.device=cpu")
    # of an engine that needs no GPU in this process
    experiment, data = resolve(load({**settings, "engine.kind": "ray"}), custom)
    return fitting(experiment, store(data), MOST_ON_A_GPU, "a trial", say)


def bundles_of(engine: EngineConfig) -> Bundles:
    """Returns the resources that Ray reserves for one trial of a hyper-parameter search: a list of "bundles", dicts
    such as ``{"CPU": 1, "GPU": 0.5}``. The first is for the trial's main process, and has an entry that keeps it on
    this node. With ``engine.kind=ray`` there is a further bundle for each client actor (a process that trains clients).

    ``engine`` has the settings ``engine.*`` of the trial, with a value in place of every ``auto``. Raises
    :class:`UserError` for an amount that is smaller than Ray can count.
    """
    here = {f"node:{ray.util.get_node_ip_address()}": HERE}
    share = {kind: amount for kind, amount in _share(engine).items() if amount}
    if any(amount < SMALLEST for amount in share.values()):
        raise UserError(
            f"engine.cpus_per_actor={engine.cpus_per_actor:g} is less than Ray can count: use 0 or {SMALLEST:g}"
        )
    if engine.kind != "ray":
        return [{**share, **here}]
    assert isinstance(engine.actors, int)
    server = {"CPU": engine.server_cpus} if engine.server_cpus else {}
    return [{**server, **here}, *([dict(share)] * engine.actors if share else [])]


def _share(engine: EngineConfig) -> dict[str, float]:
    """Returns the CPUs and GPUs of one client actor, or of a trial that is a single process:
    ``{"CPU": 1, "GPU": 0.5}``."""
    gpus = 1 / engine.actors_per_gpu if isinstance(engine.actors_per_gpu, int) else engine.gpus_per_actor
    return {"CPU": engine.cpus_per_actor, "GPU": gpus}


def count_concurrent_trials(bundles: Bundles, asked: int | None, started_here: bool) -> tuple[int, str | None]:
    """Returns how many trials of a sweep run at the same time, and a line for the user if this number is smaller than
    ``asked`` (otherwise None).

    ``bundles`` are the resources of one trial (:func:`bundles_of`). ``asked`` is the number that the user set; if it is
    None, as many trials run as fit on the cluster. ``started_here`` says that this program has started the cluster. No
    node can join such a cluster, so :class:`UserError` is raised if not even one trial fits. On any other cluster the
    number is at least 1.
    """
    total, free = ray.cluster_resources(), ray.available_resources()
    fits = _fitting([node["Resources"] for node in ray.nodes() if node["Alive"]], bundles)
    if not fits and started_here:
        raise UserError(f"a trial does not fit: {trial_shortage(bundles)}")
    need = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in RESOURCES}
    deadline = time.monotonic() + RELEASE_SECONDS
    while any(free.get(kind, 0) + 1e-9 < total.get(kind, 0) for kind in RESOURCES) and time.monotonic() < deadline:
        time.sleep(0.1)
        free = ray.available_resources()
    # another program may be using the rest of the cluster
    idle = [whole_units(free.get(kind, 0) / need[kind]) for kind in RESOURCES if need[kind]]
    possible = max(1, min([fits, *idle] if idle else [asked or int(total.get("CPU", 1))]))
    if asked is None or asked <= possible:
        return asked or possible, None
    return possible, f"{possible} trial{'s' if possible > 1 else ''} at once, not {asked}: {trial_shortage(bundles)}"


def _fitting(nodes: Sequence[Mapping[str, float]], bundles: Bundles) -> int:
    """Returns how many trials with the resources ``bundles`` fit on the nodes of the cluster at the same time.
    ``nodes`` has the resources of each node; each bundle goes to the first node with room for it."""
    left = [dict(node) for node in nodes]
    for count in range(10_000):
        for bundle in bundles:
            node = next((n for n in left if all(n.get(k, 0) + 1e-9 >= v for k, v in bundle.items())), None)
            if node is None:
                return count
            for kind, amount in bundle.items():
                node[kind] -= amount
    return 10_000


def trial_shortage(bundles: Bundles) -> str:
    """Returns a text for messages about trials that do not fit on the cluster, such as
    ``a trial takes 2 CPU; the cluster has 4 CPU (1 free), 0 GPU (0 free)``. ``bundles`` are the resources of one trial
    (:func:`bundles_of`)."""
    first, *others = ({kind: bundle[kind] for kind in RESOURCES if bundle.get(kind)} for bundle in bundles)
    parts = [in_words(first)] if first or not others else []
    if others:
        parts.append(f"{len(others)} client actor{'s' if len(others) > 1 else ''} of {in_words(others[0])}")
    return compared_with_cluster(f"a trial takes {' and '.join(parts)}")
