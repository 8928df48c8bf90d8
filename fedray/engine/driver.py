"""What the driver, the process that the user started, shows of a run and how it steers the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fedray.engine.run import Report


@dataclass(frozen=True)
class Driver:
    """The callbacks by which a run reaches its driver.

    ``say(line)`` shows a line. ``started(rounds)`` gets the number of rounds that were made before. ``show(report)``
    gets each new round. The run waits for ``on_round(report)`` after each round, and ends if it returns true. It also
    ends, after the round in progress, when ``stopping`` is set.
    """

    say: Callable[[str], None]
    started: Callable[[int], None]
    show: Callable[[Report], None]
    on_round: Callable[[Report], bool] | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
