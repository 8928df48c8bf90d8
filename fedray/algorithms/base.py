"""What an algorithm declares and defines. The smallest algorithm is in fedavg.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedray.algorithms.server_state import ServerState
from fedray.client.optimizer import Carry
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model, Vector

__all__ = [
    "Algorithm", "Broadcast", "Carry", "Hyper", "Result", "Traffic", "Upload", "Weights", "Work", "in_place",
    "parameter",
]  # fmt: skip

Weights = Literal["weighted_mean", "uniform_mean", "sum", "mean_by"]


class Hyper(BaseModel):
    """The hyper-parameters of an algorithm. Each has a type, a range, and a description with the paper's symbol."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_not_booleans(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields and cls.model_fields[name].annotation is not bool:
                raise ValueError(f"algorithm.{name} must be a number, not {str(value).lower()}")
        return values


def parameter(default: Any, description: str, **bounds: Any) -> Any:
    """Declares a hyper-parameter: its default, its description (with the paper's symbol), and its range by ge, gt, le
    or lt."""
    return Field(default, description=description, **bounds)


@dataclass(frozen=True)
class Upload:
    """C models or vectors ``[C, ...]``, one from each client. The server gets their sum over the cohort, with weights.

    The weights are p_i for ``weighted_mean`` (they sum to 1 over the cohort), 1/m for ``uniform_mean``, 1 for ``sum``,
    and s_i / sum_i s_i for ``mean_by``, where ``scale [C, 1]`` holds the s_i. A buffer of whole numbers has no average:
    the server gets the first client's.
    """

    value: Vector
    weights: Weights
    scale: Tensor | None = None

    @classmethod
    def weighted_mean(cls, value: Vector) -> Upload:
        """Uploads ``value`` for the sum over i of p_i v_i, where p_i are the aggregation weights."""
        return cls(value, "weighted_mean")

    @classmethod
    def uniform_mean(cls, value: Vector) -> Upload:
        """Uploads ``value`` for (1/m) times the sum over i of v_i, where m is the size of the cohort."""
        return cls(value, "uniform_mean")

    @classmethod
    def sum(cls, value: Vector) -> Upload:
        """Uploads ``value`` for the sum over i of v_i."""
        return cls(value, "sum")

    @classmethod
    def mean_by(cls, scale: Tensor, value: Vector) -> Upload:
        """Uploads ``value`` for sum_i s_i v_i / sum_i s_i, with a number s_i >= 0 from each client, ``scale [C,
        1]``."""
        return cls(value, "mean_by", scale)


@dataclass
class Result:
    """What a phase returns for a stack of clients.

    ``uploads`` are summed over the cohort. ``state`` is what the clients keep until they take part again: all that the
    algorithm declares in ``client_state`` and ``client_models``, or nothing, so that the old state stays. It replaces
    the old state when the round ends. ``scalars [C, 1]`` are sent to the server unchanged, one number from each client.
    ``kept`` is available to the round's next phase.
    """

    uploads: Mapping[str, Upload] = field(default_factory=dict)
    state: Mapping[str, Vector] = field(default_factory=dict)
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Vector] = field(default_factory=dict)


@dataclass
class Broadcast:
    """What the server sends at the start of a phase: ``shared`` models and tensors by name for all clients, and
    ``scalars``, lists of numbers for the clients in the order of the cohort."""

    shared: dict[str, Vector]
    scalars: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Traffic:
    """What one client exchanges in a round: models, which have parameters and buffers, and vectors, which are as long
    as the parameters."""

    models_down: float = 1
    models_up: float = 1
    vectors_down: float = 0
    vectors_up: float = 0


@dataclass(frozen=True)
class Work:
    """What one client computes in a round beyond the forward and backward passes of its J mini-batches.

    ``per_step`` and ``once`` are operations for each parameter, in each local step and once in the round. ``forwards``
    and ``backwards`` are additional passes over each mini-batch. ``predictions`` are forward and backward passes
    through the head's predictor, for each mini-batch. ``full_gradients`` are gradients over all its samples.
    """

    per_step: float = 0
    once: float = 0
    forwards: float = 0
    backwards: float = 0
    predictions: float = 0
    full_gradients: float = 0


Step = TypeVar("Step", bound=Callable[..., Any])


def in_place(step: Step) -> Step:
    """Declares of a method ``step`` that nothing needs a model of the carry once a step has begun with it, so that
    :meth:`LocalOptimizer.descend` may overwrite it. A step that keeps the model from before, or a part of it, must not
    have this decorator."""
    step.in_place = True  # type: ignore[attr-defined]
    return step


class Algorithm:
    """A federated learning algorithm.

    A round goes through ``phases``. A phase begins with the server's :meth:`broadcast`. Then the method with the
    phase's name maps each stack of clients to a :class:`Result`, and the server ends the phase by
    :meth:`server_update`. The phase ``train`` is local training, which :meth:`begin`, :meth:`step` and :meth:`end`
    define.

    The methods of clients must be pure: what they return depends on the :class:`ClientPhase` alone, because a client
    whose process died is simply run again. Formulas broadcast over the C clients of a stack: models and vectors have C
    rows, and scalars are ``[C, 1]``.
    """

    Hyper: ClassVar[type[Hyper]] = Hyper

    paper: ClassVar[str] = ""
    phases: tuple[str, ...] = ("train",)
    client_state: tuple[str, ...] = ()
    """The names of the vectors ``[width]`` that a client keeps from one participation to the next."""
    client_models: tuple[str, ...] = ()
    """The names of the models that a client keeps from one participation to the next."""
    weighting: ClassVar[Literal["samples", "uniform"]] = "samples"
    """The paper's aggregation weights, which ``train.weighting: auto`` stands for."""
    traffic: Traffic = Traffic()
    work: Work = Work()
    needs_received: ClassVar[bool] = False
    """Whether clients need :attr:`ClientPhase.received`, the model that they received last. It is kept once for each
    round in which a client received it, and not for each client."""
    needs_public: ClassVar[bool] = False
    """Whether the server trains on a public set."""
    needs_classes: ClassVar[bool] = False
    """Whether clients or server compare what models say of classes, which only classifications and tokens have."""
    uses_server_lr: ClassVar[bool] = True
    any_optimizer: bool = False
    """Whether the local step only descends against a gradient, so that ``train.optimizer`` may be another than sgd. It
    is false where rules count on the step of SGD: they divide by eta_l, add to the step, or keep its momentum."""
    assumes_plain_sgd: ClassVar[bool] = False
    """Whether the local rule is meant for clients without momentum. A momentum buffer would accumulate its corrections.
    """
    needs_head: ClassVar[Literal["nothing", "projection", "prediction"]] = "nothing"
    """What the algorithm needs of the model's head (``model.head``): a ``projection``, whose output is the
    representation z, or a ``projection`` with a ``prediction`` of z, called ``prediction``."""
    server_training_before: ClassVar[str | None] = None
    """The phase that begins only when :meth:`server_training` has ended, or None if the server trains nothing."""

    def __init__(self, hyper: BaseModel | None = None) -> None:
        self.hyper: Any = hyper if hyper is not None else self.Hyper()

    def implied(self, cohort: int, clients: int, steps: int | None) -> Mapping[str, Any]:
        """Returns, by name, the values of hyper-parameters that are None because their default depends on the run.

        ``cohort`` of ``clients`` clients take part in a round. Each makes ``steps`` local steps; None means whole
        epochs.
        """
        return {}

    def init_server(self, server: ServerState) -> None:
        """Adds the algorithm's own models and vectors to ``server``, which already has the initial model ``x``."""

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        """Returns what the server sends to clients at the start of ``phase``. It is the model ``x`` unless an algorithm
        says otherwise."""
        return Broadcast({"x": server["x"]})

    @property
    def earlier_models(self) -> int:
        """How many rounds back the server's rules ask for models by :attr:`ServerState.model_of`. Each of these models
        is kept in a file."""
        return 0

    @property
    def momentum_window(self) -> int:
        """The number of rounds tau if clients follow the mean of the server's updates in the last tau rounds; else
        0."""
        return 0

    @property
    def stateful(self) -> bool:
        """Whether clients keep anything from one participation to the next."""
        return bool(self.client_state or self.client_models)

    def begin(self, client: ClientPhase) -> Carry:
        """Returns the models and vectors with which local training begins."""
        raise NotImplementedError

    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        """Makes one local step on a mini-batch, and returns what is carried to the next. ``batch.step`` is j, from
        0. It is faster with the decorator :func:`in_place`."""
        raise NotImplementedError

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        """Returns what local training uploads, and the clients' new state."""
        raise NotImplementedError

    def train(self, client: ClientPhase) -> Result:
        """The phase ``train``: each client makes its J_i local steps."""
        return self.end(client, self.local_steps(client, self.begin(client)))

    def local_steps(self, client: ClientPhase, carry: Carry) -> Carry:
        """Makes all local steps, beginning with ``carry``. A client stays where it is once it has made its J_i
        steps."""
        client.optimizer.in_place = getattr(self.step, "in_place", False)
        try:
            for batch in client.data.batches():
                carry = client.hold(self.step(client, carry, batch), carry, batch.step)
        finally:
            # steps that an algorithm makes after this are its own
            client.optimizer.in_place = False
        return carry

    def advice(self, momentum: float, cohort: int, clients: int, server_lr: float) -> Iterator[str]:
        """Yields lines to log about a run with this client ``momentum``, a ``cohort`` of so many ``clients``, and this
        server learning rate."""
        if momentum and self.assumes_plain_sgd:
            yield (
                f"train.momentum={momentum}: the paper's clients have none beside the algorithm's own rule, whose "
                f"corrections it accumulates up to {1 / (1 - momentum):.3g} times"
            )

    def server_training(self, server: ServerState) -> Mapping[str, Vector]:
        """Trains models of the server's own while the clients train. Returns models and vectors by name, which replace
        those of ``server`` afterwards. It must be pure."""
        return {}

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        """Applies the server's rule at the end of ``phase``. ``sums`` are the uploads, summed over the cohort;
        ``scalars`` are lists of the clients' numbers, in the order of ids."""
        raise NotImplementedError

    def eval_model(self, server: ServerState) -> Model:
        """Returns the model that is evaluated, saved and hashed."""
        x: Model = server["x"]
        return x

    def further_models(self, server: ServerState) -> Mapping[str, Model]:
        """Returns further models by name. The test accuracy of each is logged as ``<name>_accuracy``.

        The names must be the same in every round, from :meth:`init_server` on.
        """
        return {}

    def has_personal_model(self) -> bool:
        """Returns whether the algorithm defines :meth:`personal_model`."""
        return type(self).personal_model is not Algorithm.personal_model

    def personal_broadcast(self, server: ServerState) -> Broadcast:
        """Returns what clients need to build their personal models after a round."""
        raise NotImplementedError

    def personal_model(self, client: ClientPhase) -> Model:
        """Returns the personal models of a stack, built from :meth:`personal_broadcast`."""
        raise NotImplementedError

    def server_flops(self, server: ServerState, forward: float) -> float:
        """Returns the FLOPs of the server's own computation in a round. ``forward`` are those of one sample's forward
        pass.

        It may use what ``server`` says of the round and the sizes of its sets, but neither models nor data.
        """
        return 0.0
