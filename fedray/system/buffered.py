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
from fedray.system.transfers import Journeys, Leg

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
    """Simulates asynchronous rounds event by event, as far as it is asked. Raises :class:`UserError` when no client can
    be reached any more.

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
        self._busy: set[int] = set()
        self._trained: dict[int, int] = {}
        self._time, self._wakes = 0.0, math.inf
        self._fill()

    def begin_with(self, number: int) -> list[Start]:
        """Returns the starts that begin with the model of round ``number``, in their order, each with its update."""
        while len(self.updates) <= number or any(each.update is None for each in self._of.get(number, ())):
            self._step()
        return self._of.get(number, [])

    def update(self, number: int) -> Update:
        """Returns the update at the end of round ``number``, from 1."""
        while len(self.updates) <= number:
            self._step()
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
        self._busy.remove(start.client)
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

    def _legs(self, start: Start) -> list[Leg]:
        """Returns what a client does that begins. One that never answers takes nothing of what all share for its
        answer, but is waited for as long as if it did."""
        *others, last = self.legs(start.client)
        if self._is_silent(start):
            last = Leg(last.seconds + last.bits / min(last.most, self._journeys.capacity), 0.0, last.most)
        return [*others, last]

    def _fill(self) -> None:
        """Lets clients begin until as many train as should, or no further one can be reached."""
        while len(self._busy) < self.concurrency and (client := self._draw()) is not None:
            start = Start(len(self.starts), client, len(self.updates), self._time)
            self.starts.append(start)
            self._of.setdefault(start.version, []).append(start)
            self._busy.add(client)
            self._trained[client] = start.version
            self._journeys.launch(start.number, self._time, self._legs(start))
        if len(self._busy) < self.concurrency:
            self._wake_for_others()

    def _wake_for_others(self) -> None:
        """Schedules the moment at which the next idle client can be reached, so that it need not wait for an answer."""
        version = len(self.updates)
        able = [each for each in self.present.tolist() if each not in self._busy and self._trained.get(each) != version]
        begins = min((self.availability.next_start(each, self._time) for each in able), default=math.inf)
        if self._time < begins < self._wakes:
            self._wakes = begins
            self._journeys.launch(WAKE, self._time, [Leg(begins - self._time, 0.0, 1.0)])

    def _draw(self) -> int | None:
        """Draws a client that does not train and can be reached, or returns None if there is none."""
        if len(self._busy) == len(self.present):
            return None
        generator = stream(self.seed, Purpose.COHORT, len(self.starts))
        for drawn in generator.choice(self.present, size=TRIES).tolist():
            if self._can_begin(drawn):
                return int(drawn)
        able = [client for client in self.present.tolist() if self._can_begin(client)]
        return int(generator.choice(able)) if able else None

    def _can_begin(self, client: int) -> bool:
        (until,) = self.availability.until(np.array([client]), self._time)
        # whoever trained from this model already would send the same again
        fresh = client not in self._busy and self._trained.get(client) != len(self.updates)
        return fresh and bool(until > self._time)

    def _wait(self) -> None:
        """Goes on where nobody trains: to the moment at which a client can be reached that has not trained from this
        model, or, if all have, to an update of fewer answers."""
        version = len(self.updates)
        able = [client for client in self.present.tolist() if self._trained.get(client) != version]
        begins = min((self.availability.next_start(client, self._time) for client in able), default=math.inf)
        if math.isfinite(begins):
            self._time = begins
        elif self.updates[-1].answers:
            self._make()
        elif able:
            raise UserError("system.availability: no client can be reached any more")
        else:
            # nobody has answered: the model stays as it is
            self._make()
        self._fill()
