"""Momentum, variance reduction, drift correction and past models in fedray, against their float64 references."""

from dataclasses import replace
from functools import partial
from math import ceil

import pytest
import reference_runs
import references
import references_momentum
import references_rules
import references_variance
from pairs import alternately, in_turn, pairwise
from reference_runs import EVERYTHING, PARTICIPATION, PLAIN, SIZES, flat, make_start
from small_runs import needs_compiler

from fedray.config import load
from fedray.experiment.resolve import resolve

ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad")
# the others' server rules have no eta_g
SERVER_LR = (
    *("fedavgm", "mime", "mimemom", "mimelite", "mimelitemom"),
    *("scaffold", "scaffold_m", "fedcm", "fedtrip", "local_ghbm", "fedhbm", "fedavg", "fedprox"),
    *("fednova", "fedsam", "qfedavg"),
)
# compared over participation and weights in test_algorithms_against_references.py
BASE = {"fedavg": ({}, {}), "fedprox": ({"mu": 0.1}, {"mu": 1.5}), "fednag": ({"gamma": 0.5}, {"gamma": 0.8})}
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
    "scaffold_m": ({"beta": 0.1}, {"beta": 0.6}),
    "fedacg": ({"lam": 0.85, "beta": 0.01}, {"lam": 0.5, "beta": 0.3}),
    "fedtrip": ({"mu": 0.4}, {"mu": 1.0, "xi_scale": 0.5}),
    "ghbm": ({"tau": 1, "beta": 0.9}, {"tau": 3, "beta": 0.7}),
    "local_ghbm": ({"beta": 0.9}, {"beta": 0.5}),
    "fedhbm": ({"beta": 0.5}, {"beta": 0.9}),
    "fedadam": ({"beta1": 0.9, "beta2": 0.99, "tau": 0.01}, {"beta1": 0.5, "beta2": 0.9, "tau": 0.1}),
    "fedyogi": ({"beta1": 0.9, "beta2": 0.99, "tau": 0.01}, {"beta1": 0.5, "beta2": 0.9, "tau": 0.1}),
    "fednova": ({}, {}),
    "fedexp": ({"eps": 0.01}, {"eps": 0.1}),
    "fedsam": ({"rho": 0.05}, {"rho": 0.4}),
    "qfedavg": ({"q": 1.0}, {"q": 0.3}),
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
    "fedexp": [{"average_last": True}, {"average_last": False}],
    "fedsam": [{"adaptive": False}, {"adaptive": True}],
    "ghbm": [{"warmup": "zero"}, {"warmup": "init"}],
    "local_ghbm": [{"scale": "inv_gap"}, {"scale": "participation"}],
    "fedhbm": [{"variant": v, "scale": s} for v in ("standard", "shared") for s in ("inv_gap", "participation")],
}
VARIANTS = [(name, option) for name in HYPER for option in OPTIONS.get(name, [{}])]
RANDOM = [("fedhbm", {"variant": "random", "scale": s}) for s in ("inv_gap", "participation")]
ALL = [*((name, {}) for name in BASE), *VARIANTS, *RANDOM]
MOMENTUM = [("slowmo", {"buffer": b}) for b in ("reset", "maintain", "average")] + [
    (name, option)
    for name, option in ALL
    if name
    in (
        "fedavg",
        "fedprox",
        "fedavgm",
        "fedtrip",
        "ghbm",
        "local_ghbm",
        "fedhbm",
        "fednova",
        "fedexp",
        "fedsam",
        "qfedavg",
    )
]
EITHER = [*((a, 0.0) for a in ALL), *((a, 0.9) for a in MOMENTUM)]
# where ALGORITHMS.md says which weights a paper has
UNIFORM = (
    "mime",
    "mimemom",
    "mimelite",
    "mimelitemom",
    "scaffold",
    "feddyn",
    "adabest",
    "fedcm",
    "scaffold_m",
    "fedacg",
    "qfedavg",
)
SAMPLES = ("fedavgm", "fedmom", "fedtrip", "ghbm", "local_ghbm", "fedhbm", "fednova", "fedexp", "fedsam")


@pytest.fixture(scope="module")
def start(data, tmp_path_factory):
    return make_start(data, tmp_path_factory.mktemp("start"))


def reference(name):
    modules = (references, references_momentum, references_variance, references_rules)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def from_drawn_models(output, of):
    """A reference with the initial models that the run in the folder has drawn."""

    def oracle(problem, cohorts, train, start, **hyper):
        (config,) = output.glob("*/config.yaml")
        experiment, _ = resolve(load(config))

        def drawn(client=None):
            return flat([p.detach() for p in experiment.build_model(client).parameters()])

        assert len({drawn(i).tobytes() for i in [None, *range(len(SIZES))]}) == len(SIZES) + 1
        start = drawn() if start is None else start
        return of(problem, cohorts, train, start, initial=drawn, **hyper)

    return oracle


def check(data, output, name, hyper, train, keys, start=None):
    oracle = reference(name)
    if hyper.get("variant") == "random":
        oracle, keys = from_drawn_models(output, oracle), keys | {"model.init": "default"}
    return reference_runs.check(data, output, name, oracle, hyper, train, keys, start)


def settings(name, option, everything, weighting):
    train = EVERYTHING if everything else PLAIN
    server_lr = 1.0
    if name in ADAPTIVE:
        server_lr = 0.2 if everything else 0.05
    elif name in SERVER_LR and everything:
        server_lr = 0.6
    return (HYPER | BASE)[name][everything] | option, replace(train, weighting=weighting, server_lr=server_lr)


def label(value):
    if isinstance(value, tuple) and isinstance(value[0], tuple):
        return "-".join(label(each) or str(each) for each in value)
    if isinstance(value, tuple):
        name, option = value
        return "-".join([name, *(f"{k}_{v}" for k, v in option.items())])
    return None


@pytest.mark.parametrize(
    ("algorithm", "everything", "participation", "weighting"),
    pairwise(VARIANTS + RANDOM, (False, True), list(PARTICIPATION), ("samples", "uniform")),
    ids=label,
)
def test_against_reference(data, start, tmp_path, algorithm, everything, participation, weighting):
    """Plain: from zeros. Everything: other hyper-parameters, a given start, decay, clipping and server lr."""
    name, option = algorithm
    hyper, train = settings(name, option, everything, weighting)
    check(data, tmp_path, name, hyper, train, PARTICIPATION[participation], start if everything else None)


@pytest.mark.parametrize(
    ("algorithm", "everything", "participation"), pairwise(MOMENTUM, (False, True), list(PARTICIPATION)), ids=label
)
def test_client_momentum(data, start, tmp_path, algorithm, everything, participation):
    """The corrections go through the local buffer, which SlowMo alone may keep from one round to the next."""
    name, option = algorithm
    hyper, train = settings(name, option, everything, "uniform" if everything else "samples")
    train = replace(train, momentum=0.9 if everything else 0.5)
    check(data, tmp_path, name, hyper, train, PARTICIPATION[participation], start if everything else None)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=[pytest.mark.slow, needs_compiler])], ids=["eager", "compiled"]
)
@pytest.mark.parametrize(("either", "vectorize"), alternately(EITHER, (False, True), 0, 2), ids=label)
def test_clients_with_different_numbers_of_steps(alike, start, tmp_path, either, vectorize, compiled):
    """Two epochs in batches of four, in chunks of mixed J_i."""
    (name, option), momentum = either
    hyper, train = settings(name, option, True, "samples")
    train = replace(train, steps=tuple(2 * ceil(n / 4) for n in SIZES), lr=0.05, momentum=momentum)
    keys = {"train.local_steps": None, "train.local_epochs": 2, "train.batch_size": 4}
    keys |= {"train.cohort_size": 4, "engine.vectorize": vectorize, "engine.chunk": 4, "engine.compile": compiled}
    check(alike, tmp_path, name, hyper, train, keys, start)


@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vmap"])
def test_fedsims_mu(alike, start, tmp_path, vectorize):
    """AdaBest's, which is divided by a client's batches per epoch; steps that are no whole epochs don't change it."""
    batches = [ceil(n / 4) for n in SIZES]

    def oracle(*args, **hyper):
        return references_variance.adabest(*args, batches_per_epoch=batches, **hyper)

    hyper, train = settings("adabest", {"mu_scaling": "fedsim"}, True, "samples")
    train = replace(train, lr=0.05)
    keys = {"train.batch_size": 4, "train.cohort_size": 4, "engine.vectorize": vectorize, "engine.chunk": 4}
    reference_runs.check(alike, tmp_path / "steps", "adabest", oracle, hyper, train, keys, start)
    train = replace(train, steps=tuple(2 * b for b in batches))
    keys |= {"train.local_steps": None, "train.local_epochs": 2}
    reference_runs.check(alike, tmp_path / "epochs", "adabest", oracle, hyper, train, keys, start)


@pytest.mark.parametrize(("algorithm", "epochs"), alternately(ALL, (None, 2), 0, 3), ids=label)
def test_batches_larger_than_the_clients(data, start, tmp_path, algorithm, epochs):
    name, option = algorithm
    hyper, train = settings(name, option, True, "samples")
    keys = {"train.batch_size": 32, "train.cohort_size": 4}
    if epochs:
        train = replace(train, steps=epochs)
        keys |= {"train.local_steps": None, "train.local_epochs": epochs}
    check(data, tmp_path, name, hyper, train, keys, start)


@pytest.mark.parametrize(("algorithm", "vectorize"), alternately(ALL, (False, True), 1, 3), ids=label)
def test_clients_of_one_sample(single, start, tmp_path, algorithm, vectorize):
    name, option = algorithm
    hyper, train = settings(name, option, True, "samples")
    keys = {"train.batch_size": 4, "train.cohort_size": 4, "engine.vectorize": vectorize, "engine.chunk": 4}
    check(single, tmp_path, name, hyper, train, keys, start)


@pytest.mark.parametrize("either", in_turn(EITHER, 1, 2), ids=label)
def test_one_client_a_round(data, start, tmp_path, either):
    (name, option), momentum = either
    hyper, train = settings(name, option, True, "samples")
    train = replace(train, momentum=momentum)
    cohorts, _ = check(data, tmp_path, name, hyper, train, {"train.cohort_size": 1}, start)
    # among them the one with one sample
    assert [SIZES.index(1)] in cohorts


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


@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vmap"])
@pytest.mark.parametrize(
    ("everything", "first", "participation"),
    pairwise((False, True), ("initial", "own_initial"), list(PARTICIPATION)),
    ids=label,
)
def test_fedtrip_as_its_authors_ran_it(alike, tmp_path, everything, first, participation, vectorize):
    """From an initial model, with mu by the epochs, and with the momentum of the client's last participation."""
    hyper, train = settings("fedtrip", {}, everything, "samples")
    train = replace(train, steps=tuple(2 * ceil(n / 4) for n in SIZES), lr=0.05, momentum=0.9)
    keys = {"train.local_steps": None, "train.local_epochs": 2, "train.batch_size": 4, "model.init": "default"}
    keys |= {"train.momentum_reset": "never", "algorithm.first": first, "algorithm.mu_per": "epoch"}
    keys |= {"engine.vectorize": vectorize, "engine.chunk": 4, **PARTICIPATION[participation]}
    of = partial(references_variance.fedtrip, epochs=2, momentum_is_kept=True, own_initial=first == "own_initial")
    reference_runs.check(alike, tmp_path, "fedtrip", from_drawn_models(tmp_path, of), hyper, train, keys)


def test_fedavg_with_momentum_that_is_kept(data, start, tmp_path):
    train = replace(EVERYTHING, momentum=0.8)
    keys = PARTICIPATION["uniform"] | {"train.momentum_reset": "never"}
    oracle = partial(references_variance.fedtrip, mu=0.0, momentum_is_kept=True)
    reference_runs.check(data, tmp_path, "fedavg", oracle, {}, train, keys, start)


@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vmap"])
@pytest.mark.parametrize(("name", "hyper"), [("fedavg", {}), ("fedprox", {"mu": 0.7, "anchor": "epoch"})])
def test_what_begins_anew_in_each_epoch(alike, start, tmp_path, name, hyper, vectorize):
    batches = [ceil(n / 4) for n in SIZES]

    def oracle(*args, mu=0.0, **_):
        return references_momentum.anew_in_epochs(*args, mu=mu, batches_per_epoch=batches)

    train = replace(EVERYTHING, steps=tuple(3 * b for b in batches), lr=0.05, momentum=0.9)
    keys = {"train.local_steps": None, "train.local_epochs": 3, "train.batch_size": 4, "train.cohort_size": 4}
    keys |= {"train.momentum_reset": "epoch", "engine.vectorize": vectorize, "engine.chunk": 4}
    reference_runs.check(alike, tmp_path, name, oracle, hyper, train, keys, start)
