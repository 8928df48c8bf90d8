"""What travels between the server and whoever simulates clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedray.core.tree import Node
from fedray.engine.cohorts import positions
from fedray.engine.states import StateFile

Handle: TypeAlias = Any
"""Something that a worker's ``fetch`` turns into a dict of tensors: an object reference, or the dict itself."""


@dataclass(frozen=True)
class PhaseTask:
    """Phase ``phase`` (a position among the algorithm's phases) of some of the cohort's C clients.

    ``blocks``: their positions ``(start, stop)`` in the cohort, aligned powers of two; ``work``: what they train on, in
    samples. What follows has an entry for each client. ``broadcasts`` and ``scalars`` hold an entry for each phase up
    to this one, so that a task whose earlier phases were lost with an actor can be run again from the beginning.
    ``states`` are the clients' states (files, or handles of what is in them), None for one that has none; ``past`` the
    models that they received last, of an algorithm that needs them.
    """

    round: int
    phase: int
    blocks: Sequence[tuple[int, int]]
    members: int
    work: float
    lr: float
    ids: Sequence[int]
    weights: Sequence[float]
    steps: Sequence[int]
    gaps: Sequence[int]
    broadcasts: Sequence[Handle]
    scalars: Sequence[Mapping[str, Sequence[float]]]
    states: Sequence[Handle | None] = ()
    past: Sequence[Handle | None] = ()

    @property
    def start(self) -> int:
        """The position of the first client, which no other task of the phase has."""
        return self.blocks[0][0]

    @property
    def positions(self) -> list[int]:
        """The clients' positions in the cohort."""
        return positions(self.blocks)


@dataclass
class PhaseResult:
    """What a phase gave for the clients of a task.

    ``sums``: of each upload, the float64 values of the nodes of the summation tree that they fill; ``scalars`` and
    ``log``: lists of C numbers by name, for the algorithm and for clients.parquet; ``states``: where each client's new
    state is, if the phase gives any; ``seconds``: what the worker's time went into; ``nondeterministic``: what its
    process did that another time may give other bits.
    """

    sums: dict[str, dict[Node, NDArray[np.float64]]]
    weights: dict[str, str]
    scalars: dict[str, list[float]]
    log: dict[str, list[float]]
    states: list[StateFile] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvalTask:
    """Evaluate the models of ``broadcast`` on samples start .. stop - 1 of the split ``split``.

    ``broadcast`` holds models by name, with the buffers of model ``name`` under ``name/buffers``.
    """

    broadcast: Handle
    models: Sequence[str]
    split: str
    start: int
    stop: int


@dataclass(frozen=True)
class PersonalTask:
    """Evaluate the personal models of clients, each on its own test share."""

    round: int
    start: int
    ids: Sequence[int]
    gaps: Sequence[int]
    broadcast: Handle
    scalars: Mapping[str, Sequence[float]]
    states: Sequence[Handle | None] = ()


@dataclass
class EvalResult:
    """For each model (or client): the sums over samples of the loss, of right answers, and of the user's metrics."""

    sums: list[dict[str, float]]
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()


Task: TypeAlias = PhaseTask | EvalTask | PersonalTask
AnyTask = TypeVar("AnyTask", bound=Task)
