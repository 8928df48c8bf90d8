"""The protocol between a source, which decides which trials run, and the runner, which runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fedray.tuning.trial import Assignment, Message


class TrialSource(Protocol):
    """The protocol of objects that decide which trials run, and that receive the messages of these trials. A trial is
    one choice of hyper-parameters. The usual source is a sweep, a search over hyper-parameters.

    Each trial has a key, which is part of its :class:`Assignment`. A source returns each trial only once. If the
    process of a trial dies, the caller starts the same assignment again, and tells the source by :meth:`trial_lost`.
    ``tests/tuning/test_trial_sources.py`` checks these rules for every source.
    """

    @property
    def exhausted(self) -> bool:
        """Whether :meth:`next_trial` will return no further trial, whatever the running trials report."""

    def next_trial(self) -> Assignment | None:
        """Returns the next trial to run, as an :class:`Assignment`: its key and the configuration of each of its runs.

        None means that there is no trial now. There may be one later, unless the source is ``exhausted``.
        """

    def report(self, key: str, message: Message) -> bool:
        """Receives a ``message`` of the running trial ``key``, such as the metrics of a round, and returns whether that
        trial must stop.

        The last message of a trial is its :class:`~fedray.tuning.trial.TrialEnd`, unless this method has returned True
        before: then the trial counts as ended at once, and no further message of it follows.
        """

    def trial_lost(self, key: str, error: str) -> None:
        """Called when the process of the running trial ``key`` died with ``error``, so that the source can prepare for
        the trial's restart.

        The trial continues from its last checkpoint. So it sends some messages a second time: those that it had sent
        after that checkpoint, and the :class:`~fedray.tuning.trial.RunEnd` of each run that had ended before. The
        source must not count these messages twice.
        """

    def trial_failed(self, key: str, error: str) -> None:
        """Called when the running trial ``key`` can't be completed because of ``error``, a text. The trial has then
        ended, and is not started again."""


class CombinedTrialSource:
    """A source of trials that combines several ``sources``, so that the trials of all of them can run side by side.

    A trial is taken from the first source that has one to start, so that trials of a later source may run beside the
    last trials of an earlier one. A trial's key consists of the position of its source and its key there, as in
    ``1/17``.
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
