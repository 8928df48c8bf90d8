"""Measures how many seconds a run spends on what, such as gradients or reading data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by purpose: the time in ``with stopwatch.on("gradient"): ...`` counts for the
    gradient.

    Such ``with`` blocks may be nested: the time in an inner block counts only for the purpose of the inner block.

    Args:
        settle: a function without arguments that waits for work in the background, such as on a GPU, so that the time
            of this work counts for the purpose that started it. By default it does nothing.
    """

    def __init__(self, settle: Callable[[], None] = lambda: None) -> None:
        self.settle = settle
        self._seconds: dict[str, float] = {}
        self._purposes: list[str] = []
        self._since = 0.0

    @contextmanager
    def on(self, purpose: str) -> Iterator[None]:
        """Measures the code in a ``with`` block: its seconds are added to those of ``purpose``, such as ``"gradient"``.
        The seconds in nested blocks of the same stopwatch are left out."""
        self._lap()
        self._purposes.append(purpose)
        try:
            yield
        finally:
            self._lap()
            self._purposes.pop()

    def take(self) -> dict[str, float]:
        """Returns the seconds spent on each purpose since the last call of this method, such as ``{"gradient": 1.5}``,
        and resets the stopwatch to zero."""
        taken, self._seconds = self._seconds, {}
        return taken

    def _lap(self) -> None:
        self.settle()
        now = time.perf_counter()
        if self._purposes:
            purpose = self._purposes[-1]
            self._seconds[purpose] = self._seconds.get(purpose, 0.0) + now - self._since
        self._since = now
