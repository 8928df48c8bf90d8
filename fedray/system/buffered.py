"""The virtual clock of asynchronous rounds: who trains from which model, and which update uses the answer.

A number of clients train at the same time. When one answers, another begins, with the server's model of that moment.
Every K answers make an update: the model x^{r+1} that round r + 1 begins with. An answer that began with x^r and is
used by the update of round r + s is s updates late; its weight may shrink with s (FedBuff: J. Nguyen et al., AISTATS
2022).

Times depend on devices and costs, and not on what is trained, so the schedule is known before anything is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedray.core.seeds import Purpose, stream
from fedray.errors import UserError
from fedray.system.availability import Availability
from fedray.system.transfers import Journeys, Leg, without_answer

TRIES = 100
"""How often a client is drawn at random before those that could be are listed."""

WAKE = -1
"""Stands for the moment at which a client can be reached, among the numbers of starts."""


@dataclass
class Start:
    """A client that begins to train.

    Attributes:
        number: Counts the starts of a run, from 0.
        client: The client's number.
        version: The round r whose model x^r it begins with.
        began: The virtual second at which it begins.
        ended: The virtual second at which it has answered, or would have; NaN until that is known.
        update: The round whose update uses its answer; 0 if it never answers, None until that is known.
    """

    number: int
    client: int
    version: int
    began: float
    ended: float = math.nan
    update: int | None = None

    @property
    def staleness(self) -> int:
        """How many updates the server has made since the client began."""
        return (self.update or self.version) - self.version


@dataclass
class Update:
    """The update at the end of a round: the virtual second at which it is made, and the starts whose answers it uses,
    in the order in which they came. ``dropped`` are starts of which it became known meanwhile that they never
    answer."""

    time: float = math.nan
    answers: list[Start] = field(default_factory=list)
    dropped: list[Start] = field(default_factory=list)


class Schedule:
    """Simulates asynchronous rounds event by event, as far as it is asked. It ends when no client can be reached any
    more.

    Args:
        legs: ``legs(client)`` returns what a client does in a participation.
        capacity: Bits per second that all who transfer at once share; infinity for no limit.
        availability: When clients can be reached.
        present: The clients that may be drawn, ``[N]``.
        buffer: K, the answers that make an update.
        concurrency: How many clients train at the same time.
        dropout: The probability that a client never answers.
        seed: ``run.seed``, by which clients are drawn.
    """

    def __init__(
        self,
        legs: Callable[[int], Sequence[Leg]],
        capacity: float,
        availability: Availability,
        present: NDArray[np.int64],
        buffer: int,
        concurrency: int,
        dropout: float,
        seed: int,
    ) -> None:
        self.legs, self.availability, self.present = legs, availability, present
        self.buffer, self.concurrency, self.dropout, self.seed = buffer, concurrency, dropout, seed
        self.starts: list[Start] = []
        self._of: dict[int, list[Start]] = {}
        self.updates = [Update()]
        self._journeys = Journeys(capacity)
        # by client: whether it trains, and the version of the model with which it began last (0: it never did)
        self._is_busy = np.zeros(int(present.max()) + 1, bool)
        self._trained = np.zeros(len(self._is_busy), np.int64)
        self._training = 0
        self._time, self._wakes, self._has_ended = 0.0, math.inf, False
        self._fill()

    def has(self, number: int) -> bool:
        """Returns whether the update at the end of round ``number``, from 1, is ever made."""
        while len(self.updates) <= number and not self._has_ended:
            self._step()
        return len(self.updates) > number

    def begin_with(self, number: int, last: float = math.inf) -> list[Start]:
        """Returns the starts that begin with the model of round ``number``, in their order, each with its update; None
        for those of which it is not known yet, but only that it comes after round ``last``."""
        self.update(number)
        while len(self.updates) <= last and any(each.update is None for each in self._of.get(number, ())):
            self._step()
        return self._of.get(number, [])

    def update(self, number: int) -> Update:
        """Returns the update at the end of round ``number``, from 1. Raises :class:`UserError` if it is never made."""
        if not self.has(number):
            raise UserError(f"system.availability: no client can be reached any more in round {number}")
        return self.updates[number - 1]

    def _step(self) -> None:
        """Goes on to the next answer, and lets others begin in its place."""
        arrival = self._journeys.next()
        if arrival is None:
            self._wait()
            return
        self._time, number = arrival[0], arrival[1]
        if number == WAKE:
            self._wakes = math.inf
            self._fill_if_all_are_there()
            return
        start = self.starts[number]
        start.ended = self._time
        self._is_busy[start.client] = False
        self._training -= 1
        update = self.updates[-1]
        if self._answers(start):
            start.update = len(self.updates)
            update.answers.append(start)
            if len(update.answers) == self.buffer:
                self._make()
        else:
            start.update = 0
            update.dropped.append(start)
        self._fill_if_all_are_there()

    def _fill_if_all_are_there(self) -> None:
        # who answers at the same moment is there before others begin
        if not self._journeys.has_more_now:
            self._fill()

    def _make(self) -> None:
        self.updates[-1].time = self._time
        self.updates.append(Update())

    def _answers(self, start: Start) -> bool:
        (until,) = self.availability.until(np.array([start.client]), start.began)
        return not self._is_silent(start) and bool(start.ended <= until)

    def _is_silent(self, start: Start) -> bool:
        return bool(self.dropout) and stream(self.seed, Purpose.ANSWER, start.number).random() < self.dropout

    def _fill(self) -> None:
        """Lets clients begin until as many train as should, or no further one can be reached."""
        while self._training < self.concurrency and (client := self._draw()) is not None:
            start = Start(len(self.starts), client, len(self.updates), self._time)
            self.starts.append(start)
            self._of.setdefault(start.version, []).append(start)
            self._is_busy[client], self._trained[client] = True, start.version
            self._training += 1
            legs = self.legs(client)
            done = without_answer(legs, self._journeys.capacity) if self._is_silent(start) else legs
            self._journeys.launch(start.number, self._time, done)
        if self._training < self.concurrency:
            self._wake_for_others()

    def _wake_for_others(self) -> None:
        """Schedules the moment at which the next idle client can be reached, so that it need not wait for an answer."""
        begins = self._next_start()
        if self._time < begins < self._wakes:
            self._wakes = begins
            self._journeys.launch(WAKE, self._time, [Leg(begins - self._time, 0.0, 1.0)])

    def _next_start(self) -> float:
        """Returns when the first client that may begin with the server's model can be reached; infinity if none can."""
        fresh = self.present[self._is_fresh(self.present)]
        return float(self.availability.next_start(fresh, self._time).min(initial=math.inf))

    def _draw(self) -> int | None:
        """Draws a client that does not train and can be reached, or returns None if there is none."""
        if self._training == len(self.present):
            return None
        generator = stream(self.seed, Purpose.COHORT, len(self.starts))
        drawn = generator.choice(self.present, size=TRIES)
        able = drawn[self._can_begin(drawn)]
        if len(able):
            return int(able[0])
        able = self.present[self._can_begin(self.present)]
        return int(generator.choice(able)) if len(able) else None

    def _is_fresh(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        # whoever trained from this model already would send the same again
        return np.asarray(~self._is_busy[ids] & (self._trained[ids] != len(self.updates)))

    def _can_begin(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which of the clients ``ids`` may begin now, ``[len(ids)]``."""
        return np.asarray(self._is_fresh(ids) & (self.availability.until(ids, self._time) > self._time))

    def _wait(self) -> None:
        """Goes on where nobody trains: to the moment at which a client can be reached that has not trained from this
        model, or, if none ever can, to an update of fewer answers."""
        begins = self._next_start()
        if math.isfinite(begins):
            self._time = begins
        elif self.updates[-1].answers or not self._is_fresh(self.present).any():
            # if nobody has answered, the model stays as it is
            self._make()
        else:
            self._has_ended = True
            return
        self._fill()
