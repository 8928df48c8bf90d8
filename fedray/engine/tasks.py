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
"""Ranges ``(start, stop)`` of positions in the cohort, such as ``[(0, 4), (8, 10)]``: the clients of a task."""

Handle: TypeAlias = Any
"""Refers to published data, such as a broadcast: an object reference of Ray's, a file, or the data itself. A worker's
``fetch`` returns the data."""


@dataclass(frozen=True)
class PhaseTask:
    """A task for a worker: run one phase of the algorithm for some clients of the cohort. Where a sequence has an entry
    for each of these clients, the entries are in the order of their positions in the cohort.

    Attributes:
        round: The number of the round, from 1.
        phase: The phase, as an index into ``Algorithm.phases``.
        blocks: The clients' positions in the cohort, as ranges ``(start, stop)``.
        members: The number of clients in the whole cohort.
        work: The number of samples in all local mini-batches of the task's clients.
        lr: The clients' learning rate.
        ids, weights, steps, gaps: For each client its number, its aggregation weight, its number of local steps, and
            the rounds since it last took part (0 if it never did).
        broadcasts: Handles of the models and tensors that the server has sent, one for each phase up to this one, so
            that a worker can repeat earlier phases if the process that did them was lost.
        scalars: Numbers that the server has sent to each client, as lists by name, with a dict for each phase up to
            this one.
        states: For each client the handle of its state, or None if it has none yet. Empty if clients keep no states.
        received: For each client the handle of the model that it received when it last took part, or None. Empty if the
            algorithm does not need these models.
        keeps: Whether the worker stores the values in ``Result.kept``, which a later phase of the round needs.
        region: The number of the group of workers, one of which should do the task (:attr:`Pool.regions`).
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
    region: int = 0

    @property
    def start(self) -> int:
        """The position of the task's first client in the cohort, which identifies the task within the phase."""
        return self.blocks[0][0]

    @property
    def positions(self) -> list[int]:
        """The positions of the task's clients in the cohort, as a list in their order."""
        return positions(self.blocks)


@dataclass
class PartialSum:
    """The contribution of a task's clients to the sum of one upload over the cohort.

    ``nodes`` has the float64 sums at some nodes of the summation tree, by node, which together cover the task's
    clients. The sums are tensors on the worker's device, and arrays after :meth:`pack`. ``weights`` says how the upload
    is weighted (:class:`~fedray.algorithms.Upload`), and ``is_model`` whether it is a model. ``scale`` has the numbers
    s_i of the task's clients if ``weights`` is "mean_by", and is None otherwise.
    """

    nodes: Mapping[Node, Tensor | NDArray[np.float64]]
    weights: str
    is_model: bool
    scale: list[float] | None = None

    def pack(self) -> None:
        """Turns the tensors in ``nodes`` into NumPy arrays, so that they can be sent to another process."""
        self.nodes = {
            node: on_host(value).numpy() if isinstance(value, Tensor) else value for node, value in self.nodes.items()
        }


@dataclass
class PhaseResult:
    """The result of a :class:`PhaseTask`. Lists for the task's clients have an entry for each of them, in the task's
    order.

    Attributes:
        sums: The clients' contribution to the sum of each upload, by the upload's name.
        scalars: Lists of the numbers that the server's rule gets from each client, by name.
        log: Lists of numbers for clients.parquet, by column, with None for a client without a number.
        forms: The kind and the shape of each value that the phase returned, by name.
        states: The files of the clients' new states; empty if the phase returns no states.
        models: The clients' trained models that are to be saved (``run.local_models_of``), each as a row of numbers, by
            client.
        seconds: How many seconds the worker worked for each purpose, such as "gradient".
        nondeterministic: The names of operations that the worker ran and that have no deterministic version.
        lines: Lines of text to be shown to the user.
    """

    sums: dict[str, PartialSum]
    scalars: dict[str, list[float]]
    log: dict[str, list[float | None]]
    forms: Forms | None = None
    states: list[StateFile] = field(default_factory=list)
    models: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvalTask:
    """A task for a worker: evaluate models on the samples start .. stop - 1 of ``split``, which is "test", "validation"
    or "train".

    ``broadcast`` is the handle of a broadcast with models, and ``models`` has the names of those that are evaluated.
    With ``each`` the result also has the main metric of each sample.
    """

    broadcast: Handle
    models: Sequence[str]
    split: str
    start: int
    stop: int
    each: bool = False


GLOBAL = "global"
"""The name of the evaluated model in the broadcast for an evaluation, in which all models are sent to the workers."""

PERSONAL_PREFIX = "personal:"
"""In the broadcast for an evaluation, the beginning of the names of vectors from which clients make their personal
models. No model has such a name."""


@dataclass
class EvalResult:
    """The result of an :class:`EvalTask`.

    ``sums`` has a dict for each model of the task, in their order: for the loss and each metric, by name, a pair of the
    numerator and the denominator, each summed over the samples (:meth:`Task.sums`). If the task asked for it, ``each``
    has an array ``[n, 2]`` for each model, with the main metric's numerator and denominator for each of the n samples.

    ``seconds``, ``nondeterministic`` and ``lines`` are the worker's seconds for each purpose, the names of operations
    without a deterministic version that it ran, and lines for the user, as in :class:`PhaseResult`.
    """

    sums: list[dict[str, tuple[float, float]]]
    each: list[NDArray[np.float64]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScoreTask:
    """A task for a worker: score models that differ from client to client, each on its client's test share, the samples
    of the test set that serve as this client's test data.

    With ``personal`` the algorithm's personal models are scored, which are made from the vectors in the broadcast (to
    which the handle ``broadcast`` refers) whose names begin with :data:`PERSONAL_PREFIX`, and from ``scalars`` and
    ``states``. If ``finetune_steps`` is not 0, the global model is scored after this number of local steps at the
    learning rate ``lr``.

    ``blocks`` are ranges ``(start, stop)`` of the clients' positions among all clients that are scored. ``ids``,
    ``gaps`` (rounds since the last participation) and each list in ``scalars`` (the server's numbers, by name) have an
    entry for each client of the task. So does ``states``, the handles of the clients' states, if the algorithm has any.
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
        """The position of the task's first client among all clients that are scored, which identifies the task."""
        return self.blocks[0][0]


@dataclass
class ScoreResult:
    """The result of a :class:`ScoreTask`. ``sums`` has a list for each kind of model, "personal" or "finetuned". The
    list has a pair for each client of the task: the numerator and the denominator of the main metric, each summed over
    the client's test share.

    ``seconds``, ``nondeterministic`` and ``lines`` are the worker's seconds for each purpose, the names of operations
    without a deterministic version that it ran, and lines for the user, as in :class:`PhaseResult`.
    """

    sums: dict[str, list[tuple[float, float]]]
    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


Task: TypeAlias = PhaseTask | EvalTask | ScoreTask
AnyTask = TypeVar("AnyTask", bound=Task)


def working_seconds(seconds: Mapping[str, float]) -> float:
    """Returns how many seconds a worker took for a task, given ``seconds``, its seconds for each purpose. Compilation
    does not count, because a process does that only once."""
    return sum(seconds.values()) - seconds.get("compilation", 0.0)


def positions(blocks: Blocks) -> list[int]:
    """Returns a list of all positions of clients in ``blocks``, which are ranges ``(start, stop)``:
    ``[(0, 2), (4, 6)]`` gives ``[0, 1, 4, 5]``."""
    return [position for block in blocks for position in range(*block)]
