"""Shared fixtures: one Ray for all tests that need one, gone when they end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of this test session's own, with room for small fractions of two processors."""
    import ray

    # at Ray's default, a busy machine would starve the tests
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
