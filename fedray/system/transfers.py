"""How long clients receive, compute and send where they share the server's connection."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedray.system.connection import Connection, Transfer


class Leg(NamedTuple):
    """A part of what a client does: it waits or computes for ``seconds``, and then transfers ``bits``, of which its own
    network lets at most ``most`` through in a second."""

    seconds: float
    bits: float
    most: float


def without_answer(legs: Sequence[Leg], capacity: float) -> list[Leg]:
    """Returns what a client does that never answers. It takes nothing of the ``capacity`` that all share for the
    answer, which is the last of ``legs``, but has gone all of the way as late as if nobody else did."""
    *others, last = legs
    return [*others, Leg(last.seconds + last.bits / min(last.most, capacity), 0.0, last.most)]


class _Journey(NamedTuple):
    who: Any
    left: Iterator[Leg]


@dataclass
class Journeys:
    """Follows clients through their legs, event by event, and yields who has made all of them, and when.

    All who transfer at the same time share ``capacity``, bits per second, as :class:`Connection` says. The result
    depends only on what was launched, and not on when it is asked for.
    """

    capacity: float
    _connection: Connection = field(init=False)
    _waiting: list[tuple[float, int, Transfer]] = field(default_factory=list)
    _arrived: deque[tuple[float, Any]] = field(default_factory=deque)
    _launched: int = 0

    def __post_init__(self) -> None:
        self._connection = Connection(self.capacity)

    def launch(self, who: Any, time: float, legs: Sequence[Leg], count: int = 1) -> None:
        """Lets the client ``who`` begin the first of its ``legs`` at ``time``, which is not before the last arrival.
        ``who`` may also stand for ``count`` clients that do the same."""
        self._go_on(time, Transfer(self._launched, _Journey(who, iter(legs)), count))
        self._launched += 1

    def next(self) -> tuple[float, Any] | None:
        """Returns when the next client has made all its legs, and which, or None if none is on its way. Clients that
        arrive at the same moment come in the order in which they were launched."""
        while not self._arrived and (self._waiting or self._connection):
            self._step()
        return self._arrived.popleft() if self._arrived else None

    @property
    def has_more_now(self) -> bool:
        """Whether another client arrives at the same moment as the last one that :meth:`next` has returned."""
        return bool(self._arrived)

    def _go_on(self, time: float, client: Transfer) -> None:
        """Lets a client begin its next leg at ``time``, or arrive if it has made all."""
        leg = next(client.what.left, None)
        if leg is None:
            self._arrived.append((time, client.what.who))
            return
        client.bits, client.most = leg.bits, leg.most
        heapq.heappush(self._waiting, (time + leg.seconds, client.number, client))

    def _step(self) -> None:
        """Goes on to the next moment at which a transfer begins or ends."""
        waiting = self._waiting
        time = min(self._connection.next_end(), waiting[0][0] if waiting else math.inf)
        for client in self._connection.advance(time):
            self._go_on(time, client)
        while waiting and waiting[0][0] <= time:
            client = heapq.heappop(waiting)[2]
            if client.bits:
                self._connection.begin(client)
            else:
                self._go_on(time, client)
