"""Connects a run with its driver, the process that the user started, which shows the run and can stop it.

An engine gives its driver a run as a generator of events: the run begins (:class:`Started`), and each round ends
(:class:`Report`). The driver sends an :class:`Order` for the next round with each event that it takes.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from fedray.core.places import for_user
from fedray.core.torch_state import neutral
from fedray.engine.callbacks import Look, Report
from fedray.experiment.experiment import Experiment


@dataclass(frozen=True)
class Order:
    """What the driver wants of the next round.

    ``cohort`` are the clients that take part, sorted ids, and None for those that ``train.sampling`` draws. ``model``
    has the tensors, by name, of a model that takes the place of the server's x before the round, or is None. ``keep``
    are the clients whose trained models the report of the round will have, or True for the whole cohort. With ``stop``
    there is no next round: the run ends. With ``back_to`` the run goes back to its checkpoint of that round instead.
    """

    cohort: tuple[int, ...] | None = None
    model: Mapping[str, Tensor] | None = None
    keep: tuple[int, ...] | bool = False
    stop: bool = False
    back_to: int | None = None


@dataclass(frozen=True)
class Started:
    """The event that a run begins, or goes on after ``round``. ``ask(method, ...)`` calls a method of the
    :class:`~fedray.engine.run.Run`, in the process that has it. It may be called while the run waits for an order."""

    round: int
    ask: Callable[..., Any]


Event: TypeAlias = Started | Report
Events: TypeAlias = Generator[Event, Order | None, None]
"""A run in its driver. None stands for an order without wishes."""


@dataclass(frozen=True)
class Driver:
    """What a run needs of its driver, which is the process that the user started.

    ``say(line)`` shows a line to the user. With ``lockstep`` the run waits for the driver's order before each round;
    otherwise a round may begin while the one before is shown. The run ends, after the round in progress, if the event
    ``stopping`` is set.
    """

    say: Callable[[str], None]
    lockstep: bool = False
    stopping: threading.Event = field(default_factory=threading.Event)


def copying(experiment: Experiment, ask: Callable[..., Any]) -> Look:
    """Returns the function with which a report fetches parts of its round, such as its clients or its model. It gets
    them by ``ask``, and makes a module of a model."""

    @neutral()
    def copied(what: str, name: Any = None) -> Any:
        found = ask("look", what, name)
        if what not in ("model", "client model"):
            return copy.deepcopy(found)
        return module_of(experiment, found)

    return copied


@neutral()
def module_of(experiment: Experiment, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Returns a module with the ``tensors``, by name, for the user: on the CPU, in evaluation mode."""
    return for_user(experiment.module(), tensors)
