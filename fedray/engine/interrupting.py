"""Lets a run or a sweep end with a checkpoint at Ctrl-C, at SIGTERM, or when its terminal is closed."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

ENDING = {signal.SIGTERM, signal.SIGHUP}
"""The signals by which others than the user end programs."""

TOGETHER = 0.5
"""The seconds in which a second signal belongs to the first one: ``timeout`` sends one to its child and then one to all
processes."""


@contextlib.contextmanager
def interruptible(
    say: Callable[[str], None], line: str, stopping: threading.Event | None = None
) -> Iterator[threading.Event]:
    """A context in which the user can stop a run or a sweep with Ctrl-C. It yields an event, ``stopping`` or a new one,
    which the first Ctrl-C or SIGTERM sets; the code in the context must check this event and end. So does a SIGHUP,
    which comes when the terminal or the connection to it is closed, unless the program is to live on (``nohup``).

    At the first signal ``say`` is called with a text for the user: ``line`` and a hint that a further signal stops at
    once, by a KeyboardInterrupt. Outside the main thread, where signals can't be caught, the event is never set.
    """
    stopping = threading.Event() if stopping is None else stopping
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    asked, terminals = -math.inf, [output for output in (1, 2) if os.isatty(output)]

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        now = time.monotonic()
        if now - asked < TOGETHER:
            return
        if stopping.is_set():
            raise KeyboardInterrupt
        asked = now
        stopping.set()
        say(f"{line} (once more to stop at once) ...")

    def hang_up(number: int, frame: Any) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for output in terminals:
            # what is written to a terminal that is gone would be an error
            os.dup2(nowhere, output)
        os.close(nowhere)
        ask(number, frame)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def starting_helpers() -> Iterator[None]:
    """A context for a thread that starts processes which must outlive SIGTERM and SIGHUP. These, and the processes that
    they start in turn, do not get them. ``timeout``, a shell or a service manager sends them to all processes of a run
    at once, and without the others the one that the user has started could not write its checkpoint."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_children_end() -> None:
    """Lets processes that the user's code forks from this one get SIGTERM and SIGHUP, even if :func:`starting_helpers`
    keeps them from this process: multiprocessing ends processes by SIGTERM."""
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING))
