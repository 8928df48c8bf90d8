"""Sends tasks to the pool, and decides which of them run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedray.engine.pool import Pool
from fedray.engine.profile import Profile
from fedray.engine.tasks import PhaseResult, PhaseTask, Task


class TaskQueue:
    """Sends the tasks of a run to the workers of ``pool``, and decides which tasks are done at the same time.

    Args:
        pool: The workers.
        profile: Measures how the time of a round is spent.
        note: ``note(result)`` is called with the result of each task when it arrives.
        concurrent: Whether the server trains a model of its own while the clients train.
        overlap: Whether a round is evaluated while the next round begins to train. The tasks of its evaluation, which
            :meth:`later` puts off, are then sent just before the tasks of the next phase.
    """

    def __init__(
        self, pool: Pool, profile: Profile, note: Callable[[Any], None], concurrent: bool, overlap: bool
    ) -> None:
        self.pool, self.profile, self.note = pool, profile, note
        self.concurrent, self.overlap = concurrent, overlap
        self._later: list[tuple[Task, Callable[[Any, Any], None]]] = []

    def later(self, tasks: Sequence[Task], take: Callable[[Any, Any], None]) -> None:
        """Adds tasks whose results the training does not need, such as those of an evaluation. With ``overlap`` they
        are put off until the next call of :meth:`run` or :meth:`finish`; otherwise they are done immediately. When a
        task is done, ``take(task, result)`` is called."""
        self._later += [(task, take) for task in tasks]
        if not self.overlap:
            self.finish()

    @property
    def finished(self) -> bool:
        """Whether all tasks that :meth:`later` has put off have been sent to the workers."""
        return not self._later

    def finish(self) -> None:
        """Does all tasks that :meth:`later` has put off, and returns when they are done."""
        for _ in self.run([]):
            raise AssertionError("no task of a phase was given")

    def run(self, tasks: Sequence[PhaseTask], sticky: bool = False) -> Iterator[tuple[PhaseTask, PhaseResult]]:
        """Does the tasks of a phase, and yields each task with its result as soon as the result arrives. Tasks that
        :meth:`later` has put off are sent first; their results are not yielded. With ``sticky`` a task goes to the
        worker that did the previous phase for the same clients, if possible."""
        first, self._later = self._later, []
        takers = {id(task): take for task, take in first}
        every: list[Any] = [*(task for task, _ in first), *tasks]
        with self.profile.of_pool(self.pool.slots) as busy:
            for task, found in self.pool.map(every, sticky) if every else ():
                busy(found.seconds)
                self.note(found)
                take = takers.get(id(task))
                if take is None:
                    yield task, found
                else:
                    take(task, found)
