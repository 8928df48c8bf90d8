"""The partitioners keep what each promises, over many label vectors and sizes, and refuse what they cannot keep."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from partition_checks import balanced, check_split, clients, config, histogram, labellings, quick, rng, seeds

from fedray.config import DataConfig
from fedray.data.federated import federate
from fedray.data.partitions.partition import PARTITIONERS, partition
from fedray.data.partitions.skew import iid, label_skew, natural, orthogonal, quantity_skew, shards
from fedray.data.partitions.splits import largest_remainder
from fedray.errors import UserError


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
    split = quantity_skew(labels, n, rng(seed), classes=classes, sizes=sizes, warn=notes.append)
    check_split(split, n, total)
    got = np.array([len(indices) for indices in split])
    if sum(sizes) <= total:
        assert (got == sizes).all()
    else:
        assert got.sum() == total
        assert notes
        assert (abs(got - np.array(sizes) * total / sum(sizes)) < 1).all()
    ideal = got[:, None] * np.bincount(labels, minlength=classes) / total
    # one of rounding, and one or two where a class would have run out
    assert abs(histogram(labels, split, classes) - ideal).max() < 3


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


@given(seeds, st.integers(1, 12), st.integers(1, 9))
def test_natural_draws_clients_and_samples(seed, clients, most):
    owners = np.random.default_rng(seed).integers(0, 9, 60)
    whole = natural(np.zeros(60), 99, rng(seed), owners=owners)
    notes = []
    split = natural(
        np.zeros(60), 99, rng(seed), owners=owners, max_clients=clients, max_samples=most, note=notes.append
    )
    assert len(split) == min(clients, len(whole))
    chosen = [owners[held[0]] for held in split]
    assert chosen == sorted(set(chosen))
    for owner, held in zip(chosen, split, strict=True):
        of_owner = np.flatnonzero(owners == owner)
        assert len(held) == min(most, len(of_owner))
        assert np.isin(held, of_owner).all()
        assert (np.diff(held) > 0).all()
    assert len(notes) == (len(whole) > clients) + any((owners == owner).sum() > most for owner in chosen)
    again = natural(np.zeros(60), 99, rng(seed), owners=owners, max_clients=clients, max_samples=most)
    assert all(map(np.array_equal, split, again))


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
        "from fedray.data.sources.source import load_source;"
        "print(federate(load_source('sample'), DataConfig(), 7, 100).partition_hash)"
    )
    hashes = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    from fedray.data.sources.source import load_source

    assert hashes == {federate(load_source("sample"), DataConfig(), 7, 100).partition_hash + "\n"}


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
    split = label_skew(labels, 8, rng(1), classes=4, classes_per_client=2, assign="balanced", warn=notes.append)
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
    label_skew(balanced(), 2, rng(), classes=10, classes_per_client=1, samples_per_client=5, warn=notes.append)
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
    shards(balanced(10, 101), 20, rng(), classes=10, warn=notes.append)
    assert notes == ["shards: 10 of 1010 samples are not used"]


def test_clients_of_a_cluster_may_all_draw_the_same():
    options = {"classes": 4, "clusters": 4, "samples_per_client": 20, "overlap": True, "same_draw": True}
    labels = np.repeat(np.arange(4), [50, 50, 50, 5])
    split = orthogonal(labels[:150], 6, rng(), **{**options, "clusters": 3, "classes": 3})
    assert [part.tolist() for part in split[:3]] == [part.tolist() for part in split[3:]]
    assert {tuple(set(labels[part].tolist())) for part in split} == {(0,), (1,), (2,)}
    # clusters that no client is in need no samples
    assert [len(part) for part in orthogonal(labels, 2, rng(), **options)] == [20, 20]


def test_orthogonal_blocks_of_47_classes():
    split = orthogonal(balanced(47, 20), 5, rng(), classes=47, samples_per_client=150)
    held = [len(np.unique(balanced(47, 20)[indices])) for indices in split]
    assert held == [10, 10, 9, 9, 9]


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
    "more clients than samples": (
        config("iid", 6002),
        "iid: client 6000 would have no samples, like 1 other: lower data.clients=6002, or set data.partition.min_sam",
    ),
    "one client more than samples": (config("iid", 6001), "client 6000 would have no samples: lower data.clients=6001"),
    "clients too small": (
        config("iid", 1000, min_samples=7),
        "6 samples, like 999 others, but data.partition.min_samples=7",
    ),
    "a client without a size": (config("quantity_skew", 2, sizes=[1, 10**6]), "raise its data.partition.sizes, or set"),
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
