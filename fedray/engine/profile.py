"""Measures where a round's time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from fedray.tracking.columns import PURPOSES


class Profile:
    """Collects seconds between rows. A worker's count as their share of all workers: two that compute at the same time
    take as long as one."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._seconds = dict.fromkeys(PURPOSES, 0.0)

    @contextlib.contextmanager
    def of_pool(self, slots: int) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """While ``slots`` workers are given tasks; gives what wants to be told of each result's seconds."""
        began, busy = time.perf_counter(), 0.0

        def done(seconds: Mapping[str, float]) -> None:
            nonlocal busy
            for purpose, value in seconds.items():
                self._seconds[purpose] += value / slots
                busy += value / slots

        yield done
        self._seconds["waiting"] += time.perf_counter() - began - busy

    @contextlib.contextmanager
    def of(self, purpose: str) -> Iterator[None]:
        """While the server does something that has a purpose of its own."""
        began = time.perf_counter()
        yield
        self._seconds[purpose] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """The seconds of each purpose since the last time."""
        now = time.perf_counter()
        taken, self._seconds = self._seconds, dict.fromkeys(PURPOSES, 0.0)
        taken["server"] = now - self._since - sum(taken.values())
        self._since = now
        return taken
