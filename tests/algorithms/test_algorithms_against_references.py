"""fedray, driven from outside, against float64 references written from the papers' rules alone."""

import numpy as np
import pytest
import reference_runs
import references
from pairs import pairwise
from reference_runs import EVERYTHING, PARTICIPATION, PLAIN, ROUNDS, SIZES, make_data, make_start
from references import Train

SERVER_LR = {"fedavg": 0.6, "fedprox": 0.6}
HYPER = {
    "fedavg": ({}, {}),
    "fedprox": ({"mu": 0.1}, {"mu": 1.5}),
    "fednag": ({"gamma": 0.5}, {"gamma": 0.8}),
    "pfedmo": ({"gamma": 0.5, "pi": 1.0}, {"gamma": 0.7, "pi": 0.5}),
}
VARIANTS = [(name, {}) for name in ("fedavg", "fedprox", "fednag")] + [
    ("pfedmo", {"form": form, "contrast": contrast}) for form in ("velocity", "printed") for contrast in (True, False)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "toy.npz")


@pytest.fixture(scope="module")
def start(data, tmp_path_factory):
    return make_start(data, tmp_path_factory.mktemp("start"))


def check(data, output, name, *rest):
    return reference_runs.check(data, output, name, getattr(references, name), *rest)


def settings(name, variant, everything, weighting):
    train = EVERYTHING if everything else PLAIN
    server_lr = SERVER_LR.get(name, 1.0) if everything else 1.0
    train = Train(**{**vars(train), "weighting": weighting, "server_lr": server_lr})
    return HYPER[name][everything] | variant, train


def label(value):
    if isinstance(value, tuple):
        name, variant = value
        return "-".join([name, *(str(v) for v in variant.values())])
    return None


@pytest.mark.parametrize(
    ("algorithm", "everything", "participation", "weighting"),
    pairwise(VARIANTS, (False, True), list(PARTICIPATION), ("samples", "uniform")),
    ids=label,
)
def test_against_reference(data, start, tmp_path, algorithm, everything, participation, weighting):
    """Plain: from zeros. Everything: other hyper-parameters, a given start, decay, clipping and server lr."""
    name, variant = algorithm
    hyper, train = settings(name, variant, everything, weighting)
    check(data, tmp_path, name, hyper, train, PARTICIPATION[participation], start if everything else None)


@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vmap"])
@pytest.mark.parametrize("algorithm", VARIANTS, ids=label)
def test_gradient_back_ends(data, start, tmp_path, algorithm, vectorize):
    """Clients of one to twenty samples in one chunk of four and another of one."""
    name, variant = algorithm
    hyper, train = settings(name, variant, True, "samples")
    keys = {"engine.vectorize": vectorize, "engine.chunk": 4}
    check(data, tmp_path, name, hyper, train, keys, start)


@pytest.mark.parametrize("algorithm", ["fedavg", "fednag", "pfedmo"])
def test_one_client_a_round(data, start, tmp_path, algorithm):
    """The smallest cohort, in which some clients are scored for the first time late in the run."""
    hyper, train = settings(algorithm, {}, True, "samples")
    check(data, tmp_path, algorithm, hyper, train, {"train.cohort_size": 1}, start)


def test_pfedmo_clients_that_come_late(data, start, tmp_path):
    """Over several draws of cohorts, for a first participation after others were scored needs some luck."""
    late = []
    for seed in range(6):
        keys = {"train.cohort_size": 2, "run.seed": seed}
        hyper, train = settings("pfedmo", {}, True, "samples")
        cohorts, rounds = check(data, tmp_path / str(seed), "pfedmo", hyper, train, keys, start)
        for r in range(1, ROUNDS):
            unseen = set(cohorts[r]).difference(*cohorts[:r])
            if unseen and max(rounds[r - 1].scores.values()) > 0.01:
                late.append((seed, r))
    assert late


def test_cyclic_sampling_walks_through_one_permutation(data, tmp_path):
    cohorts, _ = check(data, tmp_path, "fedavg", {}, PLAIN, PARTICIPATION["cyclic"])
    # two of five at a time: five rounds visit everybody twice, and then start again
    counts = np.bincount(np.concatenate(cohorts[:5]), minlength=len(SIZES))
    assert (counts == 2).all()
    assert cohorts[5:] == cohorts[:5]
    for first in range(4):
        assert len(set(cohorts[first]) | set(cohorts[first + 1])) == 4
