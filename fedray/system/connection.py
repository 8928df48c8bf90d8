"""A connection that many transfers share, each of which has a limit of its own."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

_Entry = tuple[float, int, "Transfer"]

FASTEST = 1e300
"""Bits per second of a transfer without any limit. Infinity could not be taken from a sum again."""


@dataclass(slots=True)
class Transfer:
    """A transfer of ``bits``, of which its own network lets at most ``most`` through in a second, or ``count`` such
    transfers that begin together.

    Attributes:
        number: Tells transfers apart, and orders those that end at the same moment.
        what: What it belongs to.
    """

    number: int
    what: Any
    count: int = 1
    bits: float = 0.0
    most: float = math.inf
    entry: _Entry | None = None


@dataclass(slots=True)
class Connection:
    """All who transfer at the same time share ``capacity``, bits per second: each gets the same, but nobody more than
    its own network lets through, and what one can't use is for the others (max-min fairness).

    So there is a level: transfers that can't use more go as fast as their own network lets them (they are *free*), and
    all others go at the level (they are *held*). In the order of ``most`` the free come first. When a free transfer
    ends is known when it begins; of held ones it is known after how many bits for each of them, counted from some
    moment on. So a transfer is only touched when it begins, ends, or crosses the level.

    ``_ordered`` has all transfers by ``most``, the first ``_free`` of them free, which take ``_taken`` together; the
    others are ``_held`` transfers, each of which could have sent ``_sent`` bits so far.
    """

    capacity: float
    now: float = 0.0
    _ordered: list[tuple[float, int, Transfer]] = field(default_factory=list)
    _free: int = 0
    _held: int = 0
    _taken: float = 0.0
    _level: float = math.inf
    _sent: float = 0.0
    _ends: list[_Entry] = field(default_factory=list)
    _targets: list[_Entry] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._ordered)

    def begin(self, transfer: Transfer) -> None:
        """Lets a transfer of more than zero bits begin now."""
        transfer.most = min(transfer.most, self.capacity, FASTEST)
        key = (transfer.most, transfer.number, transfer)
        place = bisect_left(self._ordered, key)
        self._ordered.insert(place, key)
        if place < self._free:
            self._release(transfer, transfer.bits)
        else:
            self._hold(transfer, transfer.bits)
        self._settle()

    def next_end(self) -> float:
        """Returns when the next transfer ends if no other begins before, infinity if there is none."""
        for heap in (self._ends, self._targets):
            while heap and heap[0][2].entry is not heap[0]:
                heappop(heap)
        ends = self._ends[0][0] if self._ends else math.inf
        return min(ends, self._end_of(self._targets[0][0])) if self._targets else ends

    def advance(self, time: float) -> list[Transfer]:
        """Goes on to ``time``, which is not after :meth:`next_end`, and returns the transfers that end then, in the
        order of their numbers."""
        ended = []
        # ends are compared with the time, and bits not counted, so that rounding leaves no transfer behind
        while self._ends and self._ends[0][0] <= time:
            ended.append(heappop(self._ends))
        while self._targets and self._end_of(self._targets[0][0]) <= time:
            ended.append(heappop(self._targets))
        # counted from anew where nobody is held, so that it stays exact
        self._sent = self._sent + self._level * (time - self.now) if self._held else 0.0
        self.now = time
        left = sorted((entry[2] for entry in ended if entry[2].entry is entry), key=lambda each: each.number)
        for transfer in left:
            self._remove(transfer)
        if left:
            self._settle()
        return left

    def _end_of(self, target: float) -> float:
        return self.now + (target - self._sent) / self._level

    def _release(self, transfer: Transfer, bits: float) -> None:
        self._free += 1
        self._taken += transfer.count * transfer.most
        transfer.entry = (self.now + bits / transfer.most, transfer.number, transfer)
        heappush(self._ends, transfer.entry)

    def _unfree(self, transfer: Transfer) -> None:
        self._free -= 1
        # nothing is left of what rounding adds up to
        self._taken = self._taken - transfer.count * transfer.most if self._free else 0.0

    def _hold(self, transfer: Transfer, bits: float) -> None:
        self._held += transfer.count
        transfer.entry = (self._sent + bits, transfer.number, transfer)
        heappush(self._targets, transfer.entry)

    def _remove(self, transfer: Transfer) -> None:
        transfer.entry = None
        place = bisect_left(self._ordered, (transfer.most, transfer.number, transfer))
        del self._ordered[place]
        if place < self._free:
            self._unfree(transfer)
        else:
            self._held -= transfer.count

    def _settle(self) -> None:
        """Finds the level, and moves the transfers that it crosses."""
        self._level = self._find_level()
        while self._free and self._ordered[self._free - 1][0] > self._level:
            transfer = self._ordered[self._free - 1][2]
            assert transfer.entry is not None
            self._unfree(transfer)
            self._hold(transfer, (transfer.entry[0] - self.now) * transfer.most)
            self._level = self._find_level()
        while self._free < len(self._ordered) and self._ordered[self._free][0] <= self._level:
            transfer = self._ordered[self._free][2]
            assert transfer.entry is not None
            self._held -= transfer.count
            self._release(transfer, transfer.entry[0] - self._sent)
            self._level = self._find_level()

    def _find_level(self) -> float:
        if self._held:
            return (self.capacity - self._taken) / self._held
        return math.inf if self._taken <= self.capacity else 0.0
