"""Joins the virtual clock (:mod:`fedray.system.clock`) with the rounds of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedray.engine.cohorts import cohort_of
from fedray.engine.state.run import RunState
from fedray.experiment.experiment import Experiment
from fedray.system.clock import USED, Asked, Clock


class VirtualTime:
    """Decides who of the clients that are drawn becomes the cohort of a round, and how long the round takes, by the
    virtual ``clock``. Without a clock (None) everybody does, and no time passes."""

    def __init__(self, clock: Clock | None, experiment: Experiment, state: RunState) -> None:
        self.clock, self.experiment, self.state = clock, experiment, state
        everybody = np.flatnonzero(state.sizes)
        self._end = math.inf if clock is None else float(clock.availability.last(everybody).max())

    def is_over(self, seconds: float) -> bool:
        """Returns whether no client can be reached any more from the virtual second ``seconds`` on."""
        return seconds >= self._end

    def draw(self, drawn: NDArray[np.int64], number: int) -> Asked | None:
        """Makes those of the clients ``drawn`` that answer in time the cohort of round ``number``, in the server's
        state. Returns what became of everybody, or None without a clock."""
        server, algorithm, clock = self.state.server, self.experiment.algorithm, self.clock
        if clock is None:
            server.cohort = cohort_of(drawn, self.state, self.experiment, number)
            return None
        forward = self.experiment.facts.flops

        def beside(phase: str, ids: NDArray[np.int64]) -> float:
            if phase != algorithm.server_training_before:
                return 0.0
            # how much it trains depends on the cohort: when it is waited for, on those who have answered so far
            server.cohort = cohort_of(ids, self.state, self.experiment, number)
            return clock.seconds_of_server(algorithm.server_flops_beside(server, forward))

        now = self.state.costs.get("virtual_seconds", 0.0)
        # a cohort that was given by hand is not more than the server waits for
        needed = None if self.state.order.cohort is None else len(drawn)
        asked = clock.ask(number, drawn, now, beside, needed)
        server.cohort = cohort_of(asked.used, self.state, self.experiment, number)
        if server.cohort.ids:
            after = algorithm.server_flops(server, forward) - algorithm.server_flops_beside(server, forward)
            asked.duration += clock.seconds_of_server(after)
        return asked


def add_costs(costs: dict[str, Any], asked: Asked) -> None:
    """Adds a round's virtual seconds and joules to the ``costs`` of a run so far, and what clients did in vain. Unknown
    joules stay unknown."""
    costs["virtual_seconds"] = costs.get("virtual_seconds", 0.0) + asked.duration
    joules = costs.get("joules", 0.0)
    costs["joules"] = None if joules is None or math.isnan(asked.joules) else joules + asked.joules
    costs["bytes_down"] += asked.bytes_down
    costs["bytes_up"] += asked.bytes_up
    costs["flops"] += asked.flops


def rows_of(
    log: Mapping[str, Any], asked: Asked, facts: Callable[[Sequence[int], Sequence[int]], Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the rows of clients.parquet of a round, by column, with a row for each client that was ``asked``, and its
    ``outcome`` and ``virtual_seconds``.

    ``log`` has rows for the cohort only. In the others what a client would have reported is NaN.
    ``facts(ids, trained)`` returns the columns that say who the clients ``ids`` are; ``trained`` has a 1 for each of
    them that has trained, and a 0 for the others.
    """
    ids = asked.ids.tolist()
    places = [place for place, outcome in enumerate(asked.outcomes) if outcome == USED]
    found = dict(facts(ids, asked.trained.astype(int).tolist()))
    for name, values in log.items():
        if name not in found:
            column = [math.nan] * len(ids)
            for place, value in zip(places, values, strict=True):
                column[place] = value
            found[name] = column
    return found | {"virtual_seconds": asked.seconds.tolist(), "outcome": list(asked.outcomes)}
