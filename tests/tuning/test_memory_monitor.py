"""What fedray changes in Ray Tune's internals so that a sweep survives Ray's memory monitor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
from ray.air.execution._internal import RayActorManager
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.tune.experiment import Trial

from fedray.tuning.memory_monitor import VERSIONS, survive_memory_monitor


def test_the_installed_ray_is_one_that_it_was_tried_with():
    """With another release: run the tests of this file and tests/test_out_of_memory.py, then add it to VERSIONS."""
    assert ".".join(ray.__version__.split(".")[:2]) in VERSIONS


@pytest.fixture
def failing():
    """An actor manager with a task of an actor, and what is called when that fails."""
    told = []
    manager = RayActorManager(SimpleNamespace())
    actor = SimpleNamespace(actor_id=1, _on_error=lambda actor, error: told.append(error))
    task = SimpleNamespace(_tracked_actor=actor, _on_error=lambda actor, error: told.append(error))
    manager._cleanup_actor = lambda tracked_actor: None
    return manager, task, told


def test_an_actor_that_was_killed_counts_as_one_that_died(failing):
    manager, task, told = failing
    with survive_memory_monitor():
        manager._actor_task_failed(task, OutOfMemoryError("low on memory"))
    assert [type(error) for error in told] == [RayActorError] * 2
    assert all("low on memory" in str(error) for error in told)


def test_other_errors_are_left_as_they_are(failing):
    manager, task, told = failing
    error = RayActorError(error_msg="died")
    with survive_memory_monitor():
        manager._actor_task_failed(task, error)
        assert told == [error] * 2
        with pytest.raises(RuntimeError, match="unexpected exception"):
            manager._actor_task_failed(task, ValueError("a bug"))


def test_a_killed_process_has_no_result(monkeypatch):
    def killed(reference):
        raise OutOfMemoryError("low on memory")

    monkeypatch.setattr(ray, "get", killed)
    trial = Trial("mine", stub=True)
    trial._default_result_or_future = ray.ObjectRef.from_random()
    with survive_memory_monitor():
        assert trial.last_result == {"trial_id": trial.trial_id}


def test_without_it_tune_stops_all_trials(failing, monkeypatch):
    """And so it does once the block has ended. When this fails, Ray has mended it, and the file can go."""
    manager, task, _ = failing
    with survive_memory_monitor():
        pass
    with pytest.raises(RuntimeError, match="unexpected exception"):
        manager._actor_task_failed(task, OutOfMemoryError("low on memory"))
