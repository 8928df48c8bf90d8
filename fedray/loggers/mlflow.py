"""Shows runs in MLflow."""

from __future__ import annotations

import contextlib
import time
from itertools import islice
from typing import Any

from fedray.loggers.logger import Begun, Ended, Logger, Shown, name_of, numbers_of, settings_of

AT_ONCE = 100
"""The number of parameters that MLflow takes in one call."""

LONGEST = 500
"""The number of characters that a parameter may have in MLflow."""

STATUS = {"completed": "FINISHED", "diverged": "FAILED", "interrupted": "KILLED"}


class MLflow(Logger):
    """Shows a run in MLflow: its settings as parameters, its rounds as metrics.

    Args:
        uri: Where MLflow keeps runs, such as ``sqlite:///mlflow.db`` or the address of a server. The default is what
            MLflow is set to, such as by ``MLFLOW_TRACKING_URI``.
        experiment: The name of the experiment. The default is the run's group, or ``fedray``.
    """

    package, extra = "mlflow", "mlflow"

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        self.uri, self.experiment = uri, experiment
        self._id: str | None = None

    def start(self, run: Begun) -> None:
        self._connect()
        self._id = self._id or self.known(run.folder)
        if self._id is None:
            self._id = self._begin(run)
            self.remember(run.folder, self._id)
        else:
            self._client.set_terminated(self._id, "RUNNING")

    def prepare(self, group: str | None) -> None:
        self._connect()
        self._experiment_of(self.experiment or group or "fedray")

    def _connect(self) -> None:
        # a client has no state that other code of this process could change
        self._client = self.library().MlflowClient(self.uri)

    def _begin(self, run: Begun) -> str:
        from mlflow.entities import Param

        name = self.experiment or run.config.run.group or "fedray"
        experiment = self._experiment_of(name)
        tags = {"fedray.folder": str(run.folder.absolute())}
        created: str = self._client.create_run(experiment, run_name=name_of(run), tags=tags).info.run_id
        found = iter(settings_of(run).items())
        while some := list(islice(found, AT_ONCE)):
            self._client.log_batch(created, params=[Param(key, str(value)[:LONGEST]) for key, value in some])
        return created

    def _experiment_of(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        if known is None:
            # another run may make it at this moment
            with contextlib.suppress(self.library().exceptions.MlflowException):
                self._client.create_experiment(name)
            known = self._client.get_experiment_by_name(name)
        found: str = known.experiment_id
        return found

    def round(self, report: Shown) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics: list[Any] = [Metric(name, x, now, report.round) for name, x in numbers_of(report.metrics).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, result: Ended) -> None:
        self._client.set_tag(self._id, "fedray.status", result.status)
        self._client.set_tag(self._id, "fedray.model_sha256", str(result.summary["model_sha256"]))
        self._client.set_terminated(self._id, STATUS[result.status])

    def failed(self) -> None:
        if self._id is not None:
            self._client.set_terminated(self._id, "FAILED")
