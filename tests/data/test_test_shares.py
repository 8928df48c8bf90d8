"""Clients' own shares of the test set: at least as many samples as asked for, in the proportions of their classes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_checks import examples

from fedray.config import DataConfig
from fedray.data.federated import federate
from fedray.data.partitions.test_shares import draw_eval_clients, with_test_shares
from fedray.data.sources.source import Source
from fedray.errors import UserError

CLASSES = 5


def dealt(clients, alpha=0.5, samples=600, tests=150, seed=0, **changes):
    rng = np.random.default_rng(1)
    y, y_test = rng.integers(0, CLASSES, samples), np.arange(tests) % CLASSES
    x, x_test = np.zeros((samples, 1), np.float32), np.zeros((tests, 1), np.float32)
    source = Source("toy", x, y, x_test, y_test, CLASSES, **changes)
    kind = "natural" if changes else "dirichlet"
    partition = {"kind": kind} if changes else {"kind": kind, "alpha": alpha}
    return federate(source, DataConfig(clients=clients, partition=partition), seed, 0)


def counts(labels):
    return np.bincount(labels, minlength=CLASSES)


@settings(max_examples=examples(40), deadline=None)
@given(clients=st.integers(2, 60), least=st.integers(1, 30), seed=st.integers(0, 9))
def test_no_share_is_smaller_than_asked_for(clients, least, seed):
    data = dealt(clients, alpha=1.0, seed=seed)
    plain = with_test_shares(data, seed)
    sized = with_test_shares(data, seed, least)
    for client in range(clients):
        before, after = plain.client_test(client), sized.client_test(client)
        if len(before) >= least:
            assert np.array_equal(before, after)
            continue
        assert len(after) == least
        assert (np.diff(after) > 0).all()
        held = counts(data.y[data.client(client)])
        # 30 test samples of each class: none runs out
        assert abs(counts(data.y_test[after]) - least * held / held.sum()).max() < 1


def test_shares_that_are_drawn_anew_differ_and_repeat():
    data = dealt(60, alpha=100.0)
    one, again, other = (with_test_shares(data, seed, 20) for seed in (0, 0, 1))
    assert np.array_equal(one.test_indices, again.test_indices)
    assert not np.array_equal(one.test_indices, other.test_indices)
    assert len({one.client_test(i).tobytes() for i in range(60)}) > 50
    # 60 clients have 20 of 150 each: every sample is some clients'
    assert len(np.unique(one.test_indices)) == 150


def test_a_class_that_runs_out_leaves_the_rest_to_others():
    """Nine tenths of class 0, of which there are only three test samples, and a tenth of class 1."""
    y, y_test = np.repeat([0, 1], [90, 10]), np.repeat([0, 1], [3, 50])
    x = np.zeros((153, 1), np.float32)
    source = Source("toy", x[:100], y, x[100:], y_test, 2)
    data = federate(source, DataConfig(clients=5, partition={"kind": "iid"}), 0, 0)
    assert all(counts(y[data.client(i)])[1] for i in range(5))
    shares = with_test_shares(data, 0, 30)
    assert [counts(y_test[shares.client_test(i)])[:2].tolist() for i in range(5)] == [[3, 27]] * 5
    with pytest.raises(
        UserError, match=r"data\.least_test_samples=54, but the test set has only 53 samples of the classes"
    ):
        with_test_shares(data, 0, 54)


def test_shares_that_the_data_give_are_kept_or_refused():
    owners, testers = np.repeat([40, 10, 30], 200), np.repeat([10, 30, 40], [50, 20, 80])
    data = dealt(3, client_train=owners, client_test=testers)
    assert with_test_shares(data, 0, 20) is data
    with pytest.raises(UserError, match=r"data\.least_test_samples=21, .*client 1 has 20"):
        with_test_shares(data, 0, 21)


def test_clients_are_drawn_among_those_with_samples():
    data = dealt(20)
    some = draw_eval_clients(data, 0, 6)
    assert len(np.unique(some)) == 6
    assert (data.sizes()[some] > 0).all()
    assert draw_eval_clients(data, 0, "all").tolist() == list(range(20))
    assert draw_eval_clients(data, 0, 0).tolist() == []
