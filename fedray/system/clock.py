"""The virtual clock of synchronous rounds: who answers in time, and how long each round takes.

A phase begins with the broadcast. A client needs, for a latency of l seconds, D and U bytes down and up, and F FLOPs,
    l + 8 D / (down_mbps 10^6) + F / flops_per_second + l + 8 U / (up_mbps 10^6)
seconds, longer if it has to share the server's connection (``system.server_mbps``). The phase ends when the last client
that is waited for has answered, or at the deadline. Phases follow each other; what the server computes beside the
clients takes time only where it is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedray.config.system import SystemConfig
from fedray.core.seeds import Purpose, stream
from fedray.system.availability import Availability
from fedray.system.devices import Devices
from fedray.system.transfers import Journeys, Leg, without_answer

USED, LATE, DROPPED, UNAVAILABLE = "used", "late", "dropped", "unavailable"
"""What became of a client that was drawn: the column ``outcome`` of clients.parquet."""

TIES = 1
"""The coordinate of the random numbers that say who counts of clients that answer at the same moment."""


@dataclass(frozen=True)
class PhaseCost:
    """What a client receives, sends and computes in the phase ``name``: two numbers of bytes, and its FLOPs, ``[N]``
    for N clients."""

    name: str
    down: int
    up: int
    flops: NDArray[np.float64]

    @property
    def is_at_server(self) -> bool:
        """Whether the phase happens at the server only: clients have no part in it, and need not be reached."""
        return not (self.down or self.up or self.flops.any())


@dataclass
class Asked:
    """What became of the clients that were drawn for a round.

    Attributes:
        ids: The clients' numbers, sorted.
        outcomes: For each client "used", "late", "dropped" or "unavailable".
        seconds: The virtual seconds that each client took, ``[len(ids)]``; NaN if it did not answer.
        trained: Whether each client has made its local steps and sent what came of them, ``[len(ids)]``.
        duration: The virtual seconds from the first broadcast to the end of the last phase.
        joules: What the devices took, NaN if the power of one is not known.
        bytes_down, bytes_up, flops: What clients that were not used have received, sent and computed in vain.
    """

    ids: NDArray[np.int64]
    outcomes: list[str]
    seconds: NDArray[np.float64]
    trained: NDArray[np.bool_]
    duration: float = 0.0
    joules: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    flops: float = 0.0

    @property
    def used(self) -> NDArray[np.int64]:
        """The numbers of the clients whose answers are used: the round's cohort, sorted."""
        chosen = np.array([outcome == USED for outcome in self.outcomes], bool)
        found: NDArray[np.int64] = self.ids[chosen]
        return found


@dataclass
class Clock:
    """The virtual clock of a run with synchronous rounds.

    Args:
        system: The section ``system`` of the configuration.
        devices: The clients' devices and networks.
        availability: When clients can be reached.
        phases: What clients receive, send and compute in each phase of a round.
        cohort: How many answers the server waits for: the size of the cohort.
        seed: ``run.seed``, by which it is drawn who does not answer.
    """

    system: SystemConfig
    devices: Devices
    availability: Availability
    phases: Sequence[PhaseCost]
    cohort: int
    seed: int
    _alone: list[NDArray[np.float64]] = field(init=False)

    def __post_init__(self) -> None:
        self._alone = [self._seconds_alone(phase) for phase in self.phases]

    def ask(
        self,
        number: int,
        ids: NDArray[np.int64],
        now: float,
        beside: Callable[[str, NDArray[np.int64]], float] | None = None,
        needed: int | None = None,
    ) -> Asked:
        """Returns what becomes of the clients ``ids`` (sorted), which were drawn for round ``number`` (from 1) that
        begins at the virtual second ``now``.

        ``beside(phase, ids)`` returns how many seconds after the beginning of the round the server is ready for a
        phase, because it computes something beside the clients first; ``ids`` are those that are still in the round.
        ``needed`` is how many answers it waits for, if not for those of a cohort.
        """
        asked = Asked(ids, [USED] * len(ids), np.zeros(len(ids)), np.zeros(len(ids), bool))
        begun, done, spent = np.zeros(len(ids), int), np.zeros(len(ids), int), np.zeros(len(ids))
        until = self.availability.until(ids, now)
        self._mark(asked, until <= now, UNAVAILABLE)
        silent = self._silent(number, len(ids))
        time = 0.0
        for place, phase in enumerate(self.phases):
            there = np.flatnonzero([outcome == USED for outcome in asked.outcomes])
            if not len(there):
                break
            if beside is not None:
                time = max(time, beside(phase.name, ids[there]))
            if phase.is_at_server and place:
                begun[there] = done[there] = place + 1
                continue
            gone = silent[there] | (now + time + self._alone[place][ids[there]] > until[there])
            took = self.together(place, ids[there], gone)
            left = np.maximum(np.minimum(took, until[there] - (now + time)), 0.0)
            took[gone | (now + time + took > until[there])] = math.inf
            waited_for = min(needed or self.cohort, len(there)) if place == 0 else len(there)
            used, length = self._answers(took, left, self._in_order(number, took, waited_for), waited_for)
            begun[there] = place + 1
            answered = there[np.isfinite(took)]
            done[answered] = place + 1
            spent[answered] += took[np.isfinite(took)]
            in_time = np.zeros(len(there), bool)
            in_time[used] = True
            asked.seconds[there] += took
            self._mark(asked, there[~in_time & np.isinf(took)], DROPPED)
            self._mark(asked, there[~in_time & np.isfinite(took)], LATE)
            time += length
        asked.duration = time if (until > now).any() else self._idle(ids, now)
        asked.trained = done > next((place for place, phase in enumerate(self.phases) if phase.name == "train"), 0)
        self._count(asked, begun, done, spent)
        asked.seconds[~np.isfinite(asked.seconds)] = math.nan
        return asked

    def seconds_of_server(self, flops: float) -> float:
        """Returns how many virtual seconds the server needs for so many FLOPs of its own."""
        speed = self.system.server_flops_per_second
        return flops / speed if speed else 0.0

    def alone(self, place: int) -> NDArray[np.float64]:
        """Returns how many seconds each of the N clients takes for the phase with the number ``place`` if it has the
        server for itself, ``[N]``."""
        return self._alone[place]

    def arithmetic(self, place: int, client: int) -> str:
        """Returns how the seconds of :meth:`alone` come about for one client, as a text."""
        phase, devices = self.phases[place], self.devices
        first, second = legs(devices, phase, client)
        most = 1e6 * (self.system.server_mbps or math.inf)
        down, up = (8 * count / min(leg.most, most) for count, leg in ((phase.down, first), (phase.up, second)))
        computing, latency = phase.flops[client] / devices.flops_per_second[client], devices.latency_ms[client] / 1000
        flops = float(phase.flops[client])
        return (
            f"{self.alone(place)[client]:.4g} s = {latency:.3g} s of latency + {down:.3g} s for {phase.down:,} bytes "
            f"down + {computing:.3g} s for {flops:.3g} FLOPs + {latency:.3g} s + {up:.3g} s for {phase.up:,} up"
        )

    def _seconds_alone(self, phase: PhaseCost) -> NDArray[np.float64]:
        if phase.is_at_server:
            # not even a latency
            return np.zeros(len(phase.flops))
        shared = 1e6 * (self.system.server_mbps or math.inf)
        devices, latency = self.devices, self.devices.latency_ms / 1000
        down = 8 * phase.down / np.minimum(1e6 * devices.down_mbps, shared)
        up = 8 * phase.up / np.minimum(1e6 * devices.up_mbps, shared)
        return np.asarray(latency + down + phase.flops / devices.flops_per_second + latency + up)

    def together(
        self, place: int, ids: NDArray[np.int64], gone: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Returns how many seconds each of the clients ``ids`` takes for the phase with the number ``place`` if they
        begin it together and share the server's connection. Those that will be ``gone`` receive, and send nothing, but
        take as long as if they sent alone."""
        phase, shared = self.phases[place], self.system.server_mbps
        if shared is None or not (phase.down or phase.up):
            return self._alone[place][ids]
        if np.maximum(self.devices.down_mbps[ids], self.devices.up_mbps[ids]).sum() <= shared:
            # together they can't fill it
            return self._alone[place][ids]
        alike: dict[tuple[bool, tuple[float, ...]], list[int]] = {}
        for position, facts in enumerate(facts_of(self.devices, phase, ids)):
            alike.setdefault((gone is not None and bool(gone[position]), facts), []).append(position)
        journeys = Journeys(1e6 * shared)
        for (is_gone, facts), positions in alike.items():
            both = _legs(phase, *facts)
            done = without_answer(both, journeys.capacity) if is_gone else both
            journeys.launch(positions, 0.0, done, len(positions))
        took = np.empty(len(ids))
        while (arrival := journeys.next()) is not None:
            took[arrival[1]] = arrival[0]
        return took

    def _silent(self, number: int, count: int) -> NDArray[np.bool_]:
        """Draws which of ``count`` clients never answer in round ``number``."""
        if not self.system.dropout:
            return np.zeros(count, bool)
        return stream(self.seed, Purpose.ANSWER, number).random(count) < self.system.dropout

    def _in_order(self, number: int, took: NDArray[np.float64], needed: int) -> NDArray[np.int64]:
        """Returns the places in ``took``, the seconds after which clients answer, in the order of the answers. If not
        all are ``needed``, it is drawn for round ``number`` who is first of those that answer at the same moment: in
        the order of their numbers the last clients would never count."""
        if needed == len(took):
            return np.argsort(took, kind="stable")
        ties = stream(self.seed, Purpose.ANSWER, number, TIES).permutation(len(took))
        return np.lexsort((ties, took))

    def _answers(
        self, took: NDArray[np.float64], left: NDArray[np.float64], order: NDArray[np.int64], needed: int
    ) -> tuple[NDArray[np.int64], float]:
        """Returns which clients the server uses, as places in ``took``, and after how many seconds the phase ends.
        ``took`` are the seconds after which they answer, infinity if they never do, ``order`` their places sorted by
        these, and ``left`` the seconds after which those that never answer are known to be gone."""
        deadline = self.system.deadline_seconds
        limit = math.inf if deadline is None or self.system.on_late == "keep" else deadline
        used = order[np.isfinite(took[order]) & (took[order] <= limit)][:needed]
        last = float(took[used].max()) if len(used) else 0.0
        if len(used) == needed:
            return used, last
        # somebody does not answer, which the server finds out by waiting
        return used, max(last, float(left[np.isinf(took)].max()) if deadline is None else deadline)

    def _mark(self, asked: Asked, which: NDArray[np.generic], outcome: str) -> None:
        for place in (np.flatnonzero(which) if which.dtype == bool else which).tolist():
            asked.outcomes[place] = outcome

    def _idle(self, ids: NDArray[np.int64], now: float) -> float:
        """Returns how many seconds a round takes if none of its clients ``ids`` can be reached when it begins: until
        the deadline, or without one until the first of them can be, or the first other client if they never can."""
        if self.system.deadline_seconds is not None:
            return self.system.deadline_seconds
        everybody = np.arange(len(self.devices.watts))
        for of in (ids, everybody):
            first = float(self.availability.next_start(of, now).min(initial=math.inf))
            if math.isfinite(first):
                return first - now
        return 0.0

    def _count(
        self, asked: Asked, begun: NDArray[np.int64], done: NDArray[np.int64], spent: NDArray[np.float64]
    ) -> None:
        """Adds up the energy of the clients, and what those that were not used have done in vain. Of each client,
        ``begun`` says for how many phases it has received what it needs, ``done`` for how many it has answered, in time
        or not, and ``spent`` how many seconds these took."""
        outcomes, busy = np.array(asked.outcomes), done > 0
        asked.joules = math.fsum(self.devices.watts[asked.ids[busy]] * spent[busy])
        asked.seconds[outcomes == UNAVAILABLE] = math.nan
        in_vain = outcomes != USED
        for place, phase in enumerate(self.phases):
            sent = in_vain & (done > place)
            asked.bytes_down += phase.down * int((in_vain & (begun > place)).sum())
            asked.bytes_up += phase.up * int(sent.sum())
            asked.flops += math.fsum(phase.flops[asked.ids[sent]])


def facts_of(devices: Devices, phase: PhaseCost, ids: NDArray[np.int64]) -> Iterator[tuple[float, ...]]:
    """Yields for each of the clients ``ids`` what decides how long ``phase`` takes it: its latency in milliseconds, its
    megabits per second down and up, its FLOPs per second, and the FLOPs of the phase."""
    facts = (devices.latency_ms, devices.down_mbps, devices.up_mbps, devices.flops_per_second, phase.flops)
    return zip(*(each[ids].tolist() for each in facts), strict=True)


def legs(devices: Devices, phase: PhaseCost, client: int) -> tuple[Leg, Leg]:
    """Returns what ``client`` does in ``phase``: it receives, and then computes and sends."""
    (facts,) = facts_of(devices, phase, np.array([client]))
    return _legs(phase, *facts)


def _legs(
    phase: PhaseCost, latency_ms: float, down_mbps: float, up_mbps: float, flops_per_second: float, flops: float
) -> tuple[Leg, Leg]:
    latency = latency_ms / 1000
    return (
        Leg(latency, 8.0 * phase.down, 1e6 * down_mbps),
        Leg(flops / flops_per_second + latency, 8.0 * phase.up, 1e6 * up_mbps),
    )
