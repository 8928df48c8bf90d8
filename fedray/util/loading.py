"""Shortens the import of torch, which every process of a run waits for."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """A context in which Python does not look for garbage. Imports make a million objects and hardly any garbage, and
    looking through them again and again is a sixth of the time that torch's import takes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_torch() -> None:
    """Imports torch into a process that is fedray's alone. Python never looks for garbage among its objects again, and
    a user's objects that were there before would never be freed either."""
    with collector_paused():
        importlib.import_module("torch")
    gc.freeze()
