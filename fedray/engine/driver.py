"""The driver's end of a run: what is shown there, and how it steers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fedray.engine.run import Report


@dataclass(frozen=True)
class Driver:
    """``say`` shows a line, ``started`` is told the rounds made before, ``show`` each new round.

    ``on_round`` is waited for after each round, and ends the run by returning true; ``stopping`` ends it too when set.
    """

    say: Callable[[str], None]
    started: Callable[[int], None]
    show: Callable[[Report], None]
    on_round: Callable[[Report], bool] | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
