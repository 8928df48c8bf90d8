"""Gives tasks to the pool, and decides what is done at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedray.engine.pool import Pool
from fedray.engine.profile import Profile
from fedray.engine.tasks import PhaseResult, PhaseTask, Task


class TaskQueue:
    """The way to the workers of ``pool``.

    Two things may go on at once. With ``concurrent`` the server trains a model of its own beside the clients. With
    ``overlap`` a round is evaluated while the next one begins to train: what is put off by :meth:`later` comes before
    the next phase's tasks. ``note`` is told of each result what it did that another time may give other bits.
    """

    def __init__(
        self, pool: Pool, profile: Profile, note: Callable[[Sequence[str]], None], concurrent: bool, overlap: bool
    ) -> None:
        self.pool, self.profile, self.note = pool, profile, note
        self.concurrent, self.overlap = concurrent, overlap
        self._later: list[tuple[Task, Callable[[Any, Any], None]]] = []

    def later(self, tasks: Sequence[Task], take: Callable[[Any, Any], None]) -> None:
        """Tasks that no phase waits for; ``take(task, result)`` is called with each result."""
        self._later += [(task, take) for task in tasks]
        if not self.overlap:
            self.finish()

    @property
    def finished(self) -> bool:
        """Whether nothing is put off."""
        return not self._later

    def finish(self) -> None:
        """Have done what was put off."""
        for _ in self.run([]):
            raise AssertionError("no task of a phase was given")

    def run(self, tasks: Sequence[PhaseTask], sticky: bool = False) -> Iterator[tuple[PhaseTask, PhaseResult]]:
        """A phase's tasks and their results as they come. ``sticky``: tasks go where the phase before was done."""
        first, self._later = self._later, []
        takers = {id(task): take for task, take in first}
        every: list[Any] = [*(task for task, _ in first), *tasks]
        with self.profile.of_pool(self.pool.slots) as busy:
            for task, found in self.pool.map(every, sticky) if every else ():
                busy(found.seconds)
                self.note(found.nondeterministic)
                take = takers.get(id(task))
                if take is None:
                    yield task, found
                else:
                    take(task, found)
