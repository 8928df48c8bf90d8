"""Lets the user stop a run or a sweep with Ctrl-C, so that it ends with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interruptible(
    say: Callable[[str], None], line: str, stopping: threading.Event | None = None
) -> Iterator[threading.Event]:
    """A context in which the user can stop a run or a sweep with Ctrl-C. It yields an event, ``stopping`` or a new one,
    which the first Ctrl-C or SIGTERM sets; the code in the context must check this event and end.

    At the first signal ``say`` is called with a text for the user: ``line`` and a hint that a second signal stops at
    once, by a KeyboardInterrupt. Outside the main thread, where signals can't be caught, the event is never set.
    """
    stopping = threading.Event() if stopping is None else stopping
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
