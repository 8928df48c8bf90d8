"""Determines which resources a trial needs, and how many trials fit on the cluster at the same time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from fedray.config import EngineConfig
from fedray.core.rounding import whole_units
from fedray.engine.ray.cluster import RESOURCES, compared_with_cluster, in_words
from fedray.errors import UserError

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


def engine_of_trials(
    engine: EngineConfig, base: Mapping[str, Any], max_concurrent_trials: int | None
) -> dict[str, Any]:
    """Returns the settings ``engine.*`` of all trials, as dotted keys. ``base`` has the keys that the user set.

    If the user did not set ``engine.kind``, a trial is a single process on a cluster of one node. On a cluster of
    several nodes it is a server on this node and a client actor on any node. With ``engine.kind=ray`` and
    ``engine.actors=auto``, the client actors of the ``max_concurrent_trials`` concurrent trials (None means one) fill
    the cluster. Raises :class:`UserError` for settings that have no meaning in a sweep.
    """
    several = len([node for node in ray.nodes() if node["Alive"]]) > 1
    kind = base.get("engine.kind") or ("ray" if several else "local")
    if engine.actors_per_gpu == "auto":
        raise UserError("engine.actors_per_gpu=auto: in a sweep, give how many trials or client actors share a GPU")
    if engine.server_gpus:
        raise UserError(f"engine.server_gpus={engine.server_gpus:g}: in a sweep the servers have no GPU; use 0")
    if kind != "ray" and engine.portable_bits:
        raise UserError("engine.portable_bits=true: in a sweep use engine.kind=ray with it")
    if engine.device == "cuda" and not _share(engine)["GPU"]:
        raise UserError(
            "engine.device=cuda: in a sweep, give how many trials or client actors share a GPU, as in "
            "engine.actors_per_gpu=1"
        )
    settings: dict[str, Any] = {"engine.kind": kind}
    if engine.device == "auto":
        settings["engine.device"] = "cuda" if _share(engine)["GPU"] else "cpu"
    if kind != "ray":
        return settings
    if engine.actors == "per_client":
        raise UserError("engine.actors=per_client: in a sweep, give a number of client actors")
    if engine.actors == "auto":
        cpus, each = ray.cluster_resources().get("CPU", 0), engine.cpus_per_actor
        fill = whole_units(cpus / (max_concurrent_trials or 1) / each) if each else 1
        settings["engine.actors"] = 1 if several and "engine.kind" not in base else max(1, fill)
    return settings


def unused_gpus(engine: EngineConfig, gpus: float) -> str | None:
    """Returns a line for the user if the cluster has GPUs (``gpus``) that the trials will not use, and else None.

    In a sweep ``engine.device=auto`` uses no GPU, because it is not known how many trials can share one.
    """
    if not gpus or engine.device != "auto" or _share(engine)["GPU"]:
        return None
    return (
        f"engine.device=auto: trials run on CPUs, and leave {gpus:g} GPU{'s' if gpus > 1 else ''} unused: "
        "engine.actors_per_gpu says how many trials, or their client actors, share one"
    )


def bundles_of(engine: EngineConfig) -> Bundles:
    """Returns the bundles of a trial whose ``engine.*`` settings are complete.

    Raises :class:`UserError` for an amount that is smaller than Ray can count.
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
    """Returns the CPUs and GPUs of a client actor, or of a trial that is one process."""
    gpus = 1 / engine.actors_per_gpu if isinstance(engine.actors_per_gpu, int) else engine.gpus_per_actor
    return {"CPU": engine.cpus_per_actor, "GPU": gpus}


def count_concurrent_trials(bundles: Bundles, asked: int | None, started_here: bool) -> tuple[int, str | None]:
    """Returns how many trials run at the same time, and a line for the user if these are fewer than ``asked``.

    If ``asked`` is None, as many run as fit on the cluster. Raises :class:`UserError` if not even one fits on a
    cluster that was ``started_here``, which no node can join.
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
    """Returns how many copies of ``bundles`` fit on ``nodes``; each bundle goes to the first node with room for it."""
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
    """Returns a text that says what a trial needs and what the cluster has."""
    first, *others = ({kind: bundle[kind] for kind in RESOURCES if bundle.get(kind)} for bundle in bundles)
    parts = [in_words(first)] if first or not others else []
    if others:
        parts.append(f"{len(others)} client actor{'s' if len(others) > 1 else ''} of {in_words(others[0])}")
    return compared_with_cluster(f"a trial takes {' and '.join(parts)}")
