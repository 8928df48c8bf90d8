"""Several desks as one, so that what the first has left and what the next begins with run side by side."""

from __future__ import annotations

from collections.abc import Sequence

from fedray.tuning.runner import Desk
from fedray.tuning.trial import Assignment, Message


class Several:
    """Gives what the first desk has that has something; keys are the desk's number and its own key."""

    def __init__(self, desks: Sequence[Desk]) -> None:
        self.desks = list(desks)

    @property
    def exhausted(self) -> bool:
        return all(desk.exhausted for desk in self.desks)

    def next(self) -> Assignment | None:
        for number, desk in enumerate(self.desks):
            assignment = desk.next()
            if assignment is not None:
                return assignment._replace(key=f"{number}/{assignment.key}")
        return None

    def hear(self, key: str, message: Message) -> bool:
        desk, own_key = self._of(key)
        return desk.hear(own_key, message)

    def lost(self, key: str, error: str) -> None:
        desk, own_key = self._of(key)
        desk.lost(own_key, error)

    def failed(self, key: str, error: str) -> None:
        desk, own_key = self._of(key)
        desk.failed(own_key, error)

    def _of(self, key: str) -> tuple[Desk, str]:
        number, _, own_key = key.partition("/")
        return self.desks[int(number)], own_key
