"""Draws the clients that take part in a round, and their aggregation weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedray.core.seeds import Purpose, stream
from fedray.experiment.experiment import Experiment


def draw_cohort(
    present: NDArray[np.int64],
    size: int,
    sampling: str,
    seed: int,
    data_seed: int,
    round: int,
    sizes: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Draws the clients that take part in round ``round`` (from 1), and returns their ids, sorted. They depend on
    nothing but the arguments, so that a round can be repeated.

    ``present`` are the ids of the N clients that have samples. With ``sampling`` "uniform", ``size`` of them are drawn
    without replacement, by ``seed``. With "cyclic", the N ids are permuted once, by ``data_seed``, and round r takes
    the positions (r-1)m .. rm-1 modulo N of the permutation, where m is ``size``. With "weighted" they are drawn one
    after another, in proportion to the clients' numbers of samples, which are ``sizes [N]``.
    """
    if sampling == "cyclic":
        order = stream(data_seed, Purpose.COHORT).permutation(present)
        chosen = order[np.arange((round - 1) * size, round * size) % len(order)]
    elif size == len(present):
        chosen = present
    elif sampling == "weighted":
        assert sizes is not None
        chosen = stream(seed, Purpose.COHORT, round).choice(present, size, replace=False, p=sizes / sizes.sum())
    else:
        chosen = stream(seed, Purpose.COHORT, round).choice(present, size, replace=False)
    return np.sort(chosen)


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


def draw_of(sizes: NDArray[np.int64], experiment: Experiment, number: int, choice: bool = False) -> NDArray[np.int64]:
    """Draws the clients for round ``number`` (from 1), and returns their ids, sorted. ``sizes [N]`` are the clients'
    numbers of samples, of which those without any never take part, and ``experiment`` has the settings. With
    ``system.over_select`` they are more than a cohort, and those that answer first become it. With ``choice`` they are
    the candidates, if clients are chosen among some."""
    config, sampling, present = experiment.config, experiment.sampling, np.flatnonzero(sizes)
    count = experiment.clients_drawn
    if choice and sampling.candidates is not None:
        count = sampling.candidates
    if experiment.privacy is not None and experiment.privacy.participation is not None:
        return draw_independently(present, experiment.privacy.participation, config.run.seed, number)
    kind = "weighted" if sampling.kind == "power_of_choice" else sampling.kind
    return draw_cohort(present, count, kind, config.run.seed, config.data.seed or 0, number, sizes[present])
