"""Shows runs in trackio."""

from __future__ import annotations

import uuid
from typing import Any

from fedray.loggers.logger import Begun, Ended, Logger, Shown, name_of, numbers_of, settings_of


class Trackio(Logger):
    """Shows a run in trackio, which keeps it on this machine unless it is told otherwise.

    A run is called as its folder, with eight random digits at the end, because trackio tells runs apart by their names.

    Args:
        project: The name of the project.
        options: Further arguments of ``trackio.init``, such as ``space_id``, or another ``name``.
    """

    package, extra = "trackio", "trackio"

    def __init__(self, project: str = "fedray", **options: Any) -> None:
        self.project, self.options = project, options
        self._run: Any = None

    def start(self, run: Begun) -> None:
        trackio = self.library()
        if self._run is not None:
            return
        # trackio finds a run again by its name, and takes the last one that has it
        known = self.known(run.folder)
        name = known or f"{self.options.get('name', name_of(run))}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(**{
            "project": self.project, "group": run.config.run.group, "config": settings_of(run), "embed": False,
            # what has ended before its first round is not there
            "resume": "allow" if known else "never", "auto_log_gpu": False, **self.options, "name": name,
        })  # fmt: skip
        self.remember(run.folder, self._run.name)

    def round(self, report: Shown) -> None:
        self._run.log(numbers_of(report.metrics), step=report.round)

    def end(self, result: Ended) -> None:
        self._run.finish()

    def failed(self) -> None:
        if self._run is not None:
            self._run.finish()
