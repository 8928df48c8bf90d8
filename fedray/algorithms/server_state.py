"""What an algorithm's server rules see: the server's models and vectors, numbers for each client, and the round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedray.core.client import ClientPhase
from fedray.core.vectors import Model, Vector


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, sorted by id: samples n_i, weights p_i (sum 1), local steps J_i, rounds since the last
    participation (0: never)."""

    ids: Sequence[int] = ()
    sizes: Sequence[int] = ()
    weights: Sequence[float] = ()
    steps: Sequence[int] = ()
    gaps: Sequence[int] = ()


@dataclass
class ServerState:
    """The server's side of a run.

    ``vectors``: models and tensors by name, checkpointed, of which ``x`` is the model x^r. ``table``: per-client
    numbers by name and client, lazily filled and checkpointed. The rest describes the round r in progress: ``lr`` is
    eta_l of this round, ``server_lr`` eta_g, ``N`` the number of clients that hold samples, ``weighting`` samples or
    uniform, ``total_samples`` of all clients, ``batch_size`` B (None: full batch), ``public_samples`` and
    ``test_samples`` the sizes of those sets.
    """

    vectors: dict[str, Vector]
    N: int
    seed: int
    server_lr: float
    as_client: Callable[[ServerState, int], ClientPhase]
    """``as_client(server, steps)``: the server itself as a client whose data is the public set, of which it takes
    ``steps`` batches."""
    draw_inputs: Callable[[ServerState, int, str], Tensor]
    """``draw_inputs(server, size, source)``: a batch of inputs ``[size, ...]`` of the public or the test set, drawn
    anew each round."""
    model_of: Callable[[int], Model]
    """``model_of(s)``: the model x^s as it was at the start of round s, which is this one or one of the algorithm's
    ``earlier_models`` before it."""
    weighting: str = "samples"
    total_samples: int = 0
    batch_size: int | None = None
    public_samples: int = 0
    test_samples: int = 0
    table: dict[str, dict[int, float]] = field(default_factory=dict)
    last_round: dict[int, int] = field(default_factory=dict)
    """The round in which each client took part last, checkpointed."""
    client_scalars: dict[str, Sequence[float]] = field(default_factory=dict)
    """Numbers of the cohort's clients that a rule wants logged for this round, in id order."""
    round: int = 0
    lr: float = 0.0
    cohort: Cohort = Cohort()

    def __getitem__(self, name: str) -> Any:
        return self.vectors[name]

    def __setitem__(self, name: str, value: Vector) -> None:
        self.vectors[name] = value

    def column(self, name: str) -> dict[int, float]:
        """The table's column ``name``: client -> number."""
        return self.table.setdefault(name, {})

    def gap(self, client: int, number: int) -> int:
        """The rounds from the last participation of ``client`` to round ``number``; 0 if it never took part."""
        return number - self.last_round[client] if client in self.last_round else 0

    def shares(self) -> list[float]:
        """The weights of the cohort's clients among all clients: n_i / n, or 1 / N."""
        if self.weighting == "uniform":
            return [1 / self.N] * len(self.cohort.ids)
        return [size / self.total_samples for size in self.cohort.sizes]

    def move(self, average: Model) -> None:
        """x <- x + eta_g (average - x): the plain server step towards the clients' ``average``."""
        self["x"] = self["x"].lerp(average, self.server_lr)
