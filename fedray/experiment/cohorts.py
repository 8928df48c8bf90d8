"""Lets the selection of an experiment choose the clients of a round, and computes their aggregation weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedray.core.seeds import Purpose, stream
from fedray.errors import UserError, near_miss
from fedray.experiment.experiment import Experiment
from fedray.selection import Known, Losses, Selection
from fedray.selection.known import NOTED
from fedray.selection.selection import Chosen, chosen_by
from fedray.selection.uniform import Uniform
from fedray.selection.weighted import Weighted

NOTHING: Mapping[Any, Any] = MappingProxyType({})


def draw_independently(present: NDArray[np.int64], rate: float, seed: int, round: int) -> NDArray[np.int64]:
    """Draws each of the clients ``present``, sorted ids, for round ``round`` (from 1) with the probability ``rate``,
    independently of the others, by ``seed``. Returns their ids, of which there may be none."""
    return present[stream(seed, Purpose.COHORT, round).random(len(present)) < rate]


def weights_of(sizes: NDArray[np.int64], weighting: str) -> list[float]:
    """Returns the aggregation weights p_i of a cohort's m clients, whose sum is 1. ``sizes`` has the clients' numbers
    of samples n_i. With ``weighting`` "uniform" each client has the weight ``1 / m``. With "samples" the weight is
    ``n_i / n_S``, where n_S is the number of samples of the whole cohort."""
    if weighting == "uniform":
        return [1 / len(sizes)] * len(sizes)
    total = int(sizes.sum())
    return [int(size) / total for size in sizes]


def known_of(
    number: int,
    sizes: NDArray[np.int64],
    experiment: Experiment,
    latest: Mapping[int, int],
    table: Mapping[str, Mapping[int, float]] = NOTHING,
    ask: Callable[[NDArray[np.int64]], Losses] | None = None,
) -> Known:
    """Returns what the selection of ``experiment`` knows when it chooses the clients of round ``number`` (from 1).

    Args:
        number: The number of the round.
        sizes: ``[clients]``, how many samples each client holds. Those without any never take part.
        experiment: It has the settings. With ``system.over_select`` more clients than a cohort are chosen, and those
            that answer first become it.
        latest: The round in which each client last took part, by its number.
        table: The server's columns by name, each with a number for each client.
        ask: Lets clients compute losses of the server's model.

    Raises:
        UserError: The selection uses a column that neither fedray nor the algorithm fills.
    """
    selection, present = experiment.selection, np.flatnonzero(sizes)
    for name in selection.columns:
        # what an algorithm's columns are is only known once clients have taken part
        if latest and name not in {*NOTED, *table}:
            raise UserError(
                f"train.sampling: {type(selection).__name__} uses the column {name!r}, and "
                f"{experiment.config.algorithm.name} does not fill it{near_miss(name, {*NOTED, *table})}"
            )
    return Known(
        round=number,
        count=experiment.clients_drawn,
        ids=present,
        sizes=sizes[present],
        seed=experiment.config.run.seed,
        data_seed=experiment.config.data.seed or 0,
        latest=MappingProxyType(latest),
        columns={name: MappingProxyType(table.get(name, NOTHING)) for name in selection.columns},
        ask=ask,
        asks=selection.asks,
    )


def chosen_of(known: Known, experiment: Experiment) -> Chosen:
    """Returns the clients that take part in a round, or may: those that the selection of ``experiment`` chooses, or
    with ``privacy.participation=poisson`` those that are drawn independently of each other."""
    if experiment.privacy is not None and experiment.privacy.participation is not None:
        return Chosen(draw_independently(known.ids, experiment.privacy.participation, known.seed, known.round))
    return chosen_by(experiment.selection, known)


def rehearsed(
    number: int, sizes: NDArray[np.int64], experiment: Experiment, latest: Mapping[int, int] = NOTHING
) -> NDArray[np.int64]:
    """Returns clients that may take part in round ``number`` (from 1), sorted ids, for a forecast: no client has
    computed anything. The arguments are those of :func:`known_of`. In place of a selection that goes by what clients
    have computed, they are drawn by their samples or uniformly."""
    selection = experiment.selection
    if selection.columns or selection.asks:
        usual: Selection = Weighted() if selection.by_samples else Uniform()
        experiment = replace(experiment, selection=usual)
    return chosen_of(known_of(number, sizes, experiment, latest), experiment).ids
