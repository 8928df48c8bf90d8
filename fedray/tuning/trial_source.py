"""The protocol between what decides which trials are run and what runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fedray.tuning.trial import Assignment, Message


class TrialSource(Protocol):
    """Decides which trials are run, and receives what they report.

    Each trial has a key, which its assignment carries. A source returns a trial once. If the process of the trial dies,
    the caller starts the same assignment again and tells the source by :meth:`trial_lost`; the source does not return
    it a second time. ``tests/tuning/test_trial_sources.py`` checks this of every source.
    """

    @property
    def exhausted(self) -> bool:
        """Whether :meth:`next_trial` will never return a trial again, whatever the running trials report."""

    def next_trial(self) -> Assignment | None:
        """Returns the next trial to run.

        None means that there is none now; there may be one later unless ``exhausted``.
        """

    def report(self, key: str, message: Message) -> bool:
        """Takes a message of a running trial, and returns whether that trial must stop.

        A trial is over for its source when its :class:`~fedray.tuning.trial.TrialEnd` was reported, or when a message
        was answered with True.
        """

    def trial_lost(self, key: str, error: str) -> None:
        """Prepares the source for a running trial to start again, because its process died with ``error``.

        The trial continues from its last checkpoint. It then reports again what it had reported after that checkpoint,
        and the ends of runs that had ended, so that the source must not count these messages twice.
        """

    def trial_failed(self, key: str, error: str) -> None:
        """Takes note that a running trial can't be completed because of ``error``. The trial is over."""


class CombinedTrialSource:
    """A source that combines several: each call returns a trial of the first source that has one.

    While the trials that the first source returned last are running, trials of the second one fill the free places. A
    trial's key is the position of its source and its key there, as in ``1/17``.
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
