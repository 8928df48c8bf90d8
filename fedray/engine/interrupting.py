"""Lets the user stop a run or a sweep with Ctrl-C, so that it ends with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interruptible(say: Callable[[str], None], line: str) -> Iterator[threading.Event]:
    """A context with an event that the first Ctrl-C or SIGTERM sets.

    Then ``say(line)`` is called. A second Ctrl-C raises KeyboardInterrupt. Outside the main thread, the event is never
    set.
    """
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return

    def ask(number: int, frame: Any) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()
        say(f"{line} (once more to stop at once) ...")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
