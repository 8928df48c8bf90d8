"""Shows runs in Weights & Biases."""

from __future__ import annotations

from typing import Any

from fedray.loggers.logger import Begun, Ended, Logger, Shown, name_of, numbers_of, settings_of


class WeightsAndBiases(Logger):
    """Shows a run in Weights & Biases.

    Args:
        project: The name of the project.
        options: Further arguments of ``wandb.init``, such as ``entity``, ``tags`` or ``mode: offline``.
    """

    package, extra = "wandb", "wandb"

    def __init__(self, project: str = "fedray", **options: Any) -> None:
        self.project, self.options = project, options
        self._run: Any = None

    def start(self, run: Begun) -> None:
        wandb = self.library()
        if self._run is not None:
            return
        known = self.known(run.folder)
        self._run = wandb.init(**{
            "project": self.project, "name": name_of(run), "group": run.config.run.group, "id": known,
            "resume": "allow", "config": settings_of(run), "dir": str(run.folder), "reinit": "create_new",
            "settings": wandb.Settings(silent=True), **self.options,
        })  # fmt: skip
        # wandb's own steps can only grow, and rounds may be made again
        self._run.define_metric("*", step_metric="round")
        self.remember(run.folder, self._run.id)

    def round(self, report: Shown) -> None:
        self._run.log({"round": report.round, **numbers_of(report.metrics)})

    def end(self, result: Ended) -> None:
        self._run.summary.update({"status": result.status, "model_sha256": result.summary["model_sha256"]})
        self._run.finish(exit_code=0 if result.status == "completed" else 1)

    def failed(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)
