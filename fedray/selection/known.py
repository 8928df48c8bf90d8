"""What a selection knows when it chooses the clients of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedray.core.seeds import Purpose, stream
from fedray.errors import near_miss

LOSS = "loss when it last took part"
"""The server's column with the mean of each client's training losses, a float."""

ROOT_MEAN_SQUARE = "root mean square of the losses when it last took part"
"""The server's column with sqrt(mean loss^2) of each client, a float: by the losses, on all its samples, of the model
that it received."""

SECONDS = "seconds when it last took part"
"""The server's column with the virtual seconds that each client took, a float."""

NOTED = (LOSS, ROOT_MEAN_SQUARE, SECONDS)
"""The columns that fedray fills for a selection that names them (:attr:`fedray.selection.Selection.columns`)."""


class Losses(NamedTuple):
    """The losses of the server's model over all samples of each of some clients.

    Attributes:
        mean: their mean, float64 ``[clients]``.
        root_mean_square: the root of the mean of their squares, float64 ``[clients]``.
    """

    mean: NDArray[np.float64]
    root_mean_square: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """What a selection knows when it chooses the clients of a round. It can't be changed.

    Attributes:
        round: the number of the round, from 1.
        count: how many clients are wanted: a cohort, or more with ``system.over_select``.
        ids: int64 ``[N]``, the numbers of the N clients that hold samples, sorted.
        sizes: int64 ``[N]``, how many samples each of them holds.
        seed: ``run.seed``; use :attr:`rng`.
        data_seed: ``data.seed``; use :attr:`order`.
        latest: the round in which each client last took part, by its number; use :attr:`last_round`.
        columns: the server's columns that the selection has named, each with a float by client; use :meth:`column`.
        ask: lets some clients compute losses; use :meth:`losses`.
        asks: how many clients may be asked for their losses.
        asked: the clients that have been asked so far.
    """

    round: int
    count: int
    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    seed: int
    data_seed: int
    latest: Mapping[int, int] = field(default_factory=dict)
    columns: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    ask: Callable[[NDArray[np.int64]], Losses] | None = None
    asks: int = 0
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for array in (self.ids, self.sizes):
            array.flags.writeable = False

    @cached_property
    def rng(self) -> np.random.Generator:
        """A generator of random numbers, which follow from ``run.seed`` and the round."""
        return stream(self.seed, Purpose.COHORT, self.round)

    @property
    def order(self) -> NDArray[np.int64]:
        """The clients in an order that is drawn once, by ``data.seed``: int64 ``[N]``, the same in each round."""
        return stream(self.data_seed, Purpose.COHORT).permutation(self.ids)

    @property
    def last_round(self) -> NDArray[np.int64]:
        """The rounds in which the clients last took part: int64 ``[N]``, 0 for one that never did."""
        return np.array([self.latest.get(client, 0) for client in self.ids.tolist()], np.int64)

    def column(
        self, name: str, clients: NDArray[np.int64] | None = None, missing: float = math.nan
    ) -> NDArray[np.float64]:
        """Returns a column of the server: a float64 for each of ``clients``.

        Args:
            name: one of the names in the attribute ``columns`` of the selection.
            clients: the numbers of some clients, int64; None stands for :attr:`ids`.
            missing: what stands for a client that has no number yet.

        Raises:
            ValueError: The selection does not name this column.
        """
        if name not in self.columns:
            raise ValueError(f"the selection's `columns` do not name {name!r}{near_miss(name, self.columns)}")
        values = self.columns[name]
        ids = self.ids if clients is None else clients
        return np.array([values.get(client, missing) for client in ids.tolist()], np.float64)

    def draw(self, count: int, weights: NDArray[Any] | None = None) -> NDArray[np.int64]:
        """Draws clients without replacement, by :attr:`rng`, and returns their numbers: int64 ``[count]``, sorted.

        Args:
            count: how many, at most N.
            weights: ``[N]``, above 0. The clients are drawn one after another, in proportion to their weights; without
                any, all are equally likely.
        """
        if count == len(self.ids):
            return self.ids
        p = None if weights is None else weights / weights.sum()
        return np.sort(self.rng.choice(self.ids, count, replace=False, p=p))

    def losses(self, clients: NDArray[np.int64]) -> Losses:
        """Lets each of ``clients`` receive the server's model and compute its losses over all samples that it holds.
        What that takes is counted in ``bytes_down``, ``bytes_up`` and ``flops``.

        Args:
            clients: the numbers of clients that hold samples: whole numbers, sorted, each once.

        Returns:
            The clients' losses, in the order of ``clients``.

        Raises:
            ValueError: ``clients`` are anything else, or more than the selection's ``asks``.
        """
        ids = checked_ids(clients, self.ids)
        self.asked.extend(ids.tolist())
        if self.ask is None or len(self.asked) > self.asks:
            raise ValueError(f"known.losses asks {len(self.asked)} clients, and the selection's `asks` is {self.asks}")
        return self.ask(ids)


def checked_ids(found: Any, holders: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns ``found`` as an array of clients' numbers, int64. Raises :class:`ValueError` unless they are whole
    numbers, sorted, each once, of clients in ``holders``, which are those that hold samples, sorted."""
    ids = np.asarray(found)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        form = f"{list(ids.shape)} {ids.dtype}" if isinstance(found, np.ndarray) else repr(found)[:60]
        raise ValueError(f"clients must be a row of whole numbers, their ids, not {form}")
    ids = ids.astype(np.int64)
    if (ids[1:] <= ids[:-1]).any():
        ordered = np.sort(ids)
        if len(twice := ordered[1:][np.diff(ordered) == 0]):
            raise ValueError(f"client {twice[0]} is there twice")
        raise ValueError("clients must be sorted by their ids")
    if len(strangers := ids[np.append(holders, -1)[np.searchsorted(holders, ids)] != ids]):
        raise ValueError(f"there is no client {strangers[0]} that holds samples")
    return ids
