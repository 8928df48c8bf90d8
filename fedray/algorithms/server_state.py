"""What an algorithm's server rules can use: the server's models and vectors, numbers for each client, and the current
round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedray.client.phase import ClientPhase
from fedray.core.vectors import Model, Vector
from fedray.errors import near_miss


@dataclass(frozen=True)
class Cohort:
    """The clients that take part in a round. All lists have an entry for each client, in the same order.

    Args:
        ids: the clients' numbers, sorted.
        sizes: n_i, the clients' numbers of samples.
        weights: the aggregation weights p_i, which sum to 1.
        steps: J_i, the clients' numbers of local steps.
        gaps: the rounds since each client last took part, 0 if it never did.
    """

    ids: Sequence[int] = ()
    sizes: Sequence[int] = ()
    weights: Sequence[float] = ()
    steps: Sequence[int] = ()
    gaps: Sequence[int] = ()


@dataclass
class ServerState:
    """The models, vectors and tables that the server of a run keeps, and information about the current round r, for an
    algorithm's methods that run at the server, such as ``server_update``.

    ``server["m"]`` reads and ``server["m"] = ...`` writes a model or vector; ``server["x"]`` is the model x^r.
    Everything that a resumed run needs has to be in ``vectors`` or in a :meth:`column`, which checkpoints contain.

    Args:
        vectors: the server's models and vectors by name.
        N: the number of clients that hold samples.
        seed: ``run.seed``.
        server_lr: the server learning rate eta_g of this round.
        weighting: how clients are weighted: ``samples`` or ``uniform``.
        total_samples: the number of samples of all clients together.
        batch_size: B, or None if all samples of a client are one mini-batch.
        public_samples: the size of the public set, samples that no client has.
        test_samples: the size of the test set.
        table: the columns by name, each a dict from a client's number to a number that the server keeps for this client
            (:meth:`column`).
        round: r, from 1.
        lr: the client learning rate eta_l of this round.
        cohort: the clients that take part in this round.
    """

    vectors: dict[str, Vector]
    N: int
    seed: int
    server_lr: float
    as_client: Callable[[ServerState, int], ClientPhase]
    """``as_client(server, steps)`` returns a :class:`ClientPhase` with one client that makes ``steps`` local steps on
    the public set, for training at the server."""
    draw_inputs: Callable[[ServerState, int, str], Any]
    """``draw_inputs(server, size, source)`` returns inputs ``[size, ...]``, newly drawn in each round, from the set
    ``source``: ``public`` or ``test``."""
    model_of: Callable[[int], Model]
    """``model_of(s)`` returns the model x^s that the server had at the start of round s, which is the current round or
    one of the ``earlier_models`` rounds before it."""
    parameters_of: Callable[..., Tensor]
    """``parameters_of("head")`` returns a mask, bool ``[width]``, of the parameters that belong to layers of these
    names (:meth:`~fedray.client.phase.ClientPhase.parameters_of`)."""
    initial_model: Callable[[int], Model]
    """``initial_model(k)`` returns a model with other random initial weights for each number k from 1, which depend on
    ``run.seed`` and k. Raises :class:`UserError` if models do not begin with random weights."""
    weighting: str = "samples"
    total_samples: int = 0
    batch_size: int | None = None
    public_samples: int = 0
    test_samples: int = 0
    table: dict[str, dict[int, float]] = field(default_factory=dict)
    last_round: dict[int, int] = field(default_factory=dict)
    """The round in which each client last took part. Checkpoints contain it."""
    client_scalars: dict[str, Sequence[float]] = field(default_factory=dict)
    """Numbers that are written to ``clients.parquet``: lists by name, with one number for each client in the order of
    ``cohort.ids``. A rule may add lists."""
    round: int = 0
    lr: float = 0.0
    cohort: Cohort = Cohort()

    def __getitem__(self, name: str) -> Any:
        if name not in self.vectors:
            raise KeyError(f"the server has no {name!r}{near_miss(name, self.vectors)}")
        return self.vectors[name]

    def __setitem__(self, name: str, value: Vector) -> None:
        if isinstance(self.vectors.get(name), Model) and not isinstance(value, Model):
            raise TypeError(
                f"server[{name!r}] is a model, and can't become a {type(value).__name__}: "
                f"server[{name!r}].with_parameters(...) makes a model of parameters"
            )
        self.vectors[name] = value

    def column(self, name: str) -> dict[int, float]:
        """Returns a table column in which the server keeps a number for each client from round to round, as a dict from
        the client's number to this number. It is empty at first.

        The server's rules may change the dict, as in ``server.column("score")[client] = 0.3``. Checkpoints contain it.
        """
        return self.table.setdefault(name, {})

    def gap(self, client: int, number: int) -> int:
        """Returns how many rounds ago, counted from round ``number``, the client with the number ``client`` last took
        part, or 0 if it never did."""
        return number - self.last_round[client] if client in self.last_round else 0

    def shares(self) -> list[float]:
        """Returns the weight of each client of the cohort among all clients that hold samples, not only those of the
        cohort, in the order of ``cohort.ids``: n_i / n (its fraction of all samples) if ``weighting`` is ``samples``,
        and 1 / N if it is ``uniform``."""
        if self.weighting == "uniform":
            return [1 / self.N] * len(self.cohort.ids)
        return [size / self.total_samples for size in self.cohort.sizes]

    def move(self, average: Model) -> None:
        """Moves the server's model ``x`` towards the clients' ``average``, by the server learning rate eta_g: x <- x +
        eta_g (average - x)."""
        self["x"] = self["x"].lerp(average, self.server_lr)
