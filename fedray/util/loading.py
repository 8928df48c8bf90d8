"""Shortens the import of torch, which every process of a run waits for."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """A context in which Python's garbage collector is paused, so that large packages are imported faster.

    Such imports make a million objects and hardly any garbage. The collector's passes over these objects would take a
    sixth of the time of torch's import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_torch() -> None:
    """Imports torch faster than an import statement does, in a process that belongs to fedray alone.

    Afterwards, Python's garbage collector ignores all objects that exist at this point. In a user's process, this could
    keep objects of the user's from ever being freed.
    """
    with collector_paused():
        importlib.import_module("torch")
    gc.freeze()
