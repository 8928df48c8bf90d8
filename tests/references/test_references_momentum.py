"""References of momentum and adaptive servers, against closed forms and the identities between the algorithms."""

from dataclasses import replace

import numpy as np
import pytest
import reference_problems
from reference_problems import EVERYBODY, EVERYTHING, PLAIN, SOME, Linear, differ, models_before, same
from references import Train, fedavg, fednag, fedprox
from references_momentum import (
    domo,
    fastslowmo,
    fedadagrad,
    fedadam,
    fedadc,
    fedavgm,
    fedmom,
    fedyogi,
    slowmo,
)
from references_variance import (
    adabest,
    fedcm,
    feddyn,
    fedhbm,
    fedtrip,
    ghbm,
    local_ghbm,
    mimelite,
    scaffold,
)

cohorts = reference_problems.cohorts
constant = reference_problems.constant
logistic = reference_problems.logistic
problem = reference_problems.problem
start = reference_problems.start
train = reference_problems.train

FEDAVG = [
    (fedavgm, {"beta": 0.0}),
    (fedavgm, {"beta": 0.0, "nesterov": True}),
    (slowmo, {"beta": 0.0, "alpha": 1.0}),
    (fedmom, {"beta": 0.0, "eta": 1.0}),
    (fastslowmo, {"gamma": 0.0, "gamma_a": 0.0, "carry": "y"}),
    (fastslowmo, {"gamma": 0.0, "gamma_a": 0.0, "carry": "velocity"}),
    (domo, {"mu_s": 0.0, "mu_l": 0.0, "beta": 0.0, "alpha": 1.0, "variant": "pre"}),
    (domo, {"mu_s": 0.0, "mu_l": 0.0, "beta": 0.0, "alpha": 1.0, "variant": "step"}),
    (fedadc, {"beta_g": 0.0, "beta_l": 0.0, "alpha": 1.0, "variant": "heavyball"}),
    (fedadc, {"beta_g": 0.0, "beta_l": 0.0, "alpha": 1.0, "variant": "nesterov"}),
    (mimelite, {}),
    (adabest, {"mu": 0.0, "beta": 0.0}),
    (fedcm, {"alpha": 1.0}),
    (fedtrip, {"mu": 0.0}),
    (ghbm, {"tau": 2, "beta": 0.0, "warmup": "zero"}),
    (ghbm, {"tau": 2, "beta": 0.0, "warmup": "init"}),
    (local_ghbm, {"beta": 0.0}),
    (fedhbm, {"beta": 0.0, "variant": "standard"}),
    (fedhbm, {"beta": 0.0, "variant": "shared"}),
]


@pytest.mark.parametrize(("algorithm", "hyper"), FEDAVG, ids=lambda v: getattr(v, "__name__", None))
def test_without_its_terms_an_algorithm_is_fedavg(logistic, cohorts, train, algorithm, hyper):
    start = np.random.default_rng(7).normal(size=logistic.dimension)
    same(algorithm(logistic, cohorts, train, start, **hyper), fedavg(logistic, cohorts, train, start))


@pytest.mark.parametrize("algorithm", [fedavgm, mimelite, fedcm, fedtrip, local_ghbm, fedhbm, adabest])
def test_one_step_of_everybody_is_gradient_descent(problem, start, constant, algorithm):
    plain = {"fedavgm": {"beta": 0.0}, "fedcm": {"alpha": 1.0}, "adabest": {"mu": 0.0, "beta": 0.0}}
    hyper = plain.get(algorithm.__name__, {})
    (r,) = algorithm(problem, EVERYBODY, replace(constant, steps=1), start, **hyper)
    n = problem.sizes if constant.weighting == "samples" else [1] * 5
    g = np.average([problem.oracle(i, start)[1] for i in range(5)], axis=0, weights=n)
    np.testing.assert_allclose(r.model, start - 0.05 * g, atol=1e-14)


def test_slowmo_is_fedavgm_while_the_lr_is_constant(problem, start, cohorts, constant):
    same(slowmo(problem, cohorts, constant, start, beta=0.6), fedavgm(problem, cohorts, constant, start, beta=0.6))
    scaled = replace(constant, server_lr=0.7)
    same(
        slowmo(problem, cohorts, constant, start, beta=0.6, alpha=0.7),
        fedavgm(problem, cohorts, scaled, start, beta=0.6),
    )


def test_slowmo_rescales_its_momentum_with_the_lr(problem, start, cohorts):
    train = replace(PLAIN, lr_decay=0.5)
    rounds = slowmo(problem, cohorts, train, start, beta=0.6)
    v = 0.0
    for r, x in zip(rounds, models_before(rounds, start), strict=True):
        v = 0.6 * v * 0.5 + x - r.x_mean
        np.testing.assert_allclose(r.model, x - v, atol=1e-13)
    differ(rounds, fedavgm(problem, cohorts, train, start, beta=0.6))


def test_client_momentum_by_other_names(logistic, cohorts, train):
    start = np.random.default_rng(7).normal(size=logistic.dimension)
    train = replace(train, momentum=0.6)
    expected = fedavg(logistic, cohorts, train, start)
    same(domo(logistic, cohorts, train, start, mu_s=0.0, mu_l=0.6, beta=0.0), expected)
    off = {fedavgm: {"beta": 0.0}, slowmo: {"beta": 0.0}, fedtrip: {"mu": 0.0}, ghbm: {"tau": 2, "beta": 0.0}}
    for algorithm, hyper in (off | {local_ghbm: {"beta": 0.0}, fedhbm: {"beta": 0.0}}).items():
        same(algorithm(logistic, cohorts, train, start, **hyper), expected)
    prox = fedprox(logistic, cohorts, train, start, mu=0.7)
    same(fedtrip(logistic, cohorts, train, start, mu=0.7, xi_scale=0.0), prox)
    differ(expected, fedavg(logistic, cohorts, replace(train, momentum=0.0), start))
    differ(expected, prox)


def test_corrections_and_decay_go_through_the_buffer():
    problem = Linear((0.0, -3.0))
    train = Train(2, 1.0, weight_decay=0.5, grad_clip=2.0, momentum=0.25)
    # from 1 with gradient -3, clipped to -2, and decay
    b = -2 + 0.5 * 1
    y = 1 - b
    by_hand = y - (0.25 * b - 2 + 0.5 * y)
    assert fedavgm(problem, [[1]], train, np.array([1.0]), beta=0.0)[0].model == by_hand
    # the second step has a proximal force of 1.5, which clipping leaves as it is
    by_hand = y - (0.25 * b - 3 + 1.5 + 0.5 * y)
    assert fedtrip(problem, [[1]], train, np.array([1.0]), mu=1.0)[0].model == by_hand


@pytest.mark.parametrize("buffer", ["maintain", "average"])
def test_slowmo_of_one_client_may_go_on_as_if_there_were_no_rounds(problem, start, buffer):
    train = Train(3, 0.05, weight_decay=0.05, momentum=0.8)
    rounds = slowmo(problem, [[1]] * 4, train, start, beta=0.0, buffer=buffer)
    whole = slowmo(problem, [[1]], replace(train, steps=12), start, beta=0.0)
    np.testing.assert_allclose(rounds[-1].model, whole[0].model, atol=1e-13)
    reset = slowmo(problem, [[1]] * 4, train, start, beta=0.0, buffer="reset")
    same(reset[:1], rounds[:1], 0)
    differ(reset, rounds)


def after(problem, i, x, b, train):
    for _ in range(train.steps):
        b = train.momentum * b + problem.oracle(i, x)[1]
        x = x - train.lr * b
    return x, b


def test_what_slowmo_keeps_of_the_buffers(problem, start):
    cohorts = [[0, 1], [1, 2], [0, 2]]
    train = replace(PLAIN, momentum=0.8)
    none = np.zeros_like(start)
    p = {i: n / sum(problem.sizes[:2]) for i, n in enumerate(problem.sizes[:2])}
    first = {i: after(problem, i, start, none, train) for i in (0, 1)}

    one, two, three = slowmo(problem, cohorts, train, start, buffer="maintain")
    second = {i: after(problem, i, one.model, b, train) for i, b in ((1, first[1][1]), (2, none))}
    third = {i: after(problem, i, two.model, b, train) for i, b in ((0, first[0][1]), (2, second[2][1]))}
    for i, (_, b) in (second | third).items():
        np.testing.assert_allclose(three.clients["b"][i], b, atol=1e-12)
    n = [problem.sizes[i] for i in (0, 2)]
    np.testing.assert_allclose(three.x_mean, np.average([third[0][0], third[2][0]], axis=0, weights=n), atol=1e-12)

    one, two, _ = slowmo(problem, cohorts, train, start, buffer="average")
    mean = p[0] * first[0][1] + p[1] * first[1][1]
    np.testing.assert_allclose(one.server["b"], mean, atol=1e-12)
    for i in (1, 2):
        np.testing.assert_allclose(two.clients["b"][i], after(problem, i, one.model, mean, train)[1], atol=1e-12)

    ways = [slowmo(problem, cohorts, train, start, buffer=b) for b in ("reset", "maintain", "average")]
    for one, other in zip(ways, ways[1:] + ways[:1], strict=True):
        differ(one, other)
    plain = [slowmo(problem, cohorts, PLAIN, start, buffer=b) for b in ("reset", "maintain", "average")]
    same(plain[0], plain[1], 0)
    same(plain[0], plain[2], 0)


def test_fedmom_by_other_names(problem, start, cohorts, train):
    ours = fedmom(problem, cohorts, train, start, beta=0.5)
    same(ours, fedavgm(problem, cohorts, train, start, beta=0.5, nesterov=True))
    same(ours, adabest(problem, cohorts, train, start, mu=0.0, beta=0.5))
    same(ours, fastslowmo(problem, cohorts, train, start, gamma=0.0, gamma_a=0.5))
    differ(ours, fedavgm(problem, cohorts, train, start, beta=0.5))


def test_fedmom_eta_scales_the_pseudo_gradient(problem, start):
    eta, beta = 0.6, 0.5
    one, two = fedmom(problem, EVERYBODY * 2, PLAIN, start, beta=beta, eta=eta)
    v1 = start - eta * (start - one.x_mean)
    np.testing.assert_allclose(one.model, v1 + beta * (v1 - start), atol=1e-14)
    v2 = one.model - eta * (one.model - two.x_mean)
    np.testing.assert_allclose(two.model, v2 + beta * (v2 - v1), atol=1e-14)


@pytest.mark.parametrize("steps", [1, 4])
def test_fastslowmo_without_the_server_is_fednag(logistic, cohorts, train, steps):
    start = np.random.default_rng(7).normal(size=logistic.dimension)
    train = replace(train, steps=steps)
    expected = fednag(logistic, cohorts, train, start, gamma=0.6)
    same(fastslowmo(logistic, cohorts, train, start, gamma=0.6, gamma_a=0.0), expected)
    if train.lr_decay == 1:
        velocity = fastslowmo(logistic, cohorts, train, start, gamma=0.6, gamma_a=0.0, carry="velocity")
        same(velocity, expected)


def test_what_fastslowmo_carries_matters(problem, start, cohorts):
    one, other = (fastslowmo(problem, cohorts, PLAIN, start, carry=carry) for carry in ("y", "velocity"))
    same(one[:1], other[:1])
    differ(one, other)


@pytest.mark.parametrize("variant", ["pre", "step"])
def test_domo_without_local_momentum_is_fedavgm(problem, start, cohorts, constant, variant):
    ours = domo(problem, cohorts, constant, start, mu_s=0.7, mu_l=0.0, beta=0.0, alpha=0.8, variant=variant)
    same(ours, fedavgm(problem, cohorts, replace(constant, server_lr=0.8), start, beta=0.7))


@pytest.mark.parametrize("variant", ["pre", "step"])
def test_domo_counts_the_fused_momentum_once(problem, start, cohorts, variant):
    mu_s, beta, J = 0.7, 0.8, PLAIN.steps
    rounds = domo(problem, cohorts, PLAIN, start, mu_s=mu_s, mu_l=0.6, beta=beta, variant=variant)
    m = np.zeros_like(start)
    for r, x in zip(rounds, models_before(rounds, start), strict=True):
        m = mu_s * m + (x - beta * PLAIN.lr * J * m - r.x_mean) / (PLAIN.lr * J)
        np.testing.assert_allclose(r.server["m"], m, atol=1e-12)
        np.testing.assert_allclose(r.model, x - PLAIN.lr * J * m, atol=1e-12)


def test_domo_variants_differ_even_at_one_step(problem, start):
    train = replace(PLAIN, steps=1)
    pre, step = (domo(problem, EVERYBODY * 12, train, start, mu_s=0.5, variant=v) for v in ("pre", "step"))
    same(pre[:1], step[:1])
    differ(pre, step)


def test_domo_local_buffer_is_heavy_ball_and_reset(problem, start):
    train = replace(PLAIN, steps=2)
    (r,) = domo(problem, [[1]], train, start, mu_s=0.5, mu_l=0.6)
    g1 = problem.oracle(1, start)[1]
    g2 = problem.oracle(1, start - train.lr * g1)[1]
    np.testing.assert_allclose(r.model, start - train.lr * (g1 + 0.6 * g1 + g2), atol=1e-14)
    again = domo(problem, [[1], [1]], train, start, mu_s=0.0, mu_l=0.6, beta=0.0)[1]
    same([again], domo(problem, [[1]], train, r.model, mu_l=0.6))


@pytest.mark.parametrize("train", [PLAIN, replace(EVERYTHING, lr_decay=1.0)])
def test_fedadc_with_equal_betas_is_ghbm_of_tau_one(problem, start, cohorts, train):
    ours = fedadc(problem, cohorts, train, start, beta_g=0.7, beta_l=0.7)
    same(ours, ghbm(problem, cohorts, train, start, tau=1, beta=0.7))
    same(ours, fedadc(problem, cohorts, train, start, beta_g=0.7), 0)


@pytest.mark.parametrize("variant", ["heavyball", "nesterov"])
def test_fedadc_without_local_momentum_is_fedavgm(problem, start, cohorts, constant, variant):
    ours = fedadc(problem, cohorts, constant, start, beta_g=0.7, beta_l=0.0, alpha=0.8, variant=variant)
    same(ours, fedavgm(problem, cohorts, replace(constant, server_lr=0.8), start, beta=0.7))


def test_fedadc_nesterov_looks_ahead(problem, start):
    train = replace(PLAIN, steps=2)
    one, two = fedadc(problem, [[1], [1]], train, start, beta_g=0.9, beta_l=0.6, variant="nesterov")
    y = one.model
    for _ in range(2):
        z = y - train.lr * 0.6 * one.server["m"] / 2
        y = z - train.lr * problem.oracle(1, z)[1]
    np.testing.assert_allclose(two.x_mean, y, atol=1e-14)
    heavy = fedadc(problem, EVERYBODY * 12, PLAIN, start, beta_g=0.7)
    differ(heavy, fedadc(problem, EVERYBODY * 12, PLAIN, start, beta_g=0.7, variant="nesterov"))


@pytest.mark.parametrize("algorithm", [fedadam, fedyogi])
def test_a_frozen_second_moment_is_fedavgm(problem, start, cohorts, constant, algorithm):
    tau, beta = 0.05, 0.8
    ours = algorithm(problem, cohorts, replace(constant, server_lr=0.3), start, beta1=beta, beta2=1.0, tau=tau)
    scaled = replace(constant, server_lr=(1 - beta) * 0.3 / (2 * tau))
    same(ours, fedavgm(problem, cohorts, scaled, start, beta=beta))


@pytest.mark.parametrize("algorithm", [fedadam, fedyogi, fedadagrad])
def test_adaptive_server_by_hand(problem, start, algorithm):
    eta, tau, beta1 = 0.1, 0.02, 0.6
    beta2 = {} if algorithm is fedadagrad else {"beta2": 0.7}
    rounds = algorithm(problem, SOME, replace(PLAIN, server_lr=eta), start, beta1=beta1, tau=tau, **beta2)
    m, v = np.zeros_like(start), np.full_like(start, tau**2)
    for r, x in zip(rounds, models_before(rounds, start), strict=True):
        delta = r.x_mean - x
        m = beta1 * m + (1 - beta1) * delta
        for k, d in enumerate(delta):
            if algorithm is fedadagrad:
                v[k] += d * d
            elif algorithm is fedadam:
                v[k] = 0.7 * v[k] + 0.3 * d * d
            else:
                v[k] += 0.3 * d * d if d * d > v[k] else -0.3 * d * d
        np.testing.assert_allclose(r.server["v"], v, atol=1e-15)
        np.testing.assert_allclose(r.model, x + eta * m / (v**0.5 + tau), atol=1e-13)


def test_an_adaptive_server_without_memory_takes_unit_steps(problem, start):
    train = replace(PLAIN, server_lr=0.1)
    (r,) = fedadam(problem, SOME[:1], train, start, beta1=0.0, beta2=0.0, tau=1e-12)
    np.testing.assert_allclose(np.abs(r.model - start), 0.1, rtol=1e-6)


def test_uneven_steps_and_lr_decay_are_divided_out_per_client():
    """Constant gradients come back whatever the J_i and the lr of the round are."""
    problem = Linear((1.0, -2.0, 4.0))
    train = Train((1, 5, 2), 0.1, lr_decay=0.5)
    cohorts = [[0, 1, 2], [0, 2], [1]]
    for option in (1, 2):
        for r in scaffold(problem, cohorts, train, option=option):
            np.testing.assert_allclose([r.clients["c"][i][0] for i in range(3)], [1, -2, 4], atol=1e-13)
            np.testing.assert_allclose(r.server["c"], (1 - 4 + 12) / 6, atol=1e-13)
    expected = [9 / 6, 13 / 4, -2]
    for r, slope in zip(fedcm(problem, cohorts, train, alpha=1.0), expected, strict=True):
        np.testing.assert_allclose(r.server["delta"], slope, atol=1e-13)
    for variant in ("pre", "step"):
        rounds = domo(problem, cohorts, train, mu_s=0.0, mu_l=0.0, variant=variant)
        for r, slope in zip(rounds, expected, strict=True):
            np.testing.assert_allclose(r.server["m"], slope, atol=1e-13)
        # mean J of 18 samples: (1 + 2 * 5 + 3 * 2) / 6
        np.testing.assert_allclose(rounds[0].model, -0.1 * 17 / 6 * 1.5, atol=1e-13)


@pytest.mark.parametrize("steps", [(1, 1, 1), (2, 1, 3), (7, 1, 5)])
@pytest.mark.parametrize(
    ("algorithm", "hyper"), [(ghbm, {"tau": 1}), (local_ghbm, {}), (fedadc, {}), (fedadc, {"variant": "nesterov"})]
)
def test_momentum_of_a_round_does_not_grow_with_the_steps(algorithm, hyper, steps):
    """Clients without a gradient are carried 0.9 of the way that the model went in round one, and no further."""
    problem = Linear((0.0, -1.0, 0.0))
    cohorts = [[0, 2], [1], [0, 2]] if algorithm is local_ghbm else [[1], [0, 2]]
    hyper = hyper | ({"scale": "participation"} if algorithm is local_ghbm else {})
    final = algorithm(problem, cohorts, Train(steps, 0.1), **hyper)[-1].x_mean
    np.testing.assert_allclose(final, 0.1 + 0.09 * (2 / 3 if algorithm is local_ghbm else 1), atol=1e-13)


@pytest.mark.parametrize(
    ("algorithm", "hyper"),
    [
        (slowmo, {"buffer": "keep"}),
        (fastslowmo, {"carry": "x"}),
        (domo, {"variant": "post"}),
        (fedadc, {"variant": "nag"}),
        (scaffold, {"option": 3}),
        (feddyn, {"eval": "all"}),
        (adabest, {"mu": 1.0, "beta": 0.0, "mu_scaling": "code"}),
        (fedtrip, {"xi_mode": "none"}),
        (ghbm, {"warmup": "none"}),
        (local_ghbm, {"scale": "gap"}),
        (fedhbm, {"variant": "drawn"}),
    ],
)
def test_unknown_options_are_refused(problem, algorithm, hyper):
    with pytest.raises(ValueError, match=f"^{list(hyper.values())[-1]}$"):
        algorithm(problem, SOME, PLAIN, **hyper)
