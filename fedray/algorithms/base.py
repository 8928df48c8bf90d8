"""What an algorithm declares and defines; see fedavg.py for the smallest one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedray.algorithms.server_state import ServerState
from fedray.core.batches import Batch
from fedray.core.client import ClientPhase
from fedray.core.optimizer import Carry
from fedray.core.vectors import Model, Vector

Weights = Literal["weighted_mean", "uniform_mean", "sum", "mean_by"]


class Hyper(BaseModel):
    """Hyper-parameters of an algorithm: typed, ranged, documented with the paper's symbol."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_not_booleans(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields and cls.model_fields[name].annotation is not bool:
                raise ValueError(f"algorithm.{name} must be a number, not {str(value).lower()}")
        return values


def parameter(default: Any, description: str, **bounds: Any) -> Any:
    """A hyper-parameter: its default, what it is (with the paper's symbol), and its range (ge, gt, le, lt)."""
    return Field(default, description=description, **bounds)


@dataclass(frozen=True)
class Upload:
    """C models or vectors ``[C, ...]`` of which the server gets one: their sum over the cohort with ``weights``.

    ``weighted_mean``: p_i, which are 1 in sum over the cohort; ``uniform_mean``: 1/m; ``sum``: 1; ``mean_by``:
    ``scale [C, 1]`` over its sum. Whole-number buffers of models, which have no average, are the first client's.
    """

    value: Vector
    weights: Weights
    scale: Tensor | None = None

    @classmethod
    def weighted_mean(cls, value: Vector) -> Upload:
        """sum_i p_i v_i, with the aggregation weights p_i."""
        return cls(value, "weighted_mean")

    @classmethod
    def uniform_mean(cls, value: Vector) -> Upload:
        """(1/m) sum_i v_i over the cohort of m clients."""
        return cls(value, "uniform_mean")

    @classmethod
    def sum(cls, value: Vector) -> Upload:
        """sum_i v_i."""
        return cls(value, "sum")

    @classmethod
    def mean_by(cls, scale: Tensor, value: Vector) -> Upload:
        """sum_i s_i v_i / sum_i s_i, with one non-negative scalar s_i per client, ``scale [C, 1]``."""
        return cls(value, "mean_by", scale)


@dataclass
class Result:
    """What a phase gives for a stack of clients.

    ``uploads`` are summed over the cohort; ``state`` replaces the clients' models and vectors when the round commits;
    ``scalars [C, 1]`` go to the server as they are, one per client; ``kept`` is there again in the next phase.
    """

    uploads: Mapping[str, Upload] = field(default_factory=dict)
    state: Mapping[str, Vector] = field(default_factory=dict)
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Vector] = field(default_factory=dict)


@dataclass
class Broadcast:
    """What the server sends at the start of a phase: models and tensors by name for all, and scalars for each client.

    ``scalars``: lists in the order of the cohort.
    """

    shared: dict[str, Vector]
    scalars: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """What one client exchanges per round: models (parameters and buffers) and state vectors (parameters only)."""

    models_down: float = 1
    models_up: float = 1
    vectors_down: float = 0
    vectors_up: float = 0


@dataclass(frozen=True)
class Work:
    """What one client computes in a round beyond the forward and backward passes of its J mini-batches.

    ``per_step`` and ``once``: operations per parameter, in each local step and once a round; ``forwards`` and
    ``backwards``: further passes over each mini-batch; ``predictions``: passes there and back through the head's
    predictor, per mini-batch; ``full_gradients``: gradients over all its samples.
    """

    per_step: float = 0
    once: float = 0
    forwards: float = 0
    backwards: float = 0
    predictions: float = 0
    full_gradients: float = 0


class Algorithm:
    """A federated learning algorithm.

    A round runs through ``phases``. Each begins with the server's :meth:`broadcast`, is a method of the phase's name
    that maps a stack of clients to a :class:`Result`, and ends with the server's :meth:`server_update`. The phase
    ``train`` is local training, given by :meth:`begin`, :meth:`step` and :meth:`end`. Client methods are pure: whatever
    they return depends on the :class:`ClientPhase` alone, since a lost client is simply run again. Formulas broadcast
    over the C clients of a stack: models and vectors have C rows, scalars are ``[C, 1]``.
    """

    Hyper: ClassVar[type[Hyper]] = Hyper

    paper: ClassVar[str] = ""
    phases: tuple[str, ...] = ("train",)
    client_state: tuple[str, ...] = ()
    """Names of the vectors ``[width]`` that a client keeps from one participation to the next."""
    client_models: tuple[str, ...] = ()
    """Names of the models that it keeps likewise."""
    weighting: ClassVar[Literal["samples", "uniform"]] = "samples"
    """The paper's aggregation weights, used under ``train.weighting: auto``."""
    traffic: Traffic = Traffic()
    work: Work = Work()
    needs_received: ClassVar[bool] = False
    """Whether clients need the model that they received last, :attr:`ClientPhase.received`. It is kept once for each
    round in which a client got it, not for each client."""
    needs_public: ClassVar[bool] = False
    """Whether the server trains on a public set of its own."""
    uses_server_lr: ClassVar[bool] = True
    assumes_plain_sgd: ClassVar[bool] = False
    """Whether the local rule is meant for clients without momentum, which would accumulate its corrections."""
    needs_head: ClassVar[Literal["nothing", "projection", "prediction"]] = "nothing"
    """What it needs of the model's head (``model.head``): a ``projection``, whose output is the representation z, and
    beside it a ``prediction`` of z."""
    server_training_before: ClassVar[str | None] = None
    """The phase before which :meth:`server_training` must be done."""

    def __init__(self, hyper: BaseModel | None = None) -> None:
        self.hyper: Any = hyper if hyper is not None else self.Hyper()

    def implied(self, cohort: int, clients: int, steps: int | None) -> Mapping[str, Any]:
        """What hyper-parameters whose default depends on the run stand for when they are None, by name.

        ``cohort`` of ``clients`` clients take part in a round, with ``steps`` local steps each (None: whole epochs).
        """
        return {}

    def init_server(self, server: ServerState) -> None:
        """Add the algorithm's models and vectors to ``server``, which holds the initial model ``x``."""

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        """What clients need in ``phase``; by default the model ``x``."""
        return Broadcast({"x": server["x"]})

    @property
    def earlier_models(self) -> int:
        """How many rounds back the server's rules ask for models, by :attr:`ServerState.model_of`. Each is kept in a
        file."""
        return 0

    @property
    def stateful(self) -> bool:
        """Whether clients keep anything from one participation to the next."""
        return bool(self.client_state or self.client_models)

    def begin(self, client: ClientPhase) -> Carry:
        """The models and vectors that local training carries from step to step."""
        raise NotImplementedError

    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        """The local step ``batch.step`` (j, from 0), on one mini-batch."""
        raise NotImplementedError

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        """What local training gives."""
        raise NotImplementedError

    def train(self, client: ClientPhase) -> Result:
        """The phase ``train``: J_i local steps of each client."""
        return self.end(client, self.local_steps(client, self.begin(client)))

    def local_steps(self, client: ClientPhase, carry: Carry) -> Carry:
        """All local steps from ``carry`` on; a client that has made its J_i steps is held where it is."""
        for batch in client.data.batches():
            carry = client.hold(self.step(client, carry, batch), carry, batch.step)
        return carry

    def advice(self, momentum: float, cohort: int, clients: int, server_lr: float) -> Iterator[str]:
        """Lines worth logging about a run with this client momentum, so many of the clients in a cohort, and this
        server learning rate."""
        if momentum and self.assumes_plain_sgd:
            yield (
                f"train.momentum={momentum}: the paper's clients have none beside the algorithm's own rule, whose "
                f"corrections it accumulates up to {1 / (1 - momentum):.3g} times"
            )

    def server_training(self, server: ServerState) -> Mapping[str, Vector]:
        """What the server trains while the clients train, as its models and vectors by name, which replace those of
        ``server`` when it is done; pure."""
        return {}

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        """The server's rule after ``phase``: ``sums`` are the uploads, summed over the cohort; ``scalars`` the
        clients', in id order."""
        raise NotImplementedError

    def eval_model(self, server: ServerState) -> Model:
        """The model that is evaluated, saved and hashed."""
        return server["x"]

    def further_models(self, server: ServerState) -> Mapping[str, Model]:
        """Further models by name: the test accuracy of each is the column ``<name>_accuracy``.

        The names must be the same in every round, from :meth:`init_server` on.
        """
        return {}

    def has_personal_model(self) -> bool:
        """Whether :meth:`personal_model` is defined."""
        return type(self).personal_model is not Algorithm.personal_model

    def personal_broadcast(self, server: ServerState) -> Broadcast:
        """What clients need to build their personal models after a round."""
        raise NotImplementedError

    def personal_model(self, client: ClientPhase) -> Model:
        """The personal models of a stack, from :meth:`personal_broadcast`."""
        raise NotImplementedError

    def server_flops(self, server: ServerState, forward: float) -> float:
        """The server's own computation in the round, in FLOPs; ``forward`` is one sample's forward pass.

        It may use what ``server`` says of the round and the sizes of its sets, but neither models nor data.
        """
        return 0.0
