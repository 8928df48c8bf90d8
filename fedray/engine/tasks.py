"""What travels between the server and whoever simulates clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedray.core.tree import Node
from fedray.engine.output_check import Forms
from fedray.engine.states import StateFile

Blocks: TypeAlias = Sequence[tuple[int, int]]
"""Positions ``(start, stop)`` of clients in the cohort: aligned powers of two, as the summation tree has them."""

Handle: TypeAlias = Any
"""Something that a worker's ``fetch`` turns into a dict of tensors: an object reference, or the dict itself."""


@dataclass(frozen=True)
class PhaseTask:
    """Phase ``phase`` (a position among the algorithm's phases) of some of the cohort's C clients.

    ``blocks``: their positions ``(start, stop)`` in the cohort, aligned powers of two; ``work``: what they train on, in
    samples. What follows has an entry for each client. ``broadcasts`` and ``scalars`` hold an entry for each phase up
    to this one, so that a task whose earlier phases were lost with an actor can be run again from the beginning.
    ``states`` are the clients' states (files, or handles of what is in them), None for one that has none; ``received``
    the models that they received last, of an algorithm that needs them.
    """

    round: int
    phase: int
    blocks: Blocks
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
    received: Sequence[Handle | None] = ()

    @property
    def start(self) -> int:
        """The position of the first client, which no other task of the phase has."""
        return self.blocks[0][0]

    @property
    def positions(self) -> list[int]:
        """The clients' positions in the cohort."""
        return positions(self.blocks)


@dataclass
class PartialSum:
    """What the clients of a task add to the sum of one upload.

    ``nodes``: the float64 values of the nodes of the summation tree that they fill; ``weights``: how it is summed
    (:class:`~fedray.algorithms.Upload`); ``is_model``: whether it is a model; ``scale``: the clients' s_i, if they
    weigh it.
    """

    nodes: dict[Node, NDArray[np.float64]]
    weights: str
    is_model: bool
    scale: list[float] | None = None


@dataclass
class PhaseResult:
    """What a phase gave for the clients of a task.

    ``forms``: the forms of all that the phase returned; ``sums``: what the clients add to each upload's sum;
    ``scalars`` and ``log``: lists of C numbers by name, for the algorithm and for clients.parquet; ``states``: where
    each client's new state is, if the phase gives any; ``seconds``: what the worker's time went into;
    ``nondeterministic``: what its process did that another time may give other bits.
    """

    sums: dict[str, PartialSum]
    scalars: dict[str, list[float]]
    log: dict[str, list[float]]
    forms: Forms | None = None
    states: list[StateFile] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvalTask:
    """Evaluate the models of ``broadcast`` on samples start .. stop - 1 of the split ``split``.

    ``broadcast`` holds models by name. With ``each`` the result says of each sample whether a model gets it right.
    """

    broadcast: Handle
    models: Sequence[str]
    split: str
    start: int
    stop: int
    each: bool = False


GLOBAL = "global"
"""The name of the evaluated model among those that are broadcast for evaluation."""

PERSONAL_PREFIX = "personal:"
"""Before the names of what personal models are made of, which no model's own name has."""


@dataclass
class EvalResult:
    """For each model: the sums over samples of the loss, of right answers, and of the user's metrics; and if the task
    asks for it, which samples it gets right, bool."""

    sums: list[dict[str, float]]
    right: list[NDArray[np.bool_]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScoreTask:
    """Score the models that clients have of their own, for some clients, each on its own test share.

    These are the algorithm's ``personal`` model, made of what is in ``broadcast`` under :data:`PERSONAL_PREFIX`, and
    with ``finetune_steps`` the global model, which ``broadcast`` holds as in :class:`EvalTask`, after so many local
    steps at ``lr``. The rest is as in :class:`PhaseTask`, with positions among all clients that are scored.
    """

    round: int
    lr: float
    blocks: Blocks
    ids: Sequence[int]
    gaps: Sequence[int]
    broadcast: Handle
    personal: bool
    finetune_steps: int
    scalars: Mapping[str, Sequence[float]]
    states: Sequence[Handle | None] = ()

    @property
    def start(self) -> int:
        """The position of the first client, which no other task has."""
        return self.blocks[0][0]


@dataclass
class ScoreResult:
    """For each model by name: how many samples of its own test share it gets right for each client of the task."""

    correct: dict[str, list[float]]
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()


Task: TypeAlias = PhaseTask | EvalTask | ScoreTask
AnyTask = TypeVar("AnyTask", bound=Task)


def positions(blocks: Blocks) -> list[int]:
    """The positions in some blocks."""
    return [position for block in blocks for position in range(*block)]
