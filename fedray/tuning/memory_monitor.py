"""Keeps a sweep alive when Ray's memory monitor kills the process of a trial.

If a node runs out of memory, Ray kills a process on it, and callers that wait for that process get an OutOfMemoryError.
Ray Tune expects a RayActorError for a process that died. It takes an OutOfMemoryError for a bug in Tune and stops all
trials. There is no public way to change this. So this file, as the only one in fedray, patches Tune's internals: Tune
then sees a RayActorError, and reports the trial as lost like any other.

``tests/tuning/test_memory_monitor.py`` checks, with the installed version of Ray, that these internals exist and that
the error would still stop Tune without the patch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.air.execution._internal import RayActorManager
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.tune.experiment import Trial

VERSIONS = ("2.49", "2.60")
"""The releases of Ray (major.minor) with which this file was tested."""


@contextmanager
def survive_memory_monitor() -> Iterator[None]:
    """A context in which a sweep goes on after Ray's memory monitor has killed the process of a trial.

    Without it, Ray Tune would take the monitor's OutOfMemoryError for a bug of Tune and stop all trials. With it, Tune
    treats the killed process like any other process that died. :func:`fedray.tuning.runner.run_trials` calls Tune
    inside this context.
    """
    task_failed, default_result = RayActorManager._actor_task_failed, Trial._get_default_result_or_future

    def _actor_task_failed(self: Any, tracked_actor_task: Any, exception: Exception) -> None:
        if isinstance(exception, OutOfMemoryError):
            exception = RayActorError(error_msg=str(exception))
        task_failed(self, tracked_actor_task, exception)

    def _get_default_result_or_future(self: Any) -> dict[str, Any] | None:
        # if a trial has not reported anything yet, Tune asks its process, which may be dead, for a result to show
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
