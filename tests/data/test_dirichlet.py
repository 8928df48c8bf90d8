"""Dirichlet partitions have the sizes and the class proportions that their alpha, prior and options stand for."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from partition_checks import alphas, balanced, check_split, clients, histogram, labellings, quick, rng, seeds

from fedray.data.partitions import dirichlet as dirichlet_module
from fedray.data.partitions.dirichlet import dirichlet, dirichlet_fixed
from fedray.errors import UserError


@quick
@given(labellings, clients, seeds, alphas, st.booleans())
def test_dirichlet_uses_everything(labels, n, seed, alpha, capped):
    classes = int(labels.max()) + 1
    split = dirichlet(labels, n, rng(seed), classes=classes, alpha=alpha, capped=capped, min_samples=0)
    check_split(split, n, len(labels))
    assert sum(map(len, split)) == len(labels)


@quick
@given(labellings, clients, seeds, alphas)
def test_rebalanced_dirichlet_gives_equal_sizes(labels, n, seed, alpha):
    split = dirichlet(labels, n, rng(seed), classes=int(labels.max()) + 1, alpha=alpha, rebalanced=True)
    check_split(split, n, len(labels))
    assert {len(indices) for indices in split} == {len(labels) // n}


@quick
@given(labellings, clients, seeds, alphas, st.booleans())
def test_dirichlet_fixed_gives_equal_sizes(labels, n, seed, alpha, overlap):
    classes = int(labels.max()) + 1
    samples = len(labels) // n if not overlap else len(labels) // 3
    given_size = samples if overlap else None
    split = dirichlet_fixed(
        labels, n, rng(seed), classes=classes, alpha=alpha, samples_per_client=given_size, overlap=overlap
    )
    check_split(split, n, len(labels), disjoint=not overlap)
    assert {len(indices) for indices in split} == {samples}


def test_clients_with_the_same_shares_draw_the_same_samples():
    """And others those that come first for both: each class in one order, as in a sequential weighted draw."""
    labels = balanced()
    split = dirichlet_fixed(
        labels, 6, rng(), classes=10, alpha=1e6, samples_per_client=500, overlap=True, same_draw=True
    )
    shared = set.intersection(*map(set, split))
    assert len(shared) > 490
    skewed = dirichlet_fixed(
        labels, 6, rng(), classes=10, alpha=0.5, samples_per_client=500, overlap=True, same_draw=True
    )
    for one, other in itertools.combinations(skewed, 2):
        for label in range(10):
            of_one, of_other = ({j for j in each if labels[j] == label} for each in (one, other))
            assert of_one <= of_other or of_other <= of_one


def test_the_same_draw_has_the_shares_of_a_draw_of_its_own():
    labels = balanced()
    options = {"classes": 10, "alpha": 0.5, "samples_per_client": 300, "overlap": True}
    own, same = (
        histogram(labels, dirichlet_fixed(labels, 5, rng(3), **options, same_draw=same), 10) for same in (False, True)
    )
    assert abs(own - same).max() < 4 * np.sqrt(300 * 0.25)


@pytest.mark.parametrize("split", [dirichlet, dirichlet_fixed])
def test_large_alpha_is_close_to_global_proportions(split):
    labels = balanced()
    counts = histogram(labels, split(labels, 10, rng(), classes=10, alpha=1e5), 10)
    # dirichlet_fixed draws 600 labels per client: a deviation of 60 +- 4 * sqrt(600 * .1 * .9) is chance
    assert abs(counts - 60).max() <= (3 if split is dirichlet else 32)


def test_small_alpha_is_about_one_class_per_client():
    labels = balanced()
    counts = histogram(labels, dirichlet_fixed(labels, 10, rng(), classes=10, alpha=1e-3, samples_per_client=50), 10)
    assert (counts.max(axis=1) >= 48).sum() >= 9
    split = dirichlet(labels, 10, rng(), classes=10, alpha=1e-3, min_samples=0)
    assert np.count_nonzero(histogram(labels, split, 10)) <= 13, "each class goes to about one client"


@pytest.mark.parametrize("alpha", [1e-300, 1e-5])
def test_underflowing_dirichlet_draws_become_one_hot(alpha):
    labels = balanced(each=20)
    for split in (
        dirichlet(labels, 5, rng(), classes=10, alpha=alpha, min_samples=0),
        dirichlet(labels, 5, rng(), classes=10, alpha=alpha, min_samples=0, capped=True),
        dirichlet_fixed(labels, 5, rng(), classes=10, alpha=alpha),
    ):
        assert sum(map(len, split)) == len(labels)


def test_capped_dirichlet_stops_filling_full_clients():
    labels, deviations = balanced(), {False: [], True: []}
    for seed in range(20):
        for capped, seen in deviations.items():
            sizes = [len(i) for i in dirichlet(labels, 10, rng(seed), classes=10, alpha=0.3, capped=capped)]
            seen.append(np.std(sizes))
            assert not capped or max(sizes) < 600 + 600, "below n/N before its last class, which has 600"
    assert np.mean(deviations[True]) < 0.8 * np.mean(deviations[False])


def test_dirichlet_fixed_prior():
    labels = balanced(4, 1000)
    split = dirichlet_fixed(labels, 20, rng(), classes=4, alpha=1e4, prior=[0, 3, 1, 0], samples_per_client=40)
    assert np.allclose(histogram(labels, split, 4).sum(axis=0) / 800, [0, 0.75, 0.25, 0], atol=0.06)


def test_a_prior_counts_by_its_proportions_alone():
    """It is scaled to mean 1, so that a uniform one is none."""
    labels = balanced(4, 100)
    none, uniform, small, large = (
        dirichlet_fixed(labels, 10, rng(3), classes=4, alpha=0.5, prior=prior)
        for prior in (None, [7, 7, 7, 7], [1, 2, 3, 2], [10, 20, 30, 20])
    )
    for one, other in ((none, uniform), (small, large)):
        assert all(map(np.array_equal, one, other))
    assert not all(map(np.array_equal, none, small))


class Underflowing:
    """A generator whose gamma draws all underflow, so that a Dirichlet draw is 0 / 0."""

    def __init__(self) -> None:
        self.weights: list[np.ndarray] = []

    def dirichlet(self, alpha: np.ndarray) -> np.ndarray:
        return np.full(len(alpha), np.nan)

    def choice(self, count: int, p: np.ndarray) -> int:
        self.weights.append(p)
        return count - 1


def test_a_draw_that_underflows_has_one_share_chosen_by_alpha():
    generator = Underflowing()
    assert dirichlet_module._shares(np.array([1e-320, 3e-320]), generator).tolist() == [0, 1]  # type: ignore[arg-type]
    assert dirichlet_module._shares(np.array([2.0, 6.0]), generator).tolist() == [0, 1]  # type: ignore[arg-type]
    assert generator.weights[1].tolist() == [0.25, 0.75]
    assert generator.weights[0].sum() == pytest.approx(1)


@pytest.mark.parametrize(("samples", "unused"), [(40, 0), (42, 2)])
def test_what_rebalancing_leaves_over_is_said(samples, unused):
    said: list[str] = []
    labels = np.arange(samples) % 4
    split = dirichlet(labels, 5, rng(), classes=4, alpha=0.5, rebalanced=True, warn=said.append)
    assert sum(map(len, split)) == samples - unused
    assert said == ([f"dirichlet, rebalanced: {unused} of {samples} samples are not used"] if unused else [])


def test_more_samples_asked_for_than_there_are():
    with pytest.raises(UserError, match=r"10 samples can't give data\.clients=4 at least 3 each"):
        dirichlet(np.arange(10) % 2, 4, rng(), classes=2, min_samples=3)


def test_dirichlet_fixed_matches_a_plain_loop_in_distribution():
    """Against the reference procedure: sample after sample, round-robin in random order, redraw what has run out."""
    labels = np.repeat(np.arange(3), [8, 20, 12])
    q = np.array([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])

    def slow(generator):
        left, counts = np.array([8, 20, 12]), np.zeros((3, 3))
        for _ in range(12):
            for i in generator.permutation(3):
                weights = q[i] * (left > 0)
                c = generator.choice(3, p=weights / weights.sum())
                counts[i, c] += 1
                left[c] -= 1
        return counts

    def fast(generator):
        client = generator.permuted(np.tile(np.arange(3), (12, 1)), axis=1).ravel()
        chosen = dirichlet_module._choose(q, client, np.bincount(labels), generator)
        return np.bincount(client * 3 + chosen, minlength=9).reshape(3, 3)

    repeats = 1500
    generator = rng(3)
    means = [np.mean([draw(generator) for _ in range(repeats)], axis=0) for draw in (slow, fast)]
    assert np.allclose(*means, atol=0.2), "five standard errors of a count whose deviation is below 2"


def test_overlapping_dirichlet_draws_with_the_weights_of_the_classes():
    """One draw of class c has probability q_c n_c / sum; later draws flatten it (Plato's sampler)."""
    pools = [np.arange(100), np.arange(100, 300)]
    generator = rng(5)
    ones = [dirichlet_module._draw_weighted(pools, np.array([0.8, 0.2]), 1, generator)[0] < 100 for _ in range(4000)]
    assert abs(np.mean(ones) - 0.8 * 100 / (0.8 * 100 + 0.2 * 200)) < 0.04
    everything = dirichlet_module._draw_weighted(pools, np.array([1.0, 1e-200]), 300, generator)
    assert np.array_equal(everything, np.arange(300))


def test_min_samples_is_met_or_refused():
    labels = balanced(each=60)
    for seed in range(10):
        split = dirichlet(labels, 10, rng(seed), classes=10, alpha=0.3, min_samples=20)
        assert min(map(len, split)) >= 20


@pytest.mark.parametrize("capped", [False, True])
def test_hopeless_draws_end(capped, monkeypatch):
    monkeypatch.setattr(dirichlet_module, "MAX_DRAWS", 50)
    with pytest.raises(UserError, match=r"in 50 draws .*at best the smallest had 0"):
        dirichlet(balanced(), 200, rng(), classes=10, alpha=0.01, min_samples=10, capped=capped)
