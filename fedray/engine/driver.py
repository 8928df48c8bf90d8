"""Connects a run with its driver, the process that the user started, which shows the run and can stop it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fedray.core.places import Places
from fedray.core.torch_state import neutral
from fedray.engine.callbacks import Look, Report
from fedray.experiment.experiment import Experiment


@dataclass(frozen=True)
class Driver:
    """The functions that a run calls in its driver, which is the process that the user started.

    ``say(line)`` shows a line to the user. ``started(rounds)`` is called when the run begins or continues, with the
    number of rounds that are already done, and ``show(report)`` after each round. If ``on_round`` is not None, the run
    waits for ``on_round(report)`` after each round, and ends if the result is true. The run also ends, after the round
    in progress, if the event ``stopping`` is set.
    """

    say: Callable[[str], None]
    started: Callable[[int], None]
    show: Callable[[Report], None]
    on_round: Callable[[Report], bool] | None = None
    stopping: threading.Event = field(default_factory=threading.Event)

    def watch(self, report: Report, experiment: Experiment, look: Look) -> bool | None:
        """Passes the ``report`` of a new round to ``show``, and then to ``on_round``, if that is not None. Returns
        whether the run is to end, or None if ``on_round`` is None.

        Callbacks may ask the report for parts of the round, such as its clients or its model. ``look``, which is
        :meth:`~fedray.engine.run.Run.look`, fetches these parts, and ``experiment`` makes the module for a model.
        """
        self.show(report)
        if self.on_round is None:
            return None

        @neutral()
        def copied(what: str, name: str | None = None) -> Any:
            found = look(what, name)
            if what != "model":
                return copy.deepcopy(found)
            module = experiment.module()
            Places(module).load(found)
            return module.eval()

        return self.on_round(replace(report, look=copied))
