"""A source becomes a federation: clients, public set, validation samples and test shares, told apart by digests."""

import numpy as np
import pytest
from partition_checks import balanced, config, histogram

from fedray.data.federated import federate, with_train_subset
from fedray.data.partitions.holdings import Holdings
from fedray.data.partitions.plot import draw_holdings
from fedray.data.partitions.test_shares import with_test_shares
from fedray.data.sources.source import Source
from fedray.data.storage.contents import data_digests
from fedray.errors import UserError
from fedray.tracking.folder import names_that_differ


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
    train = Holdings.of(data).counts
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
    data = federate(source(), config("dirichlet", clients, min_samples=0), 0, 0)
    draw_holdings(Holdings.of(data)).savefig(tmp_path / "labels.png")
    assert (tmp_path / "labels.png").stat().st_size > 5000


@pytest.mark.parametrize("clients", [None, ["ann", "bob", "cy"]])
def test_who_holds_what_is_read_back(clients, tmp_path):
    """The last client and the last class hold nothing here."""
    counts = np.array([[0, 3, 0], [2, 1, 0], [0, 0, 0]])
    held = Holdings(counts, ("a", "b", "2"), clients if clients is None else ["ann", "bob", "cy"])
    held.write(tmp_path / "partition.parquet")
    again = Holdings.read(tmp_path / "partition.parquet")
    assert np.array_equal(again.counts, counts)
    assert again.classes == ["a", "b", "2"]
    assert again.clients == clients
