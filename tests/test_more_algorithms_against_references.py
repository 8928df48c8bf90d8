"""Momentum, variance reduction, drift correction and past models in fedray, against their float64 references."""

from dataclasses import replace
from math import ceil

import pytest
import reference_runs
import references_momentum
import references_variance
from reference_runs import EVERYTHING, PARTICIPATION, PLAIN, SIZES, make_data, make_start
from references_momentum import Logistic

ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")
# the others' server rules have no eta_g
SERVER_LR = (
    *("fedavgm", "mime", "mimemom", "mimelite", "mimelitemom"),
    *("scaffold", "fedcm", "fedtrip", "local_ghbm", "fedhbm"),
)
HYPER = {
    "fedavgm": ({"beta": 0.5}, {"beta": 0.9}),
    "slowmo": ({"beta": 0.5}, {"beta": 0.7, "alpha": 0.8}),
    "fedmom": ({"beta": 0.5}, {"beta": 0.8, "eta": 0.7}),
    "fastslowmo": ({"gamma": 0.5, "gamma_a": 0.5}, {"gamma": 0.7, "gamma_a": 0.3}),
    "domo": ({"mu_s": 0.5, "mu_l": 0.5, "beta": 0.9}, {"mu_s": 0.7, "mu_l": 0.3, "alpha": 0.8, "beta": 0.5}),
    "fedadc": ({"beta_g": 0.6}, {"beta_g": 0.7, "beta_l": 0.4, "alpha": 0.8}),
    "mime": ({}, {}),
    "mimemom": ({"beta": 0.9}, {"beta": 0.5}),
    "mimelite": ({}, {}),
    "mimelitemom": ({"beta": 0.9}, {"beta": 0.5}),
    "scaffold": ({}, {}),
    "feddyn": ({"alpha": 0.1}, {"alpha": 0.7}),
    "adabest": ({"mu": 0.1, "beta": 0.5}, {"mu": 0.4, "beta": 0.85}),
    "fedcm": ({"alpha": 0.1}, {"alpha": 0.5}),
    "fedtrip": ({"mu": 0.4}, {"mu": 1.0, "xi_scale": 0.5}),
    "ghbm": ({"tau": 1, "beta": 0.9}, {"tau": 3, "beta": 0.7}),
    "local_ghbm": ({"beta": 0.9}, {"beta": 0.5}),
    "fedhbm": ({"beta": 0.5}, {"beta": 0.9}),
    "fedadam": ({"beta1": 0.9, "beta2": 0.99, "tau": 0.01}, {"beta1": 0.5, "beta2": 0.9, "tau": 0.1}),
    "fedyogi": ({"beta1": 0.9, "beta2": 0.99, "tau": 0.01}, {"beta1": 0.5, "beta2": 0.9, "tau": 0.1}),
    "fedadagrad": ({"beta1": 0.0, "tau": 0.01}, {"beta1": 0.5, "tau": 0.1}),
}
OPTIONS = {
    "fedavgm": [{}, {"nesterov": True}],
    "fastslowmo": [{"carry": "y"}, {"carry": "velocity"}],
    "domo": [{"variant": "pre"}, {"variant": "step"}],
    "fedadc": [{"variant": "heavyball"}, {"variant": "nesterov"}],
    "mimemom": [{"dampening": True}, {"dampening": False}],
    "mimelitemom": [{"dampening": True}, {"dampening": False}],
    "scaffold": [{"option": 1}, {"option": 2}],
    "feddyn": [{"eval": "server"}, {"eval": "avg_selected"}],
    "fedtrip": [{"xi_mode": "inverse_gap"}, {"xi_mode": "gap"}, {"xi_mode": "const", "xi_const": 0.6}],
    "ghbm": [{"warmup": "zero"}, {"warmup": "init"}],
    "local_ghbm": [{"scale": "inv_gap"}, {"scale": "participation"}],
    "fedhbm": [{"variant": v, "scale": s} for v in ("standard", "shared") for s in ("inv_gap", "participation")],
}
VARIANTS = [(name, option) for name in HYPER for option in OPTIONS.get(name, [{}])]
# where ALGORITHMS.md says which weights a paper has
UNIFORM = ("mime", "mimemom", "mimelite", "mimelitemom", "scaffold", "feddyn", "adabest", "fedcm")
SAMPLES = ("fedavgm", "fedmom", "fedtrip", "ghbm", "local_ghbm", "fedhbm")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    data = make_data(tmp_path_factory.mktemp("data") / "toy.npz")
    return replace(data, problem=Logistic(**vars(data.problem)))


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    data = make_data(tmp_path_factory.mktemp("alike") / "toy.npz", alike=True)
    return replace(data, problem=Logistic(**vars(data.problem)))


@pytest.fixture(scope="module")
def start(data, tmp_path_factory):
    return make_start(data, tmp_path_factory.mktemp("start"))


def reference(name):
    return getattr(references_momentum, name, None) or getattr(references_variance, name)


def check(data, output, name, *rest):
    return reference_runs.check(data, output, name, reference(name), *rest)


def settings(name, option, everything, weighting):
    train = EVERYTHING if everything else PLAIN
    server_lr = 1.0
    if name in ADAPTIVE:
        server_lr = 0.2 if everything else 0.05
    elif name in SERVER_LR and everything:
        server_lr = 0.6
    return HYPER[name][everything] | option, replace(train, weighting=weighting, server_lr=server_lr)


def label(value):
    if isinstance(value, tuple):
        name, option = value
        return "-".join([name, *(f"{k}_{v}" for k, v in option.items())])
    return None


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("participation", PARTICIPATION)
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
@pytest.mark.parametrize("algorithm", VARIANTS, ids=label)
def test_against_reference(data, start, tmp_path, algorithm, everything, participation, weighting):
    """Plain: from zeros. Everything: other hyper-parameters, a given start, decay, clipping and server lr."""
    name, option = algorithm
    hyper, train = settings(name, option, everything, weighting)
    check(data, tmp_path, name, hyper, train, PARTICIPATION[participation], start if everything else None)


@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vmap"])
@pytest.mark.parametrize("algorithm", [*VARIANTS, ("adabest", {"mu_scaling": "fedsim"})], ids=label)
def test_clients_with_different_numbers_of_steps(alike, start, tmp_path, algorithm, vectorize):
    """Two epochs in batches of four, in chunks of mixed J_i."""
    name, option = algorithm
    hyper, train = settings(name, option, True, "samples")
    batches = [ceil(n / 4) for n in SIZES]
    train = replace(train, steps=tuple(2 * b for b in batches), lr=0.05)
    keys = {"train.local_steps": None, "train.local_epochs": 2, "train.batch_size": 4}
    keys |= {"train.cohort_size": 4, "engine.vectorize": vectorize, "engine.chunk": 4}
    oracle = reference(name)
    if "mu_scaling" in option:

        def oracle(*args, **hyper):
            return references_variance.adabest(*args, batches_per_epoch=batches, **hyper)

    reference_runs.check(alike, tmp_path, name, oracle, hyper, train, keys, start)


@pytest.mark.parametrize("cohort_size", [1, 4])
@pytest.mark.parametrize("name", UNIFORM + SAMPLES)
def test_defaults(data, tmp_path, name, cohort_size):
    """Hyper-parameters and weights that a config leaves out."""
    hyper = HYPER[name][0] if name == "adabest" else {}
    train = replace(PLAIN, weighting="uniform" if name in UNIFORM else "samples")
    keys = {"train.cohort_size": cohort_size, "train.weighting": "auto"}
    check(data, tmp_path, name, hyper, train, keys)


def test_ghbm_of_more_rounds_than_the_run_has(data, tmp_path):
    check(data, tmp_path, "ghbm", {"tau": 40, "beta": 0.9}, PLAIN, PARTICIPATION["uniform"])
