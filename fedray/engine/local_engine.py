"""The local engine, which runs an experiment without Ray. The server runs in this process, and the clients too unless
``engine.kind`` names a user-defined pool of workers. The code and the bits of the results are the same as on Ray."""

from __future__ import annotations

import contextlib
from typing import Any

from fedray.core.torch_state import neutral
from fedray.data.federated import FederatedData
from fedray.engine.clients import Clients
from fedray.engine.driver import Driver
from fedray.engine.opening import open_run
from fedray.engine.pool import LocalPool, Pool
from fedray.engine.process import computing_process, require_device, unchanged_settings
from fedray.engine.worker import Worker
from fedray.errors import UserError
from fedray.experiment.experiment import Experiment
from fedray.usercode.extensions import find
from fedray.usercode.importing import as_user_error


class LocalEngine:
    """Runs ``experiment`` on ``data`` (the samples, and which client holds each) with the server in this process and
    without Ray. The clients run here too, unless ``engine.kind`` names a user-defined pool of workers."""

    def __init__(self, experiment: Experiment, data: FederatedData) -> None:
        self.experiment, self.data = experiment, data

    def run(self, driver: Driver) -> None:
        """Runs the experiment to its end, or until ``driver``, which shows the rounds to the user, asks for a stop."""
        engine = self.experiment.config.engine
        with (
            computing_process(engine.threads, engine.portable_bits, self.experiment.precision),
            open_run(self.experiment, self.data, self._pool, False, say=driver.say) as run,
        ):
            if run is None:
                return
            run.stopping = driver.stopping
            with unchanged_settings():
                driver.started(run.state.server.round)
            rounds = run.rounds()
            while True:
                # resets torch's state, which a callback may have changed
                with neutral():
                    report = next(rounds, None)
                if report is None:
                    return
                with unchanged_settings() if driver.on_round is not None else contextlib.nullcontext():
                    if driver.watch(report, self.experiment, run.look):
                        driver.stopping.set()

    def _pool(self, worker: Worker) -> tuple[Pool, list[dict[str, Any]]]:
        experiment = self.experiment
        if experiment.device != experiment.server_device:
            require_device(experiment.device, experiment.precision)
            worker = Worker(Clients(experiment, self.data, worker.clients.states, experiment.device))
        return make_pool(experiment.config.engine.kind, worker), [worker.describe()]


def make_pool(kind: str, worker: Worker) -> Pool:
    """Returns the pool of workers that ``kind``, the value of ``engine.kind``, names: "local" for the pool of this
    process, or ``file.py:Class`` for an instance of a user-defined class. The class is called with ``worker``, which
    does tasks in this process.

    Raises :class:`UserError` if there is no such class, or it can't be instantiated, or its instance lacks a method.
    """
    found = find(kind, "engine.kind", {"local": LocalPool})
    with as_user_error(f"engine.kind={kind} can't be made"):
        pool: Pool = found(worker)
    missing = [
        name for name in ("slots", "task_fraction", "publish", "map", "settle", "regions") if not hasattr(pool, name)
    ]
    if missing:
        raise UserError(f"engine.kind={kind} is no pool: it has no {missing[0]!r} (see fedray.engine.pool.Pool)")
    return pool
