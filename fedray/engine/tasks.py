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
    """A task for a worker: run one phase of the algorithm (a part of a round, from a broadcast to the clients' uploads)
    for some clients of the cohort. Sequences with an entry for each of these clients are in the order of the clients'
    positions in the cohort. A handle is a reference with which a worker gets data.

    Attributes:
        round: The number of the round, from 1.
        phase: The index of the phase in ``Algorithm.phases``.
        blocks: The clients' positions in the cohort, as ranges ``(start, stop)``.
        members: The number of clients in the whole cohort.
        work: The number of samples in all local mini-batches of the task's clients.
        lr: The clients' learning rate.
        ids, weights, steps, gaps: For each client its number, its aggregation weight, its number of local steps, and
            the rounds since it last took part (0 if it never did).
        broadcasts: For each phase of the round up to this one the handle of the models and tensors that the server has
            sent to all clients. Those of earlier phases are for a worker that must repeat these phases, because the
            process that did them was lost.
        scalars: For each phase of the round up to this one the numbers that the server has sent to single clients: a
            dict from a name to a list with a number for each client of the task.
        states: For each client the handle of its state, which it keeps between rounds, or None if it has none yet.
            Empty if clients keep no states.
        received: For each client the handle of the model that it received when it last took part, or None. Empty if the
            algorithm does not need these models.
        attempt: How often the run had gone back to a checkpoint before, which tells apart values of the same round.
        models_of: Those of the clients whose models after local training are wanted.
        keeps: Whether the worker keeps what the phase returns: the values for later phases of the round
            (``Result.kept``), and the clients' new states.
        region: The index in :attr:`Pool.regions` of a group of workers, one of which should do the task.
        sum: A number that tells the tasks of different sums from each other that are done at the same time, as those of
            several updates in asynchronous rounds. Only uploads of the same sum may be added up.
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
    attempt: int = 0
    models_of: Sequence[int] = ()
    keeps: bool = True
    region: int = 0
    sum: int = 0

    @property
    def start(self) -> int:
        """The position of the task's first client in the cohort, which identifies the task within the phase."""
        return self.blocks[0][0]

    @property
    def positions(self) -> list[int]:
        """The positions of the task's clients in the cohort, as a list in their order."""
        return positions(self.blocks)


@dataclass(kw_only=True)
class TaskResult:
    """What the result of every task has.

    Attributes:
        seconds: Maps each purpose, such as "gradient", to the seconds that the worker spent on it.
        nondeterministic: The names of operations that the worker ran and that have no deterministic version.
        lines: Lines of text to be shown to the user.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    nondeterministic: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


CANDIDATES = -1
"""The phase of a :class:`PhaseTask` in which clients that may be chosen compute their losses
(:meth:`Algorithm.candidates`). It comes before all phases of the algorithm."""


@dataclass
class PartialSum:
    """The contribution of a task's clients to the sum of one upload over the cohort.

    ``nodes`` has sums over clients that are neighbours in the cohort, which together cover the task's clients. It maps
    nodes of the summation tree, pairs (level, index) (:mod:`fedray.core.tree`), to their float64 sums. These are
    tensors on the worker's device, and arrays after :meth:`pack`. ``weights`` is the name of the rule by which the
    upload is weighted, such as "weighted_mean" (:class:`~fedray.algorithms.Upload`), and ``is_model`` says whether the
    upload is a model. ``scale`` has the numbers s_i of the task's clients if ``weights`` is "mean_by", and is None
    otherwise. If the upload is ``gathered``, ``nodes`` has the clients' rows themselves, float32.
    """

    nodes: Mapping[Node, Tensor | NDArray[np.float64]]
    weights: str
    is_model: bool
    scale: list[float] | None = None
    gathered: bool = False

    def pack(self) -> None:
        """Turns the tensors in ``nodes`` into NumPy arrays, so that they can be sent to another process."""
        self.nodes = {
            node: on_host(value).numpy() if isinstance(value, Tensor) else value for node, value in self.nodes.items()
        }


@dataclass
class PhaseResult(TaskResult):
    """The result of a :class:`PhaseTask`. Lists with an entry for each of the task's clients are in the task's order.

    Attributes:
        sums: Maps the name of each upload to the contribution of the task's clients to its sum over the cohort.
        scalars: Maps each name in ``Result.scalars`` to a list of the clients' numbers, which the server gets one by
            one.
        log: Maps columns of clients.parquet to lists of the clients' numbers, with None for a client without a number.
        forms: Maps each value that the phase returned, by a name such as ``uploads['y']``, to its kind and its shape.
        states: The files with the clients' new states; empty if the phase returns no states.
        models: Maps the numbers of clients to their trained models, each as a row of numbers. It has only the clients
            whose models are wanted (``PhaseTask.models_of``).
    """

    sums: dict[str, PartialSum]
    scalars: dict[str, list[float]]
    log: dict[str, list[float | None]]
    forms: Forms | None = None
    states: list[StateFile] = field(default_factory=list)
    models: dict[int, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalTask:
    """A task for a worker: evaluate models on the samples start .. stop - 1 of ``split``, which is "test", "validation"
    or "train".

    ``broadcast`` is a handle, a reference with which the worker gets a dict of models by name, and ``models`` has the
    names of those that it must evaluate. With ``each`` the result also has the main metric of each sample.
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

LOCAL_PREFIX = "local:"
"""In that broadcast, the beginning of the names of clients' models before they are averaged."""


@dataclass
class EvalResult(TaskResult):
    """The result of an :class:`EvalTask`.

    ``sums`` is a list with a dict for each model, in the order of ``EvalTask.models``. The dict maps "loss" and the
    name of each metric to a pair, the numerator and the denominator of the loss or metric, each summed over the samples
    (:meth:`Task.sums`). ``each`` is a list with an array ``[n, 2]`` for each model: the main metric's numerator and
    denominator for each of the n samples. The list is empty if the task did not ask for it.
    """

    sums: list[dict[str, tuple[float, float]]]
    each: list[NDArray[np.float64]] = field(default_factory=list)


@dataclass(frozen=True)
class ScoreTask:
    """A task for a worker: score models that differ from client to client, each on its client's test share, the samples
    of the test set that serve as this client's test data.

    With ``personal`` the algorithm's personal models are scored, one for each client. They are made from the clients'
    ``states``, from ``scalars``, and from those vectors in the broadcast whose names begin with
    :data:`PERSONAL_PREFIX`. If ``finetune_steps`` is not 0, the global model is scored too, after each client has
    trained it for this number of local steps at the learning rate ``lr``. ``broadcast`` is a handle, a reference with
    which the worker gets the broadcast.

    ``blocks`` are ranges ``(start, stop)`` of the clients' positions among all clients that are scored. For each client
    of the task ``ids`` has its number, ``gaps`` the rounds since it last took part (0 if it never did), and ``states``
    the handle of its state, or None if it has none yet. ``states`` is empty if the algorithm keeps no states.
    ``scalars`` are numbers that the server has for the clients: a dict from a name to a list with a number for each
    client of the task. With ``models`` the personal models themselves are wanted, and not their scores.
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
    models: bool = False

    @property
    def start(self) -> int:
        """The position of the task's first client among all clients that are scored, which identifies the task."""
        return self.blocks[0][0]


@dataclass
class ScoreResult(TaskResult):
    """The result of a :class:`ScoreTask`. ``sums`` maps each kind of model that was scored, "personal" or "finetuned",
    to a list with a pair for each client of the task: the numerator and the denominator of the main metric, each summed
    over the client's test share. ``models`` maps the numbers of clients to their personal models, each as a row of
    numbers, if the task asks for them.
    """

    sums: dict[str, list[tuple[float, float]]]
    models: dict[int, NDArray[np.float32]] = field(default_factory=dict)


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
