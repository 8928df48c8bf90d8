"""The protocol between a source, which decides which trials run, and the runner, which runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fedray.tuning.trial import Assignment, Message


class TrialSource(Protocol):
    """Decides which trials run, and receives their reports.

    Each trial has a key, which is part of its assignment. A source returns each trial only once. If the process of a
    trial dies, the caller starts the same assignment again, and tells the source by :meth:`trial_lost`.
    ``tests/tuning/test_trial_sources.py`` checks these rules for every source.
    """

    @property
    def exhausted(self) -> bool:
        """Whether :meth:`next_trial` will return no further trial, whatever the running trials report."""

    def next_trial(self) -> Assignment | None:
        """Returns the next trial to run.

        None means that there is no trial now. There may be one later, unless the source is ``exhausted``.
        """

    def report(self, key: str, message: Message) -> bool:
        """Receives a message of a running trial, and returns whether that trial must stop.

        For its source, a trial ends with its :class:`~fedray.tuning.trial.TrialEnd`, or when this returns True.
        """

    def trial_lost(self, key: str, error: str) -> None:
        """Prepares the source for the restart of a running trial, because its process died with ``error``.

        The trial continues from its last checkpoint. It repeats its reports since that checkpoint and the ends of runs
        that had ended. The source must not count these messages twice.
        """

    def trial_failed(self, key: str, error: str) -> None:
        """Ends a running trial that can't be completed because of ``error``."""


class CombinedTrialSource:
    """A source that combines several: each call returns a trial of the first source that has one.

    When the first source has no trial to start but some are still running, trials of the second one fill the free
    places. A trial's key has the position of its source and its key there, as in ``1/17``.
    """

    def __init__(self, sources: Sequence[TrialSource]) -> None:
        self.sources = list(sources)

    @property
    def exhausted(self) -> bool:
        return all(source.exhausted for source in self.sources)

    def next_trial(self) -> Assignment | None:
        for number, source in enumerate(self.sources):
            assignment = source.next_trial()
            if assignment is not None:
                return assignment._replace(key=f"{number}/{assignment.key}")
        return None

    def report(self, key: str, message: Message) -> bool:
        source, key_there = self._find(key)
        return source.report(key_there, message)

    def trial_lost(self, key: str, error: str) -> None:
        source, key_there = self._find(key)
        source.trial_lost(key_there, error)

    def trial_failed(self, key: str, error: str) -> None:
        source, key_there = self._find(key)
        source.trial_failed(key_there, error)

    def _find(self, key: str) -> tuple[TrialSource, str]:
        number, _, key_there = key.partition("/")
        return self.sources[int(number)], key_there
