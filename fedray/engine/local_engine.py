"""The local engine: server and clients run in this process, without Ray, by the same code and to the same bits."""

from __future__ import annotations

from typing import Any

from fedray.core.torch_state import neutral
from fedray.data.federated import FederatedData
from fedray.engine.clients import Clients
from fedray.engine.driver import Driver
from fedray.engine.opening import open_run
from fedray.engine.pool import LocalPool, Pool
from fedray.engine.process import computing_process, require_device
from fedray.engine.worker import Worker
from fedray.experiment.experiment import Experiment


class LocalEngine:
    """Runs ``experiment`` on ``data`` in this process."""

    def __init__(self, experiment: Experiment, data: FederatedData) -> None:
        self.experiment, self.data = experiment, data

    def run(self, driver: Driver) -> None:
        """Runs the experiment to its end."""
        engine = self.experiment.config.engine
        with (
            computing_process(engine.threads, engine.portable_bits, self.experiment.precision),
            open_run(self.experiment, self.data, self._pool, False, say=driver.say) as run,
        ):
            if run is None:
                return
            run.stopping = driver.stopping
            driver.started(run.state.server.round)
            rounds = run.rounds()
            while True:
                # a callback may have changed the state of torch
                with neutral():
                    report = next(rounds, None)
                if report is None:
                    return
                driver.show(report)
                if driver.on_round is not None and driver.on_round(report):
                    driver.stopping.set()

    def _pool(self, worker: Worker) -> tuple[Pool, list[dict[str, Any]]]:
        experiment = self.experiment
        if experiment.device != experiment.server_device:
            require_device(experiment.device, experiment.precision)
            worker = Worker(Clients(experiment, self.data, worker.clients.states, experiment.device))
        return LocalPool(worker), [worker.describe()]
