"""Measures how the time of a round is spent (profile.csv)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from fedray.tracking.columns import PURPOSES


class Profile:
    """Measures how the time of a round is spent. It adds up the seconds for each purpose, such as "gradient"; each
    purpose is a column of profile.csv. The seconds of workers are divided by the number of workers, because they
    compute at the same time."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._seconds = dict.fromkeys(PURPOSES, 0.0)

    @contextlib.contextmanager
    def of_pool(self, slots: int) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """A context for the time in which the ``slots`` workers of a pool do tasks. It yields a function that must be
        called after each task, with a dict that maps each purpose (a column of profile.csv) to the seconds that the
        worker spent on it, the task's ``result.seconds``. The remaining time of the context counts as "waiting"."""
        began, busy = time.perf_counter(), 0.0

        def done(seconds: Mapping[str, float]) -> None:
            nonlocal busy
            for purpose, value in seconds.items():
                self._seconds[purpose] += value / slots
                busy += value / slots

        yield done
        self._seconds["waiting"] += time.perf_counter() - began - busy

    @contextlib.contextmanager
    def measure(self, purpose: str) -> Iterator[None]:
        """A context for work of the server itself. Its duration is added to the seconds of ``purpose``, a column of
        profile.csv."""
        began = time.perf_counter()
        yield
        self._seconds[purpose] += time.perf_counter() - began

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """A context whose time does not count, except for what is measured in it."""
        began, before = time.perf_counter(), sum(self._seconds.values())
        yield
        measured = sum(self._seconds.values()) - before
        self._since += time.perf_counter() - began - measured

    def take(self) -> dict[str, float]:
        """Returns the seconds that were spent on each purpose since the last call, by purpose, with an entry for each
        column of profile.csv. Time that was not measured counts as "server"."""
        now = time.perf_counter()
        taken, self._seconds = self._seconds, dict.fromkeys(PURPOSES, 0.0)
        taken["server"] = now - self._since - sum(taken.values())
        self._since = now
        return taken
