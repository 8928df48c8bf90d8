"""The partitioners (part III of the specification): what each promises, over many label vectors and sizes."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedray.config import DataConfig
from fedray.data import dirichlet as dirichlet_module
from fedray.data.contents import data_digests
from fedray.data.deal import largest_remainder
from fedray.data.dirichlet import dirichlet, dirichlet_fixed
from fedray.data.federated import federate, with_train_subset
from fedray.data.partition import PARTITIONERS, partition
from fedray.data.plot import label_counts, plot_labels
from fedray.data.skew import iid, label_skew, natural, orthogonal, quantity_skew, shards
from fedray.data.source import Source
from fedray.data.test_shares import with_test_shares
from fedray.errors import UserError
from fedray.tracking.folder import names_that_differ

quick = settings(max_examples=40, deadline=None)


def rng(seed=0):
    return np.random.Generator(np.random.Philox(seed))


def balanced(classes=10, each=600, seed=1):
    return rng(seed).permutation(np.repeat(np.arange(classes), each))


def histogram(labels, split, classes):
    return np.array([np.bincount(labels[indices], minlength=classes) for indices in split])


def config(kind, clients, samples=None, **options):
    return DataConfig.model_validate(
        {"clients": clients, "samples_per_client": samples, "partition": {"kind": kind, **options}}
    )


def check_split(split, clients, total, disjoint=True):
    assert len(split) == clients
    for indices in split:
        assert indices.dtype == np.int64
        assert (np.diff(indices) > 0).all(), "sorted, and no sample twice in a client"
        assert not len(indices) or (indices[0] >= 0 and indices[-1] < total)
    if disjoint:
        everything = np.concatenate(split)
        assert len(np.unique(everything)) == len(everything)


labellings = st.builds(
    lambda classes, total, seed: np.append(rng(seed).integers(classes, size=total), np.arange(classes)),
    st.integers(2, 12),
    st.integers(150, 700),
    st.integers(0, 2**32),
)
clients = st.integers(1, 12)
seeds = st.integers(0, 2**63 - 1)
alphas = st.floats(1e-3, 1e3)


@quick
@given(labellings, clients, seeds)
def test_iid_uses_everything_in_equal_parts(labels, n, seed):
    split = iid(labels, n, rng(seed))
    check_split(split, n, len(labels))
    sizes = [len(indices) for indices in split]
    assert sum(sizes) == len(labels)
    assert max(sizes) - min(sizes) <= 1


@quick
@given(labellings, clients, seeds, st.data())
def test_label_skew_gives_equal_sizes_and_x_classes(labels, n, seed, data):
    classes = int(labels.max()) + 1
    x = data.draw(st.integers(1, classes - 1))
    assign = data.draw(st.sampled_from(["random", "balanced"]))
    options = {"classes": classes, "classes_per_client": x, "assign": assign, "samples_per_client": x}
    try:
        split = label_skew(labels, n, rng(seed), **options)
    except UserError:
        # more clients may hold a class than it has samples
        assert np.bincount(labels).min() < n
        return
    check_split(split, n, len(labels))
    assert len({len(indices) for indices in split}) == 1
    counts = histogram(labels, split, classes)
    assert ((counts > 0).sum(axis=1) == x).all()
    if assign == "balanced":
        assert (counts[np.arange(n), np.arange(n) % classes] > 0).all()


@quick
@given(labellings, clients, seeds, st.data())
def test_quantity_skew_is_exact_and_keeps_class_proportions(labels, n, seed, data):
    classes, total = int(labels.max()) + 1, len(labels)
    sizes = data.draw(st.lists(st.integers(1, 2 * total // n), min_size=n, max_size=n))
    notes = []
    split = quantity_skew(labels, n, rng(seed), classes=classes, sizes=sizes, note=notes.append)
    check_split(split, n, total)
    got = np.array([len(indices) for indices in split])
    if sum(sizes) <= total:
        assert (got == sizes).all()
    else:
        assert got.sum() == total
        assert notes
        assert (abs(got - np.array(sizes) * total / sum(sizes)) < 1).all()
    ideal = got[:, None] * np.bincount(labels, minlength=classes) / total
    assert abs(histogram(labels, split, classes) - ideal).max() <= 2


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


@quick
@given(labellings, clients, seeds, st.integers(1, 4))
def test_shards_are_equal_and_of_few_classes(labels, n, seed, each):
    classes = int(labels.max()) + 1
    split = shards(labels, n, rng(seed), classes=classes, shards_per_client=each)
    check_split(split, n, len(labels))
    size = len(labels) // n // each
    assert {len(indices) for indices in split} == {size * each}


@quick
@given(labellings, clients, seeds, st.data())
def test_orthogonal_clusters_share_no_class(labels, n, seed, data):
    classes = int(labels.max()) + 1
    clusters = data.draw(st.integers(1, classes))
    overlap = data.draw(st.booleans())
    split = orthogonal(
        labels,
        n,
        rng(seed),
        classes=classes,
        clusters=clusters,
        overlap=overlap,
        samples_per_client=1 if overlap else None,
    )
    check_split(split, n, len(labels), disjoint=not overlap)
    assert len({len(indices) for indices in split}) == 1
    block = np.repeat(np.arange(clusters), [len(part) for part in np.array_split(np.arange(classes), clusters)])
    for i, indices in enumerate(split):
        assert (block[labels[indices]] == i % clusters).all()


@quick
@given(labellings, seeds, st.integers(0, 6))
def test_natural_clients_are_the_datas_own_in_order(labels, seed, least):
    owners = rng(seed).choice([7, -3, 900, 12], size=len(labels))
    split = natural(labels, 99, rng(), owners=owners, min_samples=least)
    check_split(split, 4, len(labels))
    assert [int(owners[indices[0]]) for indices in split] == [-3, 7, 12, 900]
    assert sum(map(len, split)) == len(labels)


def test_natural_drops_small_clients():
    split = natural(np.zeros(6), 1, rng(), owners=np.array([5, 5, 2, 9, 9, 9]), min_samples=2)
    assert [indices.tolist() for indices in split] == [[0, 1], [3, 4, 5]]


OPTIONS = {
    "iid": {},
    "label_skew": {"classes_per_client": 3},
    "quantity_skew": {"sizes": [50, 100, 200, 400, 800, 1600]},
    "dirichlet": {},
    "dirichlet_fixed": {},
    "shards": {"shards_per_client": 2},
    "orthogonal": {"clusters": 3},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_seed_decides_and_nothing_else(kind):
    labels = balanced()
    first, again, other = (
        np.concatenate(partition(labels, 10, config(kind, 6, **OPTIONS[kind]), rng(seed))[0]) for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_same_split_in_another_process():
    code = (
        "from fedray.config import DataConfig; from fedray.data.federated import federate;"
        "from fedray.data.source import load_source;"
        "print(federate(load_source('sample'), DataConfig(), 7, 100).partition_hash)"
    )
    hashes = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    from fedray.data.source import load_source

    assert hashes == {federate(load_source("sample"), DataConfig(), 7, 100).partition_hash + "\n"}


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


def test_overlapping_clients_draw_without_replacement_beyond_the_supply():
    split = iid(balanced(10, 10), 500, rng(), samples_per_client=60, overlap=True)
    check_split(split, 500, 100, disjoint=False)
    assert {len(indices) for indices in split} == {60}


def test_all_classes_per_client_is_iid():
    labels = rng().permutation(np.repeat(np.arange(10), [300, 900] * 5))
    split = label_skew(labels, 5, rng(), classes=10, classes_per_client=10)
    counts = histogram(labels, split, 10)
    assert (counts.sum(axis=1) == 1200).all()
    assert (abs(counts / 1200 - np.bincount(labels) / 6000) < 0.04).all()


def test_label_skew_shrinks_for_all_alike():
    labels, notes = np.repeat(np.arange(4), [100, 100, 100, 30]), []
    split = label_skew(labels, 8, rng(1), classes=4, classes_per_client=2, assign="balanced", note=notes.append)
    holders = np.bincount(np.concatenate([np.unique(labels[indices]) for indices in split]))
    assert {len(indices) for indices in split} == {min([100, 100, 100, 30] // holders) * 2}
    assert "samples instead of 41" in notes[0]


def test_label_skew_fills_from_other_classes():
    labels = np.repeat(np.arange(4), [100, 100, 100, 6])
    split = label_skew(
        labels, 4, rng(1), classes=4, classes_per_client=2, assign="balanced", on_empty="fill", samples_per_client=40
    )
    check_split(split, 4, len(labels))
    assert {len(indices) for indices in split} == {40}


def test_label_skew_reports_classes_that_nobody_holds():
    notes = []
    label_skew(balanced(), 2, rng(), classes=10, classes_per_client=1, samples_per_client=5, note=notes.append)
    assert "of 10 classes; nobody holds" in notes[0]


def test_gradual_sizes_of_the_paper_use_all_of_the_set():
    labels = rng().permutation(np.repeat(np.arange(10), [592, 674, 596, 613, 584, 542, 592, 627, 585, 595]))
    split = quantity_skew(labels, 4, rng(), classes=10, sizes=[500, 1250, 1750, 2500])
    assert [len(indices) for indices in split] == [500, 1250, 1750, 2500]
    assert len(np.unique(np.concatenate(split))) == 6000


def test_one_shard_each_is_one_class_each():
    labels = balanced(10, 500)
    counts = histogram(labels, shards(labels, 100, rng(), classes=10), 10)
    assert ((counts > 0).sum(axis=1) == 1).all()
    assert counts.sum() == 5000


def test_shards_report_what_is_left_over():
    notes = []
    shards(balanced(10, 101), 20, rng(), classes=10, note=notes.append)
    assert notes == ["shards: 10 of 1010 samples are not used"]


def test_orthogonal_blocks_of_47_classes():
    split = orthogonal(balanced(47, 20), 5, rng(), classes=47, samples_per_client=150)
    held = [len(np.unique(balanced(47, 20)[indices])) for indices in split]
    assert held == [10, 10, 9, 9, 9]


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


MISTAKES = {
    "unknown kind": (config("dirchlet", 4), "did you mean 'dirichlet'"),
    "alpha for iid": (
        config("iid", 4, alpha=0.1),
        "alpha does not apply .*kind=iid; it does to dirichlet, dirichlet_fixed",
    ),
    "sizes for shards": (config("shards", 4, sizes=[1]), "sizes does not apply .* quantity_skew"),
    "samples for dirichlet": (config("dirichlet", 4, 10), "data.samples_per_client does not apply"),
    "too many classes": (config("label_skew", 4, classes_per_client=11), "more than the 10 classes"),
    "no classes": (config("label_skew", 4), "needs data.partition.classes_per_client"),
    "fewer samples than classes": (config("label_skew", 4, 2, classes_per_client=3), "can't hold"),
    "class too small": (config("label_skew", 4, classes_per_client=1, on_empty="error"), "too few for 1500"),
    "class too small to fill": (
        config("label_skew", 4, classes_per_client=1, on_empty="fill"),
        "lower data.samples_per",
    ),
    "no sizes": (config("quantity_skew", 4), "needs data.partition.sizes"),
    "too few sizes": (config("quantity_skew", 4, sizes=[1, 2]), "has 2 numbers, but data.clients=4"),
    "too many clusters": (config("orthogonal", 4, clusters=11), "more than the 10 classes"),
    "cluster too small": (config("orthogonal", 10, 601, clusters=5), "at most 600"),
    "prior of wrong length": (config("dirichlet_fixed", 4, prior=[1, 2]), "has 2 numbers for 10 classes"),
    "prior of zeros": (config("dirichlet_fixed", 4, prior=[0] * 10), "at least one must be above 0"),
    "too many samples": (config("iid", 4, 1501), "at most 1500 each"),
    "overlap of unknown size": (config("iid", 4, overlap=True), "needs data.samples_per_client"),
    "overlap beyond the set": (config("dirichlet_fixed", 4, 6001, overlap=True), "more than the 6000"),
    "nobody's samples": (config("natural", 4), "client_train"),
    "more clients than samples": (config("iid", 6002), "client 6000 has 0 samples, fewer than 1"),
    "clients too small": (config("iid", 1000, min_samples=7), "client 0 has 6 samples, fewer than 7"),
    "shards too small": (config("shards", 4, shards_per_client=1501), "can't be cut"),
    "dirichlet of too many": (config("dirichlet", 6001), "6000 samples can't give"),
}


@pytest.mark.parametrize(("data", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_told_in_one_line(data, message):
    with pytest.raises(UserError, match=message) as raised:
        partition(balanced(), 10, data, rng())
    assert "\n" not in str(raised.value)


def test_spelled_out_defaults_mean_the_same():
    resolved = DataConfig.model_validate(config("iid", 4).model_dump())
    assert len(partition(balanced(), 10, resolved, rng())[0]) == 4


def test_min_samples_0_allows_empty_clients():
    split, _ = partition(balanced(10, 1), 10, config("iid", 12, min_samples=0), rng())
    assert [len(indices) for indices in split] == [1] * 10 + [0] * 2


def test_every_kind_says_what_it_takes():
    assert "partition.alpha" in PARTITIONERS["dirichlet"].options
    assert "samples_per_client" not in PARTITIONERS["dirichlet"].options
    assert all(entry.about and "partition.min_samples" in entry.options for entry in PARTITIONERS.values())


@quick
@given(st.lists(st.floats(0, 50), min_size=1, max_size=20))
def test_largest_remainder_rounds_to_the_total(quotas):
    total = round(sum(quotas))
    rounded = largest_remainder(np.array(quotas), total)
    if abs(total - sum(quotas)) < 1e-6 or sum(np.floor(quotas)) <= total <= sum(np.floor(quotas)) + len(quotas):
        assert rounded.sum() == total
        assert (abs(rounded - quotas) <= 1).all()


def source(**fields):
    labels = balanced(10, 60)
    x = np.arange(600, dtype=np.float32)[:, None]
    tests = np.repeat(np.arange(10), 10)
    return Source("toy", x, labels, np.arange(100, dtype=np.float32)[:, None], tests, 10, **fields)


def test_public_and_validation_samples_are_nobodys():
    data = federate(source(), config("iid", 7).model_copy(update={"validation_samples": 50}), 3, public_samples=60)
    assert len(data.public) == 60
    assert len(data.validation) == 50
    assert np.array_equal(np.sort(np.concatenate([data.indices, data.public, data.validation])), np.arange(600))
    assert data.sizes().sum() == 490
    assert (data.x[data.client(2), 0] == data.client(2)).all()
    larger = federate(source(), config("iid", 7).model_copy(update={"validation_samples": 50}), 3, public_samples=90)
    assert np.array_equal(larger.validation, data.validation)
    assert np.isin(data.public, larger.public).all()


def test_a_public_set_of_the_sources_own():
    own = source(x_public=np.full((20, 1), -1, np.float32), y_public=np.arange(20) % 10)
    data = federate(own, config("iid", 3), 0, public_samples=60)
    assert (data.x[data.public] == -1).all()
    assert len(data.public) == 20
    assert len(data.indices) == 600
    assert len(federate(own, config("iid", 3), 0, public_samples=0).public) == 0
    with pytest.raises(UserError, match="public set of 20"):
        federate(own, config("iid", 3).model_copy(update={"public_samples": 30}), 0, public_samples=30)


def test_taking_everything_out_is_refused():
    with pytest.raises(UserError, match="leave none of the 600"):
        federate(source(), config("iid", 3), 0, public_samples=600)


def test_hashes_tell_partitions_and_data_apart():
    one, same, other = (federate(source(), config("iid", 5), seed, 0) for seed in (1, 1, 2))
    assert one.partition_hash == same.partition_hash != other.partition_hash
    assert data_digests(source(), one) == data_digests(source(), same)
    assert names_that_differ(data_digests(source(), one), data_digests(source(), other)) == ["partition"]
    changed = source()
    changed.x_test[0] += 1
    again = federate(changed, config("iid", 5), 1, 0)
    assert again.partition_hash == one.partition_hash
    assert names_that_differ(data_digests(source(), one), data_digests(changed, again)) == ["test data"]


def test_test_shares_follow_the_training_counts():
    data = with_test_shares(federate(source(), config("dirichlet", 5, alpha=0.4), 1, 0), 1)
    assert np.array_equal(np.sort(data.test_indices), np.arange(100))
    train = label_counts(data)
    shares = histogram(data.y_test, [data.client_test(i) for i in range(5)], 10)
    assert abs(shares - 10 * train / train.sum(axis=0)).max() < 1
    assert np.array_equal(with_test_shares(data, 9).test_indices, data.test_indices)


def test_test_samples_of_a_class_that_nobody_holds_go_to_nobody():
    held = federate(source(), config("label_skew", 2, 20, classes_per_client=2), 0, 0)
    data = with_test_shares(held, 0)
    assert set(data.y_test[data.test_indices]) == set(data.y[data.indices])


def test_natural_clients_keep_their_names_and_tests():
    owners, testers = np.repeat([40, 10, 30], 200), np.tile([10, 99, 40, 30, 5], 20)
    data = federate(source(client_train=owners, client_test=testers), config("natural", 20), 0, 30)
    assert data.clients == 3
    assert data.ids.tolist() == [10, 30, 40]
    assert (owners[data.client(0)] == 10).all()
    assert [len(data.client_test(i)) for i in range(3)] == [20, 20, 20]
    assert (testers[data.client_test(2)] == 40).all()


def test_train_subset_is_of_the_clients():
    data = with_train_subset(federate(source(), config("shards", 7), 0, 100), 50, 0)
    assert len(np.unique(data.train_subset)) == 50
    assert np.isin(data.train_subset, data.indices).all()
    with pytest.raises(UserError, match="eval_train_samples"):
        with_train_subset(data, 600, 0)


@pytest.mark.parametrize("clients", [4, 60])
def test_labels_are_drawn(clients, tmp_path):
    plot_labels(federate(source(), config("dirichlet", clients, min_samples=0), 0, 0), tmp_path / "labels.png")
    assert (tmp_path / "labels.png").stat().st_size > 5000
