"""Measures one point: a run of fedray in this process, which should be a fresh one."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import common
import numpy as np
import pandas as pd
import ray
from common import ProcessTree, Usage

import fedray.engine.ray.engine
from fedray import simulate
from fedray.config import EngineConfig
from fedray.engine.ray.cluster import connect, living_nodes
from fedray.errors import UserError
from fedray.tracking.result import RunResult
from round_time import watching
from round_time.points import WARM_UP, Point

SAMPLES = 2000
"""The number of training samples. Clients draw theirs from all of them, so that there may be any number of clients."""

WORKING = ("data", "gradient", "algorithm")
"""The columns of profile.csv that are the clients' own work."""

JOIN_SECONDS = 120.0
"""How long nodes may take to join the cluster."""


def settings(point: Point, seconds: float, output: str) -> dict[str, Any]:
    """Returns the configuration of the run that measures ``point``, with as many rounds as take about ``seconds``."""
    work = point.work
    return {
        "run.output": output, "run.name": "point", "run.rounds": point.rounds(seconds), "run.eval_every": 0,
        "run.checkpoint_every": 0, "algorithm.name": "fedavg",
        "data.clients": point.clients, "data.samples_per_client": work.batch, "data.partition.kind": "iid",
        "data.partition.overlap": True,
        "model.name": point.model, **work.settings,
        "train.cohort_size": point.cohort, "train.local_steps": point.steps, "train.batch_size": work.batch,
        "train.lr": 0.01,
        "engine.actors": point.actors, "engine.device": point.device, "engine.profile": True,
        # so small that there may be more actors than processors
        "engine.cpus_per_actor": 0.01,
        **({"engine.actors_per_gpu": 1} if point.device == "cuda" else {}),
    }  # fmt: skip


def measure(point: Point, seconds: float, address: str = "local") -> dict[str, Any]:
    """Makes the run of ``point`` on the Ray cluster at ``address``, and returns what was measured, ready for JSON.

    Raises :class:`UserError` if the cluster does not have the point's hosts, or actors were not spread evenly.
    """
    ray.cloudpickle.register_pickle_by_value(watching)
    ray.cloudpickle.register_pickle_by_value(common)
    began = time.perf_counter()
    connect(EngineConfig(address=address), lambda line: None)
    _await_nodes(point.hosts)
    probes = watching.probes(os.getpid())
    fedray.engine.ray.engine.ServerActor = watching.CountingServer
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (SAMPLES, *point.work.shape), dtype=np.uint8)
    y = rng.integers(0, 10, SAMPLES)
    usage = Usage(ProcessTree())
    with tempfile.TemporaryDirectory() as output:
        result = simulate(settings(point, seconds, output), data=(x, y), test=(x[:100], y[:100]))
        used = usage.stop()
        arrived = json.loads((Path(output) / watching.ARRIVED).read_text())
        found = _of_rounds(point, result, arrived["rounds"])
        wall = time.perf_counter() - began
        found |= _of_cluster(point, result, ray.get([probe.look.remote() for probe in probes]), arrived["peak_mib"])
    # what programs on other hosts do is not seen from here
    found["foreign"] = used["foreign"] if point.hosts == 1 else None
    ray.shutdown()
    return {"point": vars(point), **found, "whole_seconds": wall}


def _await_nodes(hosts: int) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    while len(living_nodes()) < hosts:
        if time.monotonic() > deadline:
            raise UserError(f"{len(living_nodes())} of {hosts} hosts joined the cluster in {JOIN_SECONDS:g} s")
        time.sleep(0.2)


def _of_rounds(point: Point, result: RunResult, arrived: list[dict[str, float]]) -> dict[str, Any]:
    """Returns medians over the rounds that count, and bytes per round."""
    if result.status != "completed":
        raise UserError(f"the run of {point} ended as {result.status}")
    metrics, profile = result.metrics, result.profile
    seconds = metrics["wall_seconds"].diff().iloc[WARM_UP:]
    low, high = seconds.quantile([0.25, 0.75])
    totals = pd.DataFrame(arrived).diff().iloc[WARM_UP:]
    return {
        "seconds": float(seconds.median()),
        "quartiles": [float(low), float(high)],
        "rounds": len(seconds),
        **{str(name): float(total) for name, total in totals.median().items()},
        "bytes_down": float(metrics["bytes_down"].iloc[-1] / len(metrics)),
        "bytes_up": float(metrics["bytes_up"].iloc[-1] / len(metrics)),
        "worker_seconds": point.actors * float(profile.iloc[WARM_UP:][list(WORKING)].sum(axis=1).median()),
        "start_seconds": float(metrics["wall_seconds"].iloc[0]),
        "parameters": result.summary["parameters"],
    }


def _of_cluster(point: Point, result: RunResult, looks: list[dict[str, Any]], server_mib: float) -> dict[str, Any]:
    """Returns what the nodes are, how the actors were spread, and the memory: ``all`` of all nodes together, the others
    those of the largest process."""
    actors = Counter(process["node"] for process in result.summary["machine"]["processes"])
    if len(actors) != point.hosts or max(actors.values()) > -(-point.actors // point.hosts):
        raise UserError(f"the actors of {point} were spread as {dict(actors)}, not evenly")
    kinds = {kind for look in looks for kind in look["memory"]}
    memory = {
        kind: (sum if kind in ("all", "shared", "gpu") else max)(look["memory"].get(kind, 0.0) for look in looks)
        for kind in kinds
    }
    machines = {look["machine"]: look["processors"] for look in looks}
    return {
        "memory": {**memory, "server": server_mib},
        "processors": sum(machines.values()),
        "machines": len(machines),
    }


def main(spec: str) -> None:
    """Measures the point that ``spec`` describes, a JSON text, and prints the result as JSON in one line."""
    asked = json.loads(spec)
    json.dump(measure(Point(**asked["point"]), asked["seconds"], asked["address"]), sys.stdout)
    print()
