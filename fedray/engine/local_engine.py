"""The local engine: server and clients in this process, without Ray; the same code path and the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fedray.data.federated import FederatedData
from fedray.engine.opening import opened
from fedray.engine.pool import LocalPool, Pool
from fedray.engine.process import describe, settled
from fedray.engine.server import Report
from fedray.engine.worker import Worker
from fedray.resolve import Experiment


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

    def make_pool(worker: Worker) -> tuple[Pool, list[dict[str, Any]]]:
        if experiment.device != experiment.server_device:
            worker = Worker(experiment, data, experiment.device)
        return LocalPool(worker), [describe(experiment.device)]

    engine = experiment.config.engine
    with settled(engine.threads, engine.portable_bits), opened(experiment, data, make_pool, False) as simulation:
        simulation.stopping = stopping
        started(simulation.server.round)
        for report in simulation.rounds():
            show(report)
            if on_round is not None and on_round(report):
                stopping.set()
