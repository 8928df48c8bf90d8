"""Labels to be split among clients, and what is to be seen of a split: its histogram and its soundness."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from fedray.config import DataConfig


def examples(usual):
    """Returns how many examples a slower test has: ``usual`` of a hundred, or as many more as the profile asks for."""
    return max(1, usual * settings.default.max_examples // 100)


quick = settings(max_examples=examples(40), deadline=None)


def rng(seed=0):
    """Returns a generator of the kind that the partitioners are handed."""
    return np.random.Generator(np.random.Philox(seed))


def balanced(classes=10, each=600, seed=1):
    """Returns shuffled labels with equally many samples of each class."""
    return rng(seed).permutation(np.repeat(np.arange(classes), each))


def histogram(labels, split, classes):
    """Returns how many samples of each class each client has, (clients, classes)."""
    return np.array([np.bincount(labels[indices], minlength=classes) for indices in split])


def config(kind, clients, samples=None, **options):
    return DataConfig.model_validate(
        {"clients": clients, "samples_per_client": samples, "partition": {"kind": kind, **options}}
    )


def check_split(split, clients, total, disjoint=True):
    """Checks that each client's samples exist, are sorted and come once, and, if disjoint, that nobody shares one."""
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
