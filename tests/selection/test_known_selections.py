"""The selections that come with fedray: each draw against its definition, what equals what, and the contracts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedray.config import load
from fedray.core.seeds import Purpose, stream
from fedray.experiment.custom import CustomObjects
from fedray.experiment.named import named_selection
from fedray.experiment.resolve import resolve
from fedray.selection import LOSS, ROOT_MEAN_SQUARE, SECONDS, Known, Losses, Selection
from fedray.selection.oort import Oort
from fedray.selection.selection import chosen_by
from fedray.selection.uniform import Uniform
from fedray.selection.weighted import Weighted
from fedray.testing import SelectionContract
from fedray.testing.contracts import SETTINGS, small_source

SEEDS = st.integers(0, 2**32)
PRESENT = np.array([0, 2, 3, 5, 8, 9, 11])
"""Clients 1, 4, 6, ... have no samples."""

SLOW = {"system.flops_per_second": {"lognormal": [1e6, 1.5]}}
CHOICE = {"kind": "power_of_choice", "candidates": 5}
CONTRACTS = {
    "uniform": ("uniform", {}), "cyclic": ("cyclic", {}), "weighted": ("weighted", {}), "fresh": (CHOICE, {}),
    "cached": (CHOICE | {"cached": True}, SLOW), "oort": ("oort", {}),
    "slow": ({"kind": "oort", "seconds": 0.01, "alpha": 1.5}, SLOW),
}  # fmt: skip
for name, (entry, keys) in CONTRACTS.items():
    of_contract = {"selection": entry, "settings": keys}
    globals()[f"Test{name}"] = type(f"Test{name}", (SelectionContract,), of_contract)


def known(count, round=1, ids=PRESENT, sizes=None, seed=0, data_seed=0, **others):
    sizes = np.ones(len(ids), np.int64) if sizes is None else np.array(sizes)
    return Known(round=round, count=count, ids=ids.copy(), sizes=sizes, seed=seed, data_seed=data_seed, **others)


def chosen(selection, *arguments, **keys):
    made = selection if isinstance(selection, Selection) else named_selection(selection)
    return chosen_by(made, known(*arguments, **keys)).ids


@given(SEEDS, st.integers(1, 10**6), st.integers(1, 7), st.sampled_from(["uniform", "cyclic", "weighted"]))
def test_a_cohort_is_sorted_and_without_repetition(seed, round, size, selection):
    cohort = chosen(selection, size, round, seed=seed, data_seed=seed + 1)
    assert len(cohort) == size
    assert (np.diff(cohort) > 0).all()
    assert set(cohort) <= set(PRESENT)
    assert (cohort == chosen(selection, size, round, seed=seed, data_seed=seed + 1)).all()


def test_a_uniform_cohort_depends_on_seed_and_round_alone():
    many = np.arange(1000)
    first = chosen("uniform", 10, 7, many, seed=1, data_seed=5)
    assert (first == chosen("uniform", 10, 7, many, seed=1, data_seed=6)).all()
    assert (first != chosen("uniform", 10, 7, many, seed=2, data_seed=5)).any()
    assert (first != chosen("uniform", 10, 8, many, seed=1, data_seed=5)).any()


def test_uniform_cohorts_are_uniform():
    """Each pair of clients should be drawn together equally often: chi-squared over the 21 pairs of 7, 4,000 rounds."""
    pairs: dict[tuple[int, ...], int] = {}
    rounds = 4000
    for round in range(1, rounds + 1):
        cohort = tuple(chosen(Uniform(), 2, round).tolist())
        pairs[cohort] = pairs.get(cohort, 0) + 1
    assert len(pairs) == 21
    expected = rounds / 21
    # 20 degrees of freedom: a value above 45 comes once in a thousand seeds, and the seed is fixed
    assert sum((count - expected) ** 2 / expected for count in pairs.values()) < 45


@given(SEEDS, st.integers(1, 7))
def test_cyclic_cohorts_walk_through_one_permutation(seed, size):
    """Round r takes positions (r-1)m .. rm-1, modulo N, of the permutation that the data seed gives."""
    order = stream(seed, Purpose.COHORT).permutation(PRESENT)
    walk = np.tile(order, 40)
    for round in (1, 2, 3, 8, 15):
        expected = np.sort(walk[(round - 1) * size : round * size])
        assert (chosen("cyclic", size, round, seed=99, data_seed=seed) == expected).all()


def test_weighted_cohorts_have_the_shares_of_samples():
    present, sizes = np.arange(4) * 3, np.array([10, 20, 30, 40])
    first = [chosen(Weighted(), 1, r, present, sizes)[0] for r in range(1, 4001)]
    counts = [first.count(client) for client in present]
    assert chisquare(counts, sizes / 100 * 4000).pvalue > 0.001
    pairs = [tuple(chosen(Weighted(), 2, r, present, sizes)) for r in range(1, 4001)]
    assert all(one < other for one, other in pairs)
    p = sizes / 100
    expected = {
        (present[i], present[j]): 4000 * p[i] * p[j] * (1 / (1 - p[i]) + 1 / (1 - p[j]))
        for i in range(4) for j in range(i + 1, 4)
    }  # fmt: skip
    assert chisquare([pairs.count(pair) for pair in expected], [*expected.values()]).pvalue > 0.001


def loss_of(client):
    """The loss of a client, of which some have none, and some the same as others."""
    return math.nan if client == 5 else float(client % 4)


def ask(clients):
    losses = np.array([loss_of(client) for client in clients.tolist()])
    return Losses(losses, losses)


SIZES = np.array([10, 20, 30, 40, 50, 60, 70])


@given(SEEDS, st.integers(1, 50), st.integers(1, 5))
def test_power_of_choice_takes_the_largest_losses_of_its_candidates(seed, round, count):
    candidates = chosen("weighted", 5, round, sizes=SIZES, seed=seed).tolist()
    for cached in (False, True):
        entry = CHOICE | {"cached": cached}
        # client 9 never took part, and whoever never took part comes first
        noted = {client: loss_of(client) for client in PRESENT.tolist() if client not in (5, 9)}
        facts = {"columns": {LOSS: noted}} if cached else {"ask": ask, "asks": 5}
        made = chosen_by(named_selection(entry), known(count, round, sizes=SIZES, seed=seed, **facts))
        losses = {client: noted.get(client, math.inf) if cached else loss_of(client) for client in candidates}
        least = {client: -math.inf if math.isnan(loss) else loss for client, loss in losses.items()}
        best = sorted(candidates, key=lambda client: (-least[client], client))[:count]
        assert made.ids.tolist() == sorted(best)
        np.testing.assert_array_equal(made.why, [losses[client] for client in sorted(best)])


@given(SEEDS, st.integers(1, 50), st.integers(1, 7))
def test_what_equals_what(seed, round, count):
    """Weighted draws of all clients are all of them, and power-of-choice among as many candidates as are wanted has
    nothing to choose."""
    keys = {"sizes": SIZES, "seed": seed, "data_seed": seed}
    for entry in ("uniform", "cyclic", "weighted"):
        assert (chosen(entry, 7, round, **keys) == PRESENT).all()
    among = {"kind": "power_of_choice", "candidates": count}
    weighted = chosen("weighted", count, round, **keys)
    assert (chosen(among, count, round, **keys, ask=ask, asks=count) == weighted).all()
    assert (chosen(among | {"cached": True}, count, round, **keys, columns={LOSS: {}}) == weighted).all()


@pytest.mark.parametrize(
    ("entry", "weighting"),
    [("uniform", "samples"), ("cyclic", "samples"), ("weighted", "uniform"), (CHOICE, "uniform"), ("oort", "samples")],
)
def test_who_is_drawn_by_samples_counts_once(entry, weighting):
    keys = {**SETTINGS, "algorithm.name": "fedavg", "train.cohort_size": 3, "train.sampling": entry}
    experiment, _ = resolve(load(keys), CustomObjects(small_source()))
    assert (experiment.weighting, experiment.config.train.weighting) == (weighting, weighting)


def oort_of(useful, number, clients=1000, count=50, took=None, **options):
    """The choice of Oort among clients of one sample each, of which those of ``useful`` have taken part in round 1 with
    the utilities that it tells."""
    columns = {ROOT_MEAN_SQUARE: useful} if took is None else {ROOT_MEAN_SQUARE: useful, SECONDS: took}
    told = known(count, number, np.arange(clients), seed=3, latest=dict.fromkeys(range(clients), 1), columns=columns)
    return Oort(**options), told


@pytest.mark.parametrize(
    ("number", "seen", "new"),
    [(1, 500, 45), (2, 500, 44), (11, 500, 37), (100, 500, 10), (2, 3, 47), (2, 995, 5), (1, 0, 50)],
)
def test_how_many_of_oorts_clients_are_new(number, seen, new):
    made = chosen_by(*oort_of(dict.fromkeys(range(seen), 1.0), number))
    assert (made.ids >= seen).sum() == new == np.isnan(made.why).sum()


def test_oort_cuts_what_is_far_more_useful():
    useful = dict.fromkeys(range(100), 1.0) | {0: 1e6}
    seen = [chosen_by(*oort_of(useful, number, 100, 1)).ids.item() for number in range(1, 401)]
    assert seen.count(0) < 20


@pytest.mark.parametrize(("alpha", "expected"), [(None, 0.25), (1.5, 0.5**1.5)])
def test_oorts_slow_clients_count_less(alpha, expected):
    oort, told = oort_of({1: 8.0, 2: 8.0, 3: 8.0}, 1, 5, took={1: 1.0, 2: 0.5}, seconds=0.5, alpha=alpha)
    nan = math.nan
    assert oort.utilities(told).tolist() == pytest.approx([nan, 8 * expected, 8, 8, nan], nan_ok=True)


def test_oort_counts_a_clients_loss_as_often_as_it_has_samples():
    sizes, losses = (
        [3, 1, 4, 1, 5, 9, 2],
        dict(zip(PRESENT.tolist(), (0.5, 2.0, 0.25, 1.0, 0.0, 3.0, 1.5), strict=True)),
    )
    told = known(1, 1, sizes=sizes, columns={ROOT_MEAN_SQUARE: losses}, latest=dict.fromkeys(PRESENT.tolist(), 1))
    assert Oort().utilities(told).tolist() == [1.5, 2.0, 1.0, 1.0, 0.0, 27.0, 3.0]


def test_who_has_computed_losses_but_never_took_part_is_new_to_oort():
    told = known(1, 5, columns={ROOT_MEAN_SQUARE: {2: 3.0, 3: 3.0}}, latest={3: 5})
    assert np.isnan(Oort().utilities(told)).tolist() == [client != 3 for client in PRESENT.tolist()]
