"""Copies as Ray makes them when it sends something to an actor, for tests that do not start Ray."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any


def travelled(value: Any) -> Any:
    """Returns what a client actor of Ray would receive if ``value`` were sent to it: a copy whose arrays are read-only.
    Tests use this function to find code that works only within one process."""
    # not at the top, because only this function needs Ray, and modules that a local run imports may import this one
    from ray import cloudpickle

    buffers: list[pickle.PickleBuffer] = []
    dumps: Callable[..., bytes] = cloudpickle.dumps
    data = dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
