"""How long clients receive, compute and send where they share the server's connection."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of what a client does: it waits or computes for ``seconds``, and then transfers ``bits``, of which its own
    network lets at most ``most`` through in a second."""

    seconds: float
    bits: float
    most: float


@dataclass
class _Flow:
    who: Hashable
    legs: list[Leg]
    bits: float = 0.0
    most: float = math.inf


@dataclass
class Journeys:
    """Follows clients through their legs, event by event, and yields who has made all of them, and when.

    All who transfer at the same time share ``capacity``, bits per second: each gets the same, but nobody more than its
    own network lets through, and what one can't use is for the others (max-min fairness). The result depends only on
    what was launched, and not on when it is asked for.
    """

    capacity: float
    now: float = 0.0
    _waiting: list[tuple[float, int, _Flow]] = field(default_factory=list)
    _flows: list[_Flow] = field(default_factory=list)
    _arrived: list[tuple[float, Hashable]] = field(default_factory=list)
    _launched: int = 0

    def launch(self, who: Hashable, time: float, legs: Sequence[Leg]) -> None:
        """Lets the client ``who`` begin the first of its ``legs`` at ``time``, which is not before :attr:`now`."""
        self._begin(time, _Flow(who, list(legs)))

    def next(self) -> tuple[float, Hashable] | None:
        """Returns when the next client has made all its legs, and which, or None if none is on its way. Clients that
        arrive at the same moment come in the order in which they were launched."""
        while not self._arrived and (self._waiting or self._flows):
            self._step()
        return self._arrived.pop(0) if self._arrived else None

    @property
    def has_more_now(self) -> bool:
        """Whether another client arrives at the same moment as the last one that :meth:`next` has returned."""
        return bool(self._arrived)

    def _begin(self, time: float, flow: _Flow) -> None:
        heapq.heappush(self._waiting, (time + flow.legs[0].seconds, self._launched, flow))
        self._launched += 1

    def _step(self) -> None:
        """Goes on to the next moment at which a transfer begins or ends."""
        rates = self._rates()
        left = [flow.bits / rate for flow, rate in zip(self._flows, rates, strict=True)]
        ends = self.now + min(left, default=math.inf)
        time = min(ends, self._waiting[0][0] if self._waiting else math.inf)
        flows, self._flows = self._flows, []
        for flow, rate, seconds in zip(flows, rates, left, strict=True):
            # compared, and not computed, so that rounding leaves no transfer behind
            if self.now + seconds <= time:
                self._ended(flow, time)
            else:
                flow.bits -= rate * (time - self.now)
                self._flows.append(flow)
        self.now = time
        while self._waiting and self._waiting[0][0] <= time:
            _, _, flow = heapq.heappop(self._waiting)
            flow.bits, flow.most = flow.legs[0].bits, flow.legs[0].most
            if flow.bits:
                self._flows.append(flow)
            else:
                self._ended(flow, time)

    def _ended(self, flow: _Flow, time: float) -> None:
        flow.legs.pop(0)
        if flow.legs:
            self._begin(time, flow)
        else:
            self._arrived.append((time, flow.who))

    def _rates(self) -> list[float]:
        """Returns how many bits per second each transfer gets now."""
        most = np.array([flow.most for flow in self._flows])
        if not len(most) or most.sum() <= self.capacity:
            return [float(each) for each in most]
        ordered = np.sort(most)
        # the level at which everybody who could use more is held, if the k slowest use less than that
        taken = np.concatenate([[0.0], np.cumsum(ordered)[:-1]])
        levels = (self.capacity - taken) / np.arange(len(ordered), 0, -1)
        level = levels[np.argmax(ordered >= levels)]
        return [float(each) for each in np.minimum(most, level)]
