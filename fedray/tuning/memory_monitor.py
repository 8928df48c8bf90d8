"""Keeps a sweep alive when Ray's memory monitor kills the process of a trial.

If a node runs out of memory, Ray kills a process on it, and whoever waits for that process gets an OutOfMemoryError.
Ray Tune expects a RayActorError for a process that died, and takes an OutOfMemoryError for a bug in Tune, so that it
stops all trials. There is no public way to change this. This file is the only one of fedray that touches Tune's
internals: it makes Tune see a RayActorError instead, and Tune then reports the trial as lost, like any other.

With the installed version of Ray, ``tests/tuning/test_memory_monitor.py`` shows that the internals are there and that
the error still stops Tune without this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.air.execution._internal import RayActorManager
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.tune.experiment import Trial

VERSIONS = ("2.48", "2.60")
"""The releases of Ray (major.minor) with which this file was tested."""


@contextmanager
def survive_memory_monitor() -> Iterator[None]:
    """A context in which Tune treats a process that Ray's memory monitor has killed like any other process that
    died."""
    task_failed, default_result = RayActorManager._actor_task_failed, Trial._get_default_result_or_future

    def _actor_task_failed(self: Any, tracked_actor_task: Any, exception: Exception) -> None:
        if isinstance(exception, OutOfMemoryError):
            exception = RayActorError(error_msg=str(exception))
        task_failed(self, tracked_actor_task, exception)

    def _get_default_result_or_future(self: Any) -> dict[str, Any] | None:
        # a trial that has reported nothing yet asks its process, which may be dead, for the result to show
        try:
            return default_result(self)
        except OutOfMemoryError:
            self._default_result_or_future = None
            return None

    RayActorManager._actor_task_failed = _actor_task_failed  # type: ignore[method-assign]
    Trial._get_default_result_or_future = _get_default_result_or_future  # type: ignore[method-assign]
    try:
        yield
    finally:
        RayActorManager._actor_task_failed = task_failed  # type: ignore[method-assign]
        Trial._get_default_result_or_future = default_result  # type: ignore[method-assign]
