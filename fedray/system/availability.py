"""When clients can be reached."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
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


class Availability(Protocol):
    """When clients can be reached."""

    def until(self, ids: NDArray[np.int64], time: float) -> NDArray[np.float64]:
        """Returns for each of the clients ``ids`` until which virtual second it can be reached without a break, at the
        virtual second ``time``: ``time`` itself if it can't be reached now, and infinity if it always can."""
        ...

    def next_start(self, client: int, time: float) -> float:
        """Returns the first virtual second from ``time`` on at which the client can be reached; infinity if it never
        can again."""
        ...


class Always(Availability):
    """Clients that can always be reached."""

    def until(self, ids: NDArray[np.int64], time: float) -> NDArray[np.float64]:
        return np.full(len(ids), math.inf)

    def next_start(self, client: int, time: float) -> float:
        return time


class Daily(Availability):
    """Clients that can be reached in the same hours of each day. The clock begins at midnight. Hours are shifted by a
    number of hours for each client, ``shifts [N]``."""

    def __init__(self, begin: float, end: float, shifts: NDArray[np.float64]) -> None:
        self.length = (end - begin) % 24 * HOUR
        self.starts = (begin + shifts) % 24 * HOUR

    def until(self, ids: NDArray[np.int64], time: float) -> NDArray[np.float64]:
        since = (time - self.starts[ids]) % DAY
        return np.where(since < self.length, time + self.length - since, time)

    def next_start(self, client: int, time: float) -> float:
        since = float((time - self.starts[client]) % DAY)
        if since < self.length:
            return time
        begins = time + DAY - since
        # rounding may have put it just before the first moment at which the client is there
        while (begins - self.starts[client]) % DAY >= self.length:
            begins = math.nextafter(begins, math.inf)
        return float(begins)


class Listed(Availability):
    """Clients that can be reached in listed intervals: for each client the seconds at which its intervals begin and
    those at which they end, both sorted."""

    def __init__(self, begins: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> None:
        self.begins, self.ends = begins, ends

    def until(self, ids: NDArray[np.int64], time: float) -> NDArray[np.float64]:
        return np.array([self._until(client, time) for client in ids.tolist()])

    def _until(self, client: int, time: float) -> float:
        place = bisect_right(self.begins[client], time) - 1
        return max(time, self.ends[client][place]) if place >= 0 else time

    def next_start(self, client: int, time: float) -> float:
        if self._until(client, time) > time:
            return time
        place = bisect_right(self.begins[client], time)
        return self.begins[client][place] if place < len(self.begins[client]) else math.inf


def availability_of(
    asked: str | Mapping[str, Any] | None, clients: int, seed: int, names: Sequence[str] | None = None
) -> Availability:
    """Makes the :class:`Availability` of ``clients`` clients from ``system.availability``, which is ``asked``. What is
    drawn depends on ``seed`` alone. ``names`` are the clients' names, if the data have some.

    Raises :class:`UserError` if a file lacks a client, or an interval in it ends before it begins or overlaps another
    one of the same client.
    """
    if asked is None:
        return Always()
    if isinstance(asked, Mapping):
        shifts = drawn(asked["shift"], clients, stream(seed, Purpose.DEVICE, SHIFTS))
        return Daily(asked["from"], asked["to"], shifts)
    where = f"system.availability={asked}"
    table = read_table(asked, "system.availability", ("client", "from", "to"), (), clients, names)
    backwards = np.flatnonzero(table["to"] <= table["from"])
    if len(backwards):
        line = int(backwards[0])
        raise UserError(
            f"{where}, line {line + 2}: the interval must end after it begins, not from {table['from'][line]:g} to "
            f"{table['to'][line]:g}"
        )
    begins: list[list[float]] = [[] for _ in range(clients)]
    ends: list[list[float]] = [[] for _ in range(clients)]
    for line in np.lexsort((table["from"], table["client"])):
        client, begin, end = int(table["client"][line]), float(table["from"][line]), float(table["to"][line])
        if ends[client] and begin < ends[client][-1]:
            raise UserError(
                f"{where}, line {line + 2}: the interval of client {client} from {begin:g} to {end:g} overlaps that "
                f"from {begins[client][-1]:g} to {ends[client][-1]:g}"
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
