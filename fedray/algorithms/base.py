"""The base class of all algorithms, and the types that its methods return. The smallest algorithm is in fedavg.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedray.algorithms.declared_costs import Traffic, Work
from fedray.algorithms.messages import Broadcast, Result, Upload, Weights
from fedray.algorithms.server_state import ServerState
from fedray.client.optimizer import Carry
from fedray.client.phase import ClientPhase
from fedray.core.batches import Batch
from fedray.core.vectors import Model, Vector

__all__ = [
    "Algorithm", "Broadcast", "Carry", "Hyper", "Result", "Traffic", "Upload", "Weights", "Work", "in_place",
    "parameter",
]  # fmt: skip


class Hyper(BaseModel):
    """The hyper-parameters of an algorithm, which are the keys ``algorithm.*`` of a configuration.

    Subclass it inside the algorithm's class under the same name. The algorithm's methods then read a hyper-parameter as
    ``self.hyper.mu``::

        class Hyper(FedAvg.Hyper):
            mu: float = parameter(0.01, "pull to the server's model (mu)", ge=0)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_not_booleans(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields and cls.model_fields[name].annotation is not bool:
                raise ValueError(f"algorithm.{name} must be a number, not {str(value).lower()}")
        return values


def parameter(default: Any, description: str, **bounds: Any) -> Any:
    """Declares a hyper-parameter in an algorithm's class :class:`Hyper`, as in
    ``mu: float = parameter(0.01, "pull (mu)", ge=0)``.

    Args:
        default: the value if the configuration does not set one. None, with a type such as ``int | None``, stands for a
            value that depends on the run (:meth:`Algorithm.resolved_defaults`).
        description: what the hyper-parameter is, with the paper's symbol; ``fedray algorithms`` prints it.
        **bounds: the allowed range, as ``ge``, ``gt``, ``le`` or ``lt``. Values outside are refused before the run
            starts.
    """
    return Field(default, description=description, **bounds)


Step = TypeVar("Step", bound=Callable[..., Any])


def in_place(step: Step) -> Step:
    """A decorator that makes an algorithm's method ``step`` faster: ``client.optimizer.descend`` may then overwrite the
    models that it gets (those in ``carry``), instead of allocating memory for new ones. Do not use it if ``step`` reads
    or keeps the old models after ``descend``.

    Example:
        @in_place
        def step(self, client, carry, batch): ...
    """
    step.in_place = True  # type: ignore[attr-defined]
    return step


class Algorithm:
    """The base class of a federated learning algorithm, which defines what clients and server compute in a round.

    Define :meth:`begin`, :meth:`step` and :meth:`end`, the parts of a client's local training, which :meth:`train`
    calls, and :meth:`server_update`. To change one rule of an existing algorithm, subclass it::

        class Half(FedAvg):
            def server_update(self, server, phase, sums, scalars):
                server["x"] = server["x"].lerp(sums["y"], 0.5)

    A round consists of one or more phases, whose names are in the attribute ``phases``. Most algorithms have only the
    phase ``train``. At the beginning of a phase, :meth:`broadcast` says what the server sends. Then the method with the
    phase's name, such as :meth:`train`, is called for each stack of clients (clients that are trained together), and
    returns what they send, as a :class:`Result`. At the end :meth:`server_update` changes the server's models.

    For a stack of C clients, models and vectors have C rows, and values with one number per client have the shape ``[C,
    1]``, so that formulas broadcast. Methods that get a :class:`ClientPhase` must be pure: what they return depends
    only on their arguments, because the work of a process that died is simply done again.
    """

    Hyper: ClassVar[type[Hyper]] = Hyper

    paper: ClassVar[str] = ""
    """The publication, which ``fedray algorithms`` prints."""
    phases: tuple[str, ...] = ("train",)
    """The names of the methods that clients run in a round, in this order."""
    client_state: tuple[str, ...] = ()
    """The names of the vectors ``[width]`` that a client keeps from one participation to the next."""
    client_models: tuple[str, ...] = ()
    """The names of the models that a client keeps from one participation to the next."""
    client_numbers: tuple[str, ...] = ()
    """The names of the single numbers, ``[C, 1]`` for C clients, that a client keeps from one participation to the
    next."""
    weighting: ClassVar[Literal["samples", "uniform"]] = "samples"
    """The aggregation weights in the paper, which ``train.weighting=auto`` selects: proportional to the clients'
    numbers of samples, or uniform."""
    traffic: Traffic = Traffic()
    """What a client receives and sends in a round."""
    work: Work = Work()
    """What a client computes in a round beyond FedAvg's passes."""
    traffic_in: ClassVar[Mapping[str, Traffic]] = {}
    """For an algorithm with several phases: what of ``traffic`` a client receives and sends in which phase. A phase
    that is missing costs clients nothing, because it stands for something that the server does with what it has. If
    none is named, everything belongs to the phase ``train``, or to the first one if there is no ``train``."""
    work_in: ClassVar[Mapping[str, Work]] = {}
    """What of ``work`` belongs to which phase, as ``traffic_in``. FedAvg's passes belong to ``train``."""
    private: tuple[str, ...] = ()
    """Layers of the model that stay at each client (:func:`fedray.core.private.private_names`): a client trains them
    and keeps them as a part of its state, and neither sends nor receives them. The models of a broadcast have the
    client's own layers in their place. At the server they keep their initial values, which a client has at its first
    participation. ``model.private`` sets them for algorithms that allow it."""
    private_from: int = 1
    """The round from which ``private`` layers are private. Before, they are shared as all others, and clients that take
    part begin with what this has left at the server."""
    allows_private: bool = False
    """Whether the rule is right if some layers are private (``model.private``): clients use no vectors of the server,
    in which these layers are missing. A subclass has to say it again. ``__init__`` may take it back for some
    hyper-parameters."""
    allows_aggregation: bool = False
    """Whether :meth:`server_update` is also right if something else takes the place of the means of uploads
    (``train.aggregation``), and uses nothing else of single clients, such as their sizes (``privacy``). A subclass has
    to say it again. ``__init__`` may take it back for some hyper-parameters."""
    asynchronous: ClassVar[bool] = False
    """Whether :meth:`server_update` is also right for uploads of clients that began with different models, of which it
    gets the mean as a difference from the server's model of now (``system.mode=buffered``). A subclass does not inherit
    it, because it may change the rule: it has to say so itself."""
    sends_numbers: ClassVar[bool] = False
    """Whether clients send numbers besides models and vectors, such as the lengths of these. ``train.upload`` is
    refused then, because its steps would not change the numbers."""
    sends_updates: bool = True
    """Whether all models that clients send are ones that they have trained from a model of the server, and all vectors
    are directions, of which none follows from another upload. Otherwise ``train.upload`` is refused: its steps would
    clip or compress what is no update, or change the same update in two ways."""
    own_weights: ClassVar[bool] = False
    """Whether the rule itself says how much each client counts. A line says that another ``train.weighting`` than the
    paper's changes nothing then."""
    only_weighting: ClassVar[bool] = False
    """Whether the paper's rule is right only with the paper's weights. A line says that another ``train.weighting``
    makes it another rule."""
    several_models: ClassVar[bool] = False
    """Whether the clients of a round begin with different models of the server, none of which has to be ``x``.
    ``train.upload`` and ``run.diagnostics`` are refused then, because they compare with ``x``."""
    needs_received: ClassVar[bool] = False
    """Whether clients need the model that they received at their last participation, as ``client.received``. The engine
    keeps one file for each round, not for each client."""
    needs_public: ClassVar[bool] = False
    """Whether the server trains on a public set."""
    needs_classes: ClassVar[bool] = False
    """Whether the rule needs the classes of samples, as pFedMo's, which compares class logits. Such an algorithm is
    refused for tasks without classes."""
    uses_server_lr: ClassVar[bool] = True
    """Whether the server's rule uses ``server.server_lr``. If not, ``train.server_lr`` is refused."""
    any_optimizer: bool = False
    """Whether ``train.optimizer`` may be something other than ``sgd``. It may if the local step only descends along a
    gradient. It may not if a rule relies on the step of SGD: divides by eta_l, adds to the step, or keeps its
    momentum."""
    assumes_plain_sgd: ClassVar[bool] = False
    """Whether the local rule is meant for clients without momentum, because momentum would accumulate its corrections.
    A run with ``train.momentum`` then gets a warning (:meth:`advice`)."""
    needs_head: ClassVar[Literal["nothing", "features", "projection", "prediction"]] = "nothing"
    """What the algorithm needs from the model's head (``model.head``): ``nothing``; ``features``, which are the
    inputs of the last layer; a ``projection``, whose output is the representation z; or a ``prediction``, which means a
    projection and a predictor that takes z."""
    server_training_before: ClassVar[str | None] = None
    """The phase that begins only after :meth:`server_training` has ended, or None if the server trains nothing."""

    def __init__(self, hyper: BaseModel | None = None) -> None:
        self.hyper: Any = hyper if hyper is not None else self.Hyper()

    def resolved_defaults(self, cohort: int, clients: int, steps: int | None) -> Mapping[str, Any]:
        """Returns values, by name, for the hyper-parameters whose default is None because the right value depends on
        the run. For example ``{"tau": round(clients / cohort)}``. Override it if the algorithm has such
        hyper-parameters.

        Args:
            cohort: the number of clients that take part in a round.
            clients: the number of clients that hold samples.
            steps: the number of local steps of each client, or None if clients train for whole epochs.
        """
        return {}

    def init_server(self, server: ServerState) -> None:
        """Adds the algorithm's models and vectors to ``server`` before round 1. The initial model is already there as
        ``server["x"]``. Override this method if the server keeps more than the model.

        For example ``server["m"] = server["x"].zeros()`` adds a vector ``[width]`` with a zero for each parameter of
        the model.
        """

    def broadcast(self, server: ServerState, phase: str) -> Broadcast:
        """Returns what the server sends to the cohort at the start of ``phase``, a part of a round. By default this is
        the model ``x``. Override this method to send more, as in
        ``Broadcast({"x": server["x"], "m": server["m"]})``."""
        return Broadcast({"x": server["x"]})

    @property
    def earlier_models(self) -> int:
        """The number of past rounds whose models x^s the server's rules may read with :attr:`ServerState.model_of`; 0
        by default. The engine keeps a file for each of these models."""
        return 0

    @property
    def momentum_window(self) -> int:
        """For algorithms such as GHBM, whose clients follow the mean of the server's updates in the last tau rounds:
        the number tau. It is 0 for all other algorithms. If it is not 0, runs with ``run.diagnostics=all_clients``
        record the column ``momentum_error``."""
        return 0

    @property
    def stateful(self) -> bool:
        """Whether the algorithm's clients keep vectors or models from one round in which they take part to the next."""
        return bool(self.client_state or self.client_models or self.client_numbers)

    def begin(self, client: ClientPhase) -> Carry:
        """Returns the models and vectors with which the local training of a stack of C clients begins, as a
        :class:`Carry`, which goes from one local step to the next.

        FedAvg returns ``Carry({"y": client.start("x")})``: C copies of the model that the server sent, ``[C, ...]``.
        """
        raise NotImplementedError

    def step(self, client: ClientPhase, carry: Carry, batch: Batch) -> Carry:
        """Makes one local step of each client of a stack of C clients that are computed together. Returns the carry
        (models and vectors by name) for the next step.

        The decorator :func:`in_place` makes a step faster where it may be used.

        Args:
            client: the stack's data, and what the server has sent. ``client.objective.gradient(y, batch)`` returns
                gradients ``[C, width]``, and ``client.optimizer.descend(carry, "y", gradient)`` returns the carry after
                a step of the model "y".
            carry: what :meth:`begin` or the previous step returned.
            batch: a mini-batch for each client; ``batch.step`` is the number j of the step, from 0.
        """
        raise NotImplementedError

    def end(self, client: ClientPhase, carry: Carry) -> Result:
        """Returns what a stack of C clients sends to the server after the last local step, and what the clients keep
        for later rounds. ``carry`` has the models after the last step. FedAvg returns
        ``Result({"y": Upload.weighted_mean(carry["y"])})``.
        """
        raise NotImplementedError

    def train(self, client: ClientPhase) -> Result:
        """Runs the phase ``train`` of a round for a stack of clients (clients that are trained together):
        :meth:`begin`, then :meth:`step` once for each of the J_i mini-batches, then :meth:`end`, whose result it
        returns."""
        return self.end(client, self.local_steps(client, self.begin(client)))

    def local_steps(self, client: ClientPhase, carry: Carry, step: Callable[..., Carry] | None = None) -> Carry:
        """Makes all local steps of a stack of clients that are computed together, and returns the carry (models and
        vectors by name) after the last step. ``carry`` is what :meth:`begin` returned, and ``step`` another method than
        :meth:`step`, for steps of another kind (:meth:`ClientPhase.further`).

        Clients may make different numbers of steps J_i: a client that has made all its steps keeps its model while
        other clients of the stack continue.
        """
        step = step or self.step
        client.optimizer.in_place = getattr(step, "in_place", False)
        try:
            carry = client.optimizer.resume(carry)
            for batch in client.data.batches():
                carry = client.at_epochs(carry, batch.step)
                carry = client.hold(step(client, carry, batch), carry, batch.step)
            client.finish(carry)
        finally:
            # in_place is only for this method, not for other steps that the algorithm makes later
            client.optimizer.in_place = False
        return carry

    def candidates(self, client: ClientPhase) -> Result:
        """Returns what clients that may be chosen for a round (``train.sampling``) send before it: the mean ``loss`` of
        the server's model over all their samples, ``[C, 1]``, and the root of the mean of their squares,
        ``root_mean_square``."""
        loss, root_mean_square = client.objective.full_losses(client.start("x"))
        return Result(scalars={"loss": loss, "root_mean_square": root_mean_square})

    def advice(self, momentum: float, cohort: int, clients: int, server_lr: float) -> Iterator[str]:
        """Yields warnings for the user, as lines of text, about settings that make the algorithm differ from the
        description in its paper.

        Args:
            momentum: the momentum of the clients' optimizer, ``train.momentum``.
            cohort: the number of clients that take part in a round.
            clients: the number of clients that hold samples.
            server_lr: the server learning rate, ``train.server_lr``.
        """
        if momentum and self.assumes_plain_sgd:
            yield (
                f"train.momentum={momentum}: the paper's clients have none beside the algorithm's rule, whose "
                f"corrections it accumulates up to {1 / (1 - momentum):.3g} times"
            )

    def server_training(self, server: ServerState) -> Mapping[str, Vector]:
        """Trains models at the server in addition to the clients' training; on Ray both happen at the same time. By
        default nothing is trained.

        Returns the trained models and vectors by name. The engine puts them into ``server``, in place of those of the
        same names, before one phase of the round begins: the one named by the attribute ``server_training_before``. The
        method itself must not change ``server``.
        """
        return {}

    def server_update(
        self, server: ServerState, phase: str, sums: Mapping[str, Any], scalars: Mapping[str, list[float]]
    ) -> None:
        """Applies the server's rule at the end of ``phase``, when the clients' uploads have been summed: it changes the
        models and vectors of ``server`` in place, and returns nothing.

        FedAvg's rule is ``server.move(sums["y"])``.

        Args:
            server: the server's models and vectors, and information about the round.
            phase: the name of the phase, one of ``phases``.
            sums: for each upload by name its weighted sum over the cohort, a model or a vector ``[width]``.
            scalars: for each name in ``Result.scalars`` the clients' numbers, in the order of ``server.cohort.ids``.
        """
        raise NotImplementedError

    def eval_model(self, server: ServerState) -> Model:
        """Returns the model that the algorithm would deploy: by default the server's model ``x``. This model is
        evaluated on the test set, saved at the end of the run, and hashed to compare runs."""
        x: Model = server["x"]
        return x

    def further_models(self, server: ServerState) -> Mapping[str, Model]:
        """Returns models that are evaluated in addition to :meth:`eval_model`, by name. By default there are none.

        Each is evaluated on the test set: the column ``<name>_accuracy`` of metrics.csv has its accuracy, if the task
        has one, and ``<name>_<metric>`` the task's main metric. The names must be the same in every round.
        """
        return {}

    def has_personal_model(self) -> bool:
        """Returns whether the algorithm gives each client a personal model for evaluation: it defines
        :meth:`personal_model`, or has private layers."""
        return type(self).personal_model is not Algorithm.personal_model or bool(self.private)

    def personal_broadcast(self, server: ServerState) -> Broadcast:
        """Returns what the clients need to make their personal models (:meth:`personal_model`): models, vectors and
        numbers, in the form in which the server would send them after a round. The default is the model ``x``."""
        return Broadcast({"x": server["x"]})

    def personal_model(self, client: ClientPhase) -> Model:
        """Returns the personal model of each client of a stack of C clients, ``[C, ...]``, which is scored on that
        client's share of the test set.

        ``client.shared`` and ``client.scalars`` have what :meth:`personal_broadcast` returned. The default, with
        private layers, is the model ``x`` with the client's own layers. An algorithm that does not define this method
        and has no private layers has no personal models.
        """
        model: Model = client.start("x")
        return model

    def server_flops(self, server: ServerState, forward: float) -> float:
        """Returns how many FLOPs an algorithm takes in a round for training and forward passes at the server, and for
        whatever else :class:`Work` does not count. They are part of the column ``flops`` of metrics.csv. The default
        is 0.

        Args:
            server: has the round's cohort, and the sizes of the public set and the test set. Its models and data must
                not be used, because ``fedray costs`` calls this method without them.
            forward: the FLOPs of the forward pass of one sample.
        """
        return 0.0

    def server_flops_beside(self, server: ServerState, forward: float) -> float:
        """Returns how many of :meth:`server_flops` belong to :meth:`server_training`, which the server computes while
        clients train. The virtual clock counts the others when the clients have answered. The default is 0."""
        return 0.0
