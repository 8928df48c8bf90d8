"""What an algorithm's server rules see: the server's vectors, the per-client table, and the round's cohort."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fedray.core.context import Context
from fedray.core.model import FlatModel


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
class Server:
    """The server's side of a run.

    ``vectors``: named tensors, checkpointed, of which ``x`` is the model x^r ``[width]`` (and ``buffers`` its buffers
    if it has any). ``table``: per-client numbers by name and client, lazily filled and checkpointed. The rest describes
    the round r in progress: ``lr`` is eta_l of this round, ``server_lr`` eta_g, ``N`` the number of clients that hold
    samples, ``weighting`` samples or uniform, ``total_samples`` of all clients, ``batch_size`` B (None: full batch),
    ``public_samples`` and ``test_samples`` the sizes of those sets.
    """

    vectors: dict[str, Tensor]
    model: FlatModel
    N: int
    seed: int
    server_lr: float
    public_context: Callable[[Server, int], Context]
    """``public_context(server, steps)``: the server itself as a client whose data is the public set."""
    probe: Callable[[Server, int, str], Tensor]
    """``probe(server, size, source)``: a batch of inputs ``[size, ...]`` of the public or the test set, drawn anew
    each round."""
    past: Callable[[int], Tensor]
    """``past(s)``: the model x^s ``[width]`` as it was at the start of round s, which is this one or one of the
    algorithm's ``past_rounds`` before it."""
    weighting: str = "samples"
    total_samples: int = 0
    batch_size: int | None = None
    public_samples: int = 0
    test_samples: int = 0
    table: dict[str, dict[int, float]] = field(default_factory=dict)
    client_scalars: dict[str, Sequence[float]] = field(default_factory=dict)
    """Numbers of the cohort's clients that a rule wants logged for this round, in id order."""
    round: int = 0
    lr: float = 0.0
    cohort: Cohort = Cohort()

    def __getitem__(self, name: str) -> Tensor:
        return self.vectors[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.vectors[name] = value

    def column(self, name: str) -> dict[int, float]:
        """The table's column ``name``: client -> number."""
        return self.table.setdefault(name, {})

    def shares(self) -> list[float]:
        """The weights of the cohort's clients among all clients: n_i / n, or 1 / N."""
        if self.weighting == "uniform":
            return [1 / self.N] * len(self.cohort.ids)
        return [size / self.total_samples for size in self.cohort.sizes]

    def move(self, target: Tensor) -> None:
        """x <- x + eta_g (target - x): the plain server step towards the average ``target``.

        Where ``target`` is a whole model, its averaged buffers become the server's.
        """
        target, buffers = self.model.layout.split(target)
        self["x"] = self["x"].lerp(target, self.server_lr)
        if buffers is not None:
            self["buffers"] = self.model.layout.averaged(buffers, self["buffers"])
