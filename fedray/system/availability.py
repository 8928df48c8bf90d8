"""When clients can be reached."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedray.core.seeds import Purpose, stream
from fedray.errors import UserError
from fedray.system.devices import drawn
from fedray.system.tables import read_table

HOUR, DAY = 3600.0, 86400.0

SHIFTS = 7
"""The coordinate of the random numbers that shift clients' hours."""

Ids = NDArray[np.int64]
Seconds = NDArray[np.float64]


class Availability(Protocol):
    """When clients can be reached. All results have a number for each of the clients ``ids``, ``[len(ids)]``."""

    def until(self, ids: Ids, time: float) -> Seconds:
        """Returns until which virtual second clients can be reached without a break, at the virtual second ``time``:
        ``time`` itself for those that can't be reached now, and infinity for those that always can."""
        ...

    def next_start(self, ids: Ids, time: float) -> Seconds:
        """Returns the first virtual second from ``time`` on at which each client can be reached; infinity if it never
        can again."""
        ...

    def longest(self, ids: Ids) -> Seconds:
        """Returns for how many virtual seconds without a break each client can be reached at most."""
        ...

    def last(self, ids: Ids) -> Seconds:
        """Returns the virtual second from which on each client can't be reached any more; infinity if there is none."""
        ...


class Always(Availability):
    """Clients that can always be reached."""

    def until(self, ids: Ids, time: float) -> Seconds:
        return np.full(len(ids), math.inf)

    def next_start(self, ids: Ids, time: float) -> Seconds:
        return np.full(len(ids), time)

    def longest(self, ids: Ids) -> Seconds:
        return np.full(len(ids), math.inf)

    def last(self, ids: Ids) -> Seconds:
        return np.full(len(ids), math.inf)


class Daily(Availability):
    """Clients that can be reached in the same hours of each day. The clock begins at midnight. Hours are shifted by a
    number of hours for each client, ``shifts [N]``."""

    def __init__(self, begin: float, end: float, shifts: NDArray[np.float64]) -> None:
        self.length = (end - begin) % 24 * HOUR
        self.starts = (begin + shifts) % 24 * HOUR

    def until(self, ids: Ids, time: float | Seconds) -> Seconds:
        since = (time - self.starts[ids]) % DAY
        return np.where(since < self.length, time + (self.length - since), time)

    def next_start(self, ids: Ids, time: float) -> Seconds:
        is_there = self.until(ids, time) > time
        starts = self.starts[ids]
        begins = np.maximum(starts + np.ceil((time - starts) / DAY) * DAY, time)
        # rounding may have put it just before the first moment at which the client is there
        while (early := ~is_there & (self.until(ids, begins) <= begins)).any():
            begins = np.where(early, np.nextafter(begins, math.inf), begins)
        return np.where(is_there, time, begins)

    def longest(self, ids: Ids) -> Seconds:
        return np.full(len(ids), self.length)

    def last(self, ids: Ids) -> Seconds:
        return np.full(len(ids), math.inf)


class Listed(Availability):
    """Clients that can be reached in listed intervals: for each client the seconds at which its intervals begin and
    those at which they end, both sorted. Each client has at least one."""

    def __init__(self, begins: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> None:
        self.clients = np.repeat(np.arange(len(begins)), [len(each) for each in begins])
        self.begins = np.concatenate([np.asarray(each, np.float64) for each in begins])
        self.ends = np.concatenate([np.asarray(each, np.float64) for each in ends])
        self._keys = _pairs(self.clients, self.begins)

    def until(self, ids: Ids, time: float) -> Seconds:
        place = self._following(ids, time) - 1
        has_begun = (place >= 0) & (self.clients[place] == ids)
        return np.where(has_begun, np.maximum(self.ends[place], time), time)

    def next_start(self, ids: Ids, time: float) -> Seconds:
        following = self._following(ids, time)
        place = np.minimum(following, len(self.clients) - 1)
        is_left = (following == place) & (self.clients[place] == ids)
        begins = np.where(is_left, self.begins[place], math.inf)
        return np.where(self.until(ids, time) > time, time, begins)

    def longest(self, ids: Ids) -> Seconds:
        found = np.zeros(self.clients[-1] + 1)
        np.maximum.at(found, self.clients, self.ends - np.maximum(self.begins, 0))
        return found[ids]

    def last(self, ids: Ids) -> Seconds:
        return self.ends[np.searchsorted(self.clients, ids, side="right") - 1]

    def _following(self, ids: Ids, time: float) -> NDArray[np.int64]:
        """Returns the place before which each client's intervals have begun at ``time``, as in ``bisect_right``."""
        return np.searchsorted(self._keys, _pairs(ids, np.full(len(ids), time)), side="right")


def _pairs(clients: Ids, seconds: Seconds) -> NDArray[np.complex128]:
    """Returns pairs that are sorted by the client first. numpy sorts complex numbers by their real parts first."""
    pairs = np.empty(len(clients), np.complex128)
    pairs.real, pairs.imag = clients, seconds
    return pairs


def windows(availability: Availability, ids: Ids) -> Iterator[tuple[float, float]]:
    """Yields the intervals in which at least one of the clients ``ids`` can be reached, in their order, each with its
    begin and end. One may begin where the one before it has ended."""
    time = 0.0
    while math.isfinite(time) and math.isfinite(begin := float(availability.next_start(ids, time).min())):
        time = float(availability.until(ids, begin).max())
        yield begin, time


def availability_of(
    asked: str | Mapping[str, Any] | None, clients: int, seed: int, names: Sequence[str] | None = None
) -> Availability:
    """Makes the :class:`Availability` of ``clients`` clients from ``system.availability``, which is ``asked``. What is
    drawn depends on ``seed`` alone. ``names`` are the clients' names, if the data have some.

    Raises :class:`UserError` if a file lacks a client, or an interval in it ends before it begins or before the clock
    does, or overlaps another one of the same client.
    """
    if asked is None:
        return Always()
    if isinstance(asked, Mapping):
        shifts = drawn(asked["shift"], clients, stream(seed, Purpose.DEVICE, SHIFTS))
        return Daily(asked["from"], asked["to"], shifts)
    return _listed(asked, clients, names)


def _listed(path: str, clients: int, names: Sequence[str] | None) -> Listed:
    where = f"system.availability={path}"
    table = read_table(path, "system.availability", ("client", "from", "to"), (), clients, names)
    froms, tos = table.columns["from"], table.columns["to"]
    begins: list[list[float]] = [[] for _ in range(clients)]
    ends: list[list[float]] = [[] for _ in range(clients)]
    for row in np.lexsort((froms, table.clients)).tolist():
        client, begin, end = int(table.clients[row]), float(froms[row]), float(tos[row])
        line = f"{where}, line {table.lines[row]}"
        if end <= begin:
            raise UserError(f"{line}: the interval must end after it begins, not from {begin:g} to {end:g}")
        if end <= 0:
            raise UserError(f"{line}: the clock begins at 0 s, and the interval from {begin:g} to {end:g} is before")
        if ends[client] and begin < ends[client][-1]:
            raise UserError(
                f"{line}: the interval of client {client} from {begin:g} to {end:g} overlaps that from "
                f"{begins[client][-1]:g} to {ends[client][-1]:g}"
            )
        if ends[client] and begin == ends[client][-1]:
            ends[client][-1] = end
            continue
        begins[client].append(begin)
        ends[client].append(end)
    missing = [client for client in range(clients) if not begins[client]]
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UserError(f"{where} lacks client {missing[0]}{more}: a client without an interval could never be reached")
    return Listed(begins, ends)
