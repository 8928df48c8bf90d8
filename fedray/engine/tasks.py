"""The tasks that the server sends to workers, and the results that come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedray.core.tree import Node
from fedray.engine.output_check import Forms
from fedray.engine.state.packing import on_host
from fedray.engine.state.states import StateFile

Blocks: TypeAlias = Sequence[tuple[int, int]]
"""Ranges ``(start, stop)`` of positions in the cohort."""

Handle: TypeAlias = Any
"""Names something that was published: an object reference of Ray's, a file, or the thing itself. A worker's ``fetch``
turns it into what it names."""


@dataclass(frozen=True)
class PhaseTask:
    """A task: run one phase of the algorithm for some clients of the cohort.

    ``phase`` is the index into ``Algorithm.phases``. ``blocks`` are the clients' positions in the cohort, which has
    ``members`` clients. ``work`` is the number of samples in all their mini-batches.

    The fields from ``ids`` on have an entry for each client. ``broadcasts`` and ``scalars`` have an entry for each
    phase up to this one, so that the task can be done from the beginning if an actor was lost that did the earlier
    phases. ``states`` are handles of the clients' states, None for a client that has none yet. ``received`` are handles
    of the models that the clients received last, if the algorithm needs them. ``keeps`` says whether a later phase
    follows, for which the worker keeps what this one kept.
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
    keeps: bool = True

    @property
    def start(self) -> int:
        """The position of the first client. It tells the task from the others of the phase."""
        return self.blocks[0][0]

    @property
    def positions(self) -> list[int]:
        """The clients' positions in the cohort."""
        return positions(self.blocks)


@dataclass
class PartialSum:
    """What the clients of a task add to the sum of one upload.

    ``nodes`` are the float64 values of the nodes of the summation tree that they fill, on the worker's device; or
    arrays, as which they travel between processes. ``weights`` says how the upload is summed
    (:class:`~fedray.algorithms.Upload`). ``is_model`` says whether it is a model. ``scale`` holds the clients' s_i for
    ``mean_by``.
    """

    nodes: Mapping[Node, Tensor | NDArray[np.float64]]
    weights: str
    is_model: bool
    scale: list[float] | None = None

    def pack(self) -> None:
        """Turns the nodes into arrays."""
        self.nodes = {
            node: on_host(value).numpy() if isinstance(value, Tensor) else value for node, value in self.nodes.items()
        }


@dataclass
class PhaseResult:
    """What a phase returned for the clients of a task.

    ``forms`` describes all that the phase returned. ``sums`` is what the clients add to the sum of each upload.
    ``scalars`` and ``log`` hold a number for each client by name: the first for the server's rule, the second for
    clients.parquet, where None says that a client has none. ``states`` are the files of the clients' new states, if the
    phase returns any. ``seconds`` says how the worker spent its time. ``nondeterministic`` names the operations that
    the worker ran whose bits may differ another time.
    """

    sums: dict[str, PartialSum]
    scalars: dict[str, list[float]]
    log: dict[str, list[float | None]]
    forms: Forms | None = None
    states: list[StateFile] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvalTask:
    """A task: evaluate ``models`` on the samples start .. stop - 1 of the split ``split``.

    ``broadcast`` holds the models by name. With ``each`` the result also says how good each model is on each sample.
    """

    broadcast: Handle
    models: Sequence[str]
    split: str
    start: int
    stop: int
    each: bool = False


GLOBAL = "global"
"""The name of the evaluated model in the broadcast for evaluation."""

PERSONAL_PREFIX = "personal:"
"""The beginning of the names, in the broadcast for evaluation, of what personal models are made from. No model has such
a name."""


@dataclass
class EvalResult:
    """What an evaluation found.

    For each model, ``sums`` has the two sums over the samples of the loss and of each metric (:meth:`Task.sums`). If
    the task asked for it, ``each [n, 2]`` has the two numbers of each sample for the main metric.
    """

    sums: list[dict[str, tuple[float, float]]]
    each: list[NDArray[np.float64]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScoreTask:
    """A task: score the models of some clients, which differ from client to client, each on the client's test
    share.

    With ``personal`` these are the algorithm's personal models, which are made from what ``broadcast`` holds under
    :data:`PERSONAL_PREFIX`. With ``finetune_steps`` it is the global model after so many local steps at the learning
    rate ``lr``. The other fields are those of :class:`PhaseTask`, with positions among all the clients that are scored.
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
        """The position of the first client. It tells the task from the others."""
        return self.blocks[0][0]


@dataclass
class ScoreResult:
    """For each kind of model by name, the two sums of the main metric over the client's test share, for each client
    of the task."""

    sums: dict[str, list[tuple[float, float]]]
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()


Task: TypeAlias = PhaseTask | EvalTask | ScoreTask
AnyTask = TypeVar("AnyTask", bound=Task)


def working_seconds(seconds: Mapping[str, float]) -> float:
    """Returns how long a worker took for a task, without what it does only once in its life."""
    return sum(seconds.values()) - seconds.get("compilation", 0.0)


def positions(blocks: Blocks) -> list[int]:
    """Returns the positions in ``blocks``, one after another."""
    return [position for block in blocks for position in range(*block)]
