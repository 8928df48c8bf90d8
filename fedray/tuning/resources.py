"""What a trial takes of a cluster, how many fit side by side, and the sums for whoever asked for more."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from fedray.config import EngineConfig
from fedray.core.rounding import whole
from fedray.errors import UserError

Bundles = list[dict[str, float]]
"""Resources of a trial's placement group: first the trial's own (and its server's), then those of its client actors."""

KINDS = ("CPU", "GPU")

RELEASE_SECONDS = 3.0
"""How long Ray may take to see that what a sweep before this one had is free again."""

SMALLEST = 0.0001
"""Ray's unit of resources."""

HERE = 0.001
"""A trial's share of the resource that every node has under its own name: by it trials are kept on the node whose disk
has the sweep's folder."""


def engine_of_trials(engine: EngineConfig, given: Mapping[str, Any], concurrency: int | None) -> dict[str, Any]:
    """The settings ``engine.*`` of all trials, as dotted keys. ``given``: those that the user set.

    On one machine a trial is one process, on several it is a server here and a client actor anywhere, unless said
    otherwise; client actors fill the cluster, divided by how many trials there are to be at once.
    """
    several = len([node for node in ray.nodes() if node["Alive"]]) > 1
    kind = given.get("engine.kind") or ("ray" if several else "local")
    if engine.actors_per_gpu == "auto":
        raise UserError("engine.actors_per_gpu=auto: in a sweep, give how many trials or client actors share a GPU")
    if engine.server_gpus:
        raise UserError(f"engine.server_gpus={engine.server_gpus:g}: in a sweep the servers have no GPU; use 0")
    if kind == "local" and engine.portable_bits:
        raise UserError("engine.portable_bits=true: in a sweep use engine.kind=ray with it")
    if engine.device == "cuda" and not _share(engine)["GPU"]:
        raise UserError(
            "engine.device=cuda: in a sweep, give how many trials or client actors share a GPU, as in "
            "engine.actors_per_gpu=1"
        )
    settings: dict[str, Any] = {"engine.kind": kind}
    if engine.device == "auto":
        settings["engine.device"] = "cuda" if _share(engine)["GPU"] else "cpu"
    if kind == "local":
        return settings
    if engine.actors == "per_client":
        raise UserError("engine.actors=per_client: in a sweep, give a number of client actors")
    if engine.actors == "auto":
        cpus, each = ray.cluster_resources().get("CPU", 0), engine.cpus_per_actor
        fill = whole(cpus / (concurrency or 1) / each) if each else 1
        settings["engine.actors"] = 1 if several and "engine.kind" not in given else max(1, fill)
    return settings


def unused_gpus(engine: EngineConfig, gpus: float) -> str | None:
    """A line for whoever leaves a cluster's GPUs unused in a sweep, where none can be measured for sharing it."""
    if not gpus or engine.device != "auto" or _share(engine)["GPU"]:
        return None
    return (
        f"engine.device=auto: trials run on CPUs, and leave {gpus:g} GPU{'s' if gpus > 1 else ''} unused: "
        "engine.actors_per_gpu says how many trials, or their client actors, share one"
    )


def bundles_of(engine: EngineConfig) -> Bundles:
    """The bundles of a trial."""
    here = {f"node:{ray.util.get_node_ip_address()}": HERE}
    share = {kind: amount for kind, amount in _share(engine).items() if amount}
    if any(amount < SMALLEST for amount in share.values()):
        raise UserError(
            f"engine.cpus_per_actor={engine.cpus_per_actor:g} is less than Ray can count: use 0 or {SMALLEST:g}"
        )
    if engine.kind == "local":
        return [{**share, **here}]
    assert isinstance(engine.actors, int)
    server = {"CPU": engine.server_cpus} if engine.server_cpus else {}
    return [{**server, **here}, *([dict(share)] * engine.actors if share else [])]


def _share(engine: EngineConfig) -> dict[str, float]:
    """Of a client actor, and of a trial that is one process."""
    gpus = 1 / engine.actors_per_gpu if isinstance(engine.actors_per_gpu, int) else engine.gpus_per_actor
    return {"CPU": engine.cpus_per_actor, "GPU": gpus}


def at_once(bundles: Bundles, asked: int | None, started_here: bool) -> tuple[int, str | None]:
    """How many trials run side by side, and a line about it if that is fewer than ``asked``.

    Raises :class:`UserError` for what a cluster that nobody can join will never have.
    """
    total, free = ray.cluster_resources(), ray.available_resources()
    fits = _fitting([node["Resources"] for node in ray.nodes() if node["Alive"]], bundles)
    if not fits and started_here:
        raise UserError(f"a trial does not fit: {shortage(bundles)}")
    need = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in KINDS}
    deadline = time.monotonic() + RELEASE_SECONDS
    while any(free.get(kind, 0) + 1e-9 < total.get(kind, 0) for kind in KINDS) and time.monotonic() < deadline:
        time.sleep(0.1)
        free = ray.available_resources()
    idle = [whole(free.get(kind, 0) / need[kind]) for kind in KINDS if need[kind]]
    # another program may be using the rest of the cluster
    possible = max(1, min([fits, *idle] if idle else [asked or int(total.get("CPU", 1))]))
    if asked is None:
        return possible, None
    if asked <= possible:
        return asked, None
    return possible, f"{possible} trial{'s' if possible > 1 else ''} at once, not {asked}: {shortage(bundles)}"


def _fitting(nodes: Sequence[Mapping[str, float]], bundles: Bundles) -> int:
    """How many copies of ``bundles`` fit, each bundle on one node, the first node with room taking it."""
    left = [dict(node) for node in nodes]
    count = 0
    while count < 10_000:
        for bundle in bundles:
            node = next((n for n in left if all(n.get(k, 0) + 1e-9 >= v for k, v in bundle.items())), None)
            if node is None:
                return count
            for kind, amount in bundle.items():
                node[kind] -= amount
        count += 1
    return count


def shortage(bundles: Bundles) -> str:
    """What a trial takes and what the cluster has, in words."""
    total, free = ray.cluster_resources(), ray.available_resources()
    first, *others = ({kind: bundle[kind] for kind in KINDS if bundle.get(kind)} for bundle in bundles)
    parts = [_said(first)] if first or not others else []
    if others:
        parts.append(f"{len(others)} client actor{'s' if len(others) > 1 else ''} of {_said(others[0])}")
    have = ", ".join(f"{total.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in KINDS)
    return f"a trial takes {' and '.join(parts)}; the cluster has {have}"


def _said(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}" for kind, amount in amounts.items()) or "no resources"
