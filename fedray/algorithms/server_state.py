"""What an algorithm's server rules see: the server's models and vectors, numbers for each client, and the round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedray.client.phase import ClientPhase
from fedray.core.vectors import Model, Vector


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, sorted by id, with an entry for each in every list: ``sizes`` n_i in samples, ``weights``
    p_i, which sum to 1, local ``steps`` J_i, and ``gaps``, the rounds since a client last took part (0 if it never
    did)."""

    ids: Sequence[int] = ()
    sizes: Sequence[int] = ()
    weights: Sequence[float] = ()
    steps: Sequence[int] = ()
    gaps: Sequence[int] = ()


@dataclass
class ServerState:
    """The server's side of a run.

    ``vectors`` are the server's models and tensors by name, of which ``x`` is the model x^r. ``table`` holds numbers
    for each client, by name. Both are in checkpoints.

    The rest describes the round r in progress. ``lr`` is the client learning rate eta_l of this round, and
    ``server_lr`` is its eta_g. ``N`` clients hold samples, ``total_samples`` in all. ``weighting`` is samples or
    uniform. ``batch_size`` is B, None for full batches. ``public_samples`` and ``test_samples`` are the sizes of these
    sets.
    """

    vectors: dict[str, Vector]
    N: int
    seed: int
    server_lr: float
    as_client: Callable[[ServerState, int], ClientPhase]
    """``as_client(server, steps)`` returns the server as a client that trains on the public set and makes ``steps``
    local steps."""
    draw_inputs: Callable[[ServerState, int, str], Any]
    """``draw_inputs(server, size, source)`` returns a batch of inputs ``[size, ...]`` of the public or the test set,
    which is drawn anew each round."""
    model_of: Callable[[int], Model]
    """``model_of(s)`` returns the model x^s as it was at the start of round s. s must be this round, or one of the
    algorithm's ``earlier_models`` before it."""
    weighting: str = "samples"
    total_samples: int = 0
    batch_size: int | None = None
    public_samples: int = 0
    test_samples: int = 0
    table: dict[str, dict[int, float]] = field(default_factory=dict)
    last_round: dict[int, int] = field(default_factory=dict)
    """The round in which each client took part last. It is in checkpoints."""
    client_scalars: dict[str, Sequence[float]] = field(default_factory=dict)
    """Numbers of the cohort's clients, in the order of ids, that a rule wants logged for this round."""
    round: int = 0
    lr: float = 0.0
    cohort: Cohort = Cohort()

    def __getitem__(self, name: str) -> Any:
        return self.vectors[name]

    def __setitem__(self, name: str, value: Vector) -> None:
        self.vectors[name] = value

    def column(self, name: str) -> dict[int, float]:
        """Returns the column ``name`` of the table, which maps clients to numbers."""
        return self.table.setdefault(name, {})

    def gap(self, client: int, number: int) -> int:
        """Returns how many rounds before round ``number`` the client took part last, or 0 if it never did."""
        return number - self.last_round[client] if client in self.last_round else 0

    def shares(self) -> list[float]:
        """Returns the weights of the cohort's clients among all clients: n_i / n, or 1 / N."""
        if self.weighting == "uniform":
            return [1 / self.N] * len(self.cohort.ids)
        return [size / self.total_samples for size in self.cohort.sizes]

    def move(self, average: Model) -> None:
        """Makes the plain server step towards the clients' ``average``: x <- x + eta_g (average - x)."""
        self["x"] = self["x"].lerp(average, self.server_lr)
