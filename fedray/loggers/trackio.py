"""Shows runs in trackio."""

from __future__ import annotations

from typing import Any

from fedray.loggers.logger import Begun, Ended, Logger, Shown, name_of, numbers_of, settings_of


class Trackio(Logger):
    """Shows a run in trackio, which keeps it on this machine unless it is told otherwise.

    Args:
        project: The name of the project.
        options: Further arguments of ``trackio.init``, such as ``space_id``.
    """

    package, extra = "trackio", "trackio"

    def __init__(self, project: str = "fedray", **options: Any) -> None:
        self.project, self.options = project, options
        self._run: Any = None

    def start(self, run: Begun) -> None:
        trackio = self.library()
        if self._run is not None:
            return
        # trackio finds a run again by its name
        known = self.known(run.folder)
        name = known or name_of(run)
        self._run = trackio.init(**{
            "project": self.project, "name": name, "group": run.config.run.group, "config": settings_of(run),
            "resume": "must" if known else "never", "embed": False, "auto_log_gpu": False, **self.options,
        })  # fmt: skip
        self.remember(run.folder, self._run.name)

    def round(self, report: Shown) -> None:
        self._run.log(numbers_of(report.metrics), step=report.round)

    def end(self, result: Ended) -> None:
        self._run.finish()

    def failed(self) -> None:
        if self._run is not None:
            self._run.finish()
