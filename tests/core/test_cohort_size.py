"""How many clients a fraction of them is, and how many rounds make so many iterations."""

from fractions import Fraction

import numpy as np
import pytest

from fedray.config import load
from fedray.core.rounding import whole_units
from fedray.data.sources.source import Source
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import small_source


def test_a_fraction_of_clients_is_counted_as_in_exact_arithmetic():
    for clients in (1, 3, 7, 10, 60, 100, 128, 9275):
        for hundredths in range(1, 101):
            fraction = hundredths / 100
            assert whole_units(fraction * clients) == Fraction(str(fraction)) * clients // 1


def resolved(source=None, **keys):
    keys = {"algorithm.name": "fedavg", "model.name": "logistic", "engine.kind": "local"} | keys
    return resolve(load(keys), CustomObjects(source or small_source()))[0]


@pytest.mark.parametrize(("fraction", "clients"), [(0.29, 29), (0.57, 57), (0.001, 1), (1, 100)])
def test_participation_of_a_hundred_clients(fraction, clients):
    keys = {"data.clients": 100, "data.partition.kind": "iid", "train.participation": fraction}
    assert resolved(**keys).cohort_size == clients


def test_participation_is_of_the_clients_that_hold_samples():
    """Six of twenty clients hold samples: half of the clients are three."""
    x, y = np.zeros((6, 2), np.float32), np.array([0, 1] * 3)
    keys = {"data.clients": 20, "data.partition.kind": "iid", "data.partition.min_samples": 0}
    assert resolved(Source("six", x, y, x, y, 2), **keys, **{"train.participation": 0.5}).cohort_size == 3
