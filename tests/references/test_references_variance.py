"""References of variance reduction and past models, against closed forms and the identities between the algorithms."""

from dataclasses import replace

import numpy as np
import pytest
import reference_problems
from reference_problems import EVERYBODY, PLAIN, SOME, Linear, differ, models_before, same
from references import Train, fedprox
from references_momentum import direction, fedadc, fedavgm
from references_variance import (
    adabest,
    fedcm,
    feddyn,
    fedhbm,
    fedtrip,
    ghbm,
    local_ghbm,
    mime,
    mimelite,
    mimelitemom,
    mimemom,
    scaffold,
)

cohorts = reference_problems.cohorts
constant = reference_problems.constant
logistic = reference_problems.logistic
problem = reference_problems.problem
quadratics = reference_problems.quadratics
start = reference_problems.start
train = reference_problems.train


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_fedcm_is_ghbm_of_tau_one(problem, start, cohorts, constant, alpha):
    ours = fedcm(problem, cohorts, replace(constant, lr=0.05 / alpha), start, alpha=alpha)
    same(ours, ghbm(problem, cohorts, constant, start, tau=1, beta=1 - alpha))
    same(ours, fedadc(problem, cohorts, constant, start, beta_g=1 - alpha))


def test_round_one_of_fedcm_is_alpha_times_smaller(problem, start):
    ours = fedcm(problem, SOME[:1], PLAIN, start, alpha=0.3)
    same(ours, fedavgm(problem, SOME[:1], replace(PLAIN, lr=0.3 * PLAIN.lr), start))


def momentum_sgd(problem, start, lr, rounds, weights, beta, fresh=1.0):
    x, m, path = start, np.zeros_like(start), []
    for _ in range(rounds):
        g = np.average([problem.oracle(i, x)[1] for i in range(5)], axis=0, weights=weights)
        m = beta * m + fresh * g
        x = x - lr * m
        path.append(x)
    return path


def follows(rounds, path):
    for r, x in zip(rounds, path, strict=True):
        np.testing.assert_allclose(r.model, x, atol=1e-12)


@pytest.mark.parametrize("algorithm", [mimemom, mimelitemom])
@pytest.mark.parametrize("dampening", [True, False])
def test_one_step_of_mimemom_is_momentum_sgd(problem, start, constant, algorithm, dampening):
    weights = problem.sizes if constant.weighting == "samples" else None
    expected = momentum_sgd(problem, start, 0.05, 12, weights, 0.9, 0.1 if dampening else 1.0)
    train = replace(constant, steps=1)
    follows(algorithm(problem, EVERYBODY * 12, train, start, beta=0.9, dampening=dampening), expected)


def test_one_step_of_ghbm_is_heavy_ball(problem, start, constant):
    weights = problem.sizes if constant.weighting == "samples" else None
    expected = momentum_sgd(problem, start, 0.05, 12, weights, 0.9)
    follows(ghbm(problem, EVERYBODY * 12, replace(constant, steps=1), start, tau=1, beta=0.9), expected)


@pytest.mark.parametrize("tau", [1, 2, 3, 5])
def test_ghbm_is_a_recursion_of_momenta(problem, start, constant, tau):
    weights = problem.sizes if constant.weighting == "samples" else None
    train, beta = replace(constant, steps=1), 0.9
    x, past, path = start, [np.zeros_like(start)] * tau, []
    for _ in range(12):
        g = np.average([problem.oracle(i, x)[1] for i in range(5)], axis=0, weights=weights)
        past = [*past[1:], beta / tau * sum(past) + g]
        x = x - 0.05 * past[-1]
        path.append(x)
    init = ghbm(problem, EVERYBODY * 12, train, start, tau=tau, beta=beta, warmup="init")
    follows(init, path)
    zero = ghbm(problem, EVERYBODY * 12, train, start, tau=tau, beta=beta)
    if tau == 1:
        same(zero, init)
    else:
        differ(zero, init)
    same(zero[:tau], fedavgm(problem, EVERYBODY * tau, train, start, beta=0.0))


def test_ghbm_spans_exactly_tau_updates(problem, start):
    rounds = ghbm(problem, SOME, PLAIN, start, tau=3)
    sent = models_before(rounds, start)
    for r in range(3):
        assert not rounds[r].server["momentum"].any()
        np.testing.assert_allclose(rounds[3 + r].server["momentum"], (sent[r] - sent[3 + r]) / 3, atol=1e-14)
    same(ghbm(problem, [[1]] * 6, PLAIN, start), ghbm(problem, [[1]] * 6, PLAIN, start, tau=5), 0)


@pytest.mark.parametrize("scale", ["inv_gap", "participation"])
def test_local_ghbm_of_everybody_is_ghbm_of_tau_one(problem, start, train, scale):
    ours = local_ghbm(problem, EVERYBODY * 12, train, start, beta=0.8, scale=scale)
    same(ours, ghbm(problem, EVERYBODY * 12, train, start, tau=1, beta=0.8))


def test_local_ghbm_remembers_what_was_received(problem, start):
    cohorts = [[0, 1], [1, 2], [2, 3], [0, 2]]
    rounds = local_ghbm(problem, cohorts, PLAIN, start)
    sent = models_before(rounds, start)
    np.testing.assert_allclose(rounds[3].clients["momentum"][0], (sent[0] - sent[3]) / 3, atol=1e-14)
    np.testing.assert_allclose(rounds[3].clients["momentum"][2], sent[2] - sent[3], atol=1e-14)
    assert not rounds[2].clients["momentum"][3].any()
    assert set(rounds[-1].clients["anchor"]) == {0, 1, 2, 3}
    share = local_ghbm(problem, cohorts, PLAIN, start, scale="participation")
    sent = models_before(share, start)
    np.testing.assert_allclose(share[3].clients["momentum"][0], 0.4 * (sent[0] - sent[3]), atol=1e-14)


def test_fedhbm_starts_as_fedavg(problem, start):
    cohorts = [[0, 1], [2, 3], [4]]
    expected = fedavgm(problem, cohorts, PLAIN, start, beta=0.0)
    same(fedhbm(problem, cohorts, PLAIN, start), expected)
    shared = fedhbm(problem, cohorts, PLAIN, start, variant="shared")
    differ(shared, expected)
    one = replace(PLAIN, steps=1)
    same(fedhbm(problem, [[1]] * 6, one, start), fedavgm(problem, [[1]] * 6, one, start, beta=0.0))


def test_fedhbm_by_hand():
    problem = Linear((0.0, -1.0, *[0.0] * 8))
    train = replace(PLAIN, steps=2, lr=0.5)
    rounds = fedhbm(problem, [[0], [1], [0]], train, np.array([1.0]), beta=1.0, scale="participation")
    # from y = 2 with a = 1 and s = 0.1 to 2.05, and from there on
    assert rounds[2].loss[0] == pytest.approx((2 + 2.05) / 2, abs=1e-14)
    assert rounds[2].model == pytest.approx(2.05 + 0.05 * 1.05, abs=1e-14)
    gap = fedhbm(problem, [[0], [1], [0]], train, np.array([1.0]), beta=1.0)
    assert gap[2].loss[0] == pytest.approx((2 + 2.25) / 2, abs=1e-14)


def test_shared_anchor_is_the_first_model():
    problem = Linear((0.0, -1.0, 0.0))
    train = replace(PLAIN, steps=1, lr=1.0)
    rounds = fedhbm(problem, [[1], [1], [1], [0]], train, np.array([3.0]), beta=0.5, variant="shared")
    x = rounds[2].model
    np.testing.assert_allclose(rounds[3].model, x + 0.5 / 3 * (x - 3), atol=1e-14)
    # in round one there is nothing to be pushed away from
    assert rounds[0].model == 4


def test_random_anchors_are_the_clients_own():
    problem = Linear((0.0, -1.0, 0.0))
    train = replace(PLAIN, steps=1, lr=1.0)
    hyper = {"beta": 0.5, "variant": "random", "initial": lambda i: np.array([10.0 + i])}
    rounds = fedhbm(problem, [[1], [1], [2], [0], [0]], train, np.array([3.0]), **hyper)
    x = 3 + 1 + 0.5 * (3 - 11)
    assert rounds[0].model == x
    x += 1.0
    assert rounds[1].model == x
    x += 0.5 / 2 * (x - 12)
    assert rounds[2].model == x
    x += 0.5 / 3 * (x - 10)
    np.testing.assert_allclose(rounds[3].model, x, atol=1e-14)
    np.testing.assert_allclose(rounds[4].model, x, atol=1e-14)


def test_random_anchors_may_be_shared(problem, start, cohorts, train):
    shared = fedhbm(problem, cohorts, train, start, variant="shared")
    same(fedhbm(problem, cohorts, train, start, variant="random", initial=lambda _: start), shared, 0)


def fedavg_bias(quadratics, weighting="uniform"):
    train = replace(PLAIN, weighting=weighting)
    final = fedavgm(quadratics, EVERYBODY * 400, train, beta=0.0)[-1].model
    return np.abs(final - quadratics.optimum(weighting)).max()


def some_of_five(rounds):
    rng = np.random.default_rng(1)
    return [sorted(rng.choice(5, 2, replace=False)) for _ in range(rounds)]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_mime_reaches_the_optimum(quadratics, weighting):
    assert fedavg_bias(quadratics, weighting) > 1e-3
    train = replace(PLAIN, weighting=weighting)
    optimum = quadratics.optimum(weighting)
    np.testing.assert_allclose(mime(quadratics, EVERYBODY * 400, train)[-1].model, optimum, atol=1e-12)
    lite = mimelite(quadratics, EVERYBODY * 400, train)[-1].model
    assert np.abs(lite - optimum).max() == pytest.approx(fedavg_bias(quadratics, weighting), abs=1e-12)


def test_mime_freezes_its_momentum_and_cancels_the_clients_gradient(problem, start):
    train = replace(PLAIN, steps=2, server_lr=0.7)
    one, two = mimemom(problem, [[1, 2], [1]], train, start, beta=0.8)
    p = {1: problem.sizes[1], 2: problem.sizes[2]}
    c = sum(p[i] * problem.oracle(i, start)[1] for i in p) / sum(p.values())
    np.testing.assert_allclose(one.server["s"], 0.2 * c, atol=1e-14)
    x = one.model
    g = problem.oracle(1, x)[1]
    y = x - train.lr * (0.2 * g + 0.8 * one.server["s"])
    y = y - train.lr * (0.2 * problem.oracle(1, y)[1] + 0.8 * one.server["s"])
    np.testing.assert_allclose(two.model, x + 0.7 * (y - x), atol=1e-14)
    np.testing.assert_allclose(two.server["s"], 0.2 * g + 0.8 * one.server["s"], atol=1e-14)


@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_keeps_c_at_the_mean_of_its_clients(problem, start, cohorts, train, option):
    for weighting in ("samples", "uniform"):
        n = problem.sizes if weighting == "samples" else None
        for r in scaffold(problem, cohorts, replace(train, weighting=weighting), start, option=option):
            c_i = [r.clients["c"][i] for i in range(5)]
            np.testing.assert_allclose(r.server["c"], np.average(c_i, axis=0, weights=n), atol=1e-12)


def test_one_step_of_scaffold(problem, start, cohorts, constant):
    train = replace(constant, steps=1, server_lr=0.8)
    both = [scaffold(problem, cohorts, train, start, option=option) for option in (1, 2)]
    same(*both)
    if len(cohorts[0]) == 5:
        same(both[0], fedavgm(problem, cohorts, train, start, beta=0.0))


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("partial", [False, True])
def test_scaffold_reaches_the_optimum(quadratics, option, weighting, partial):
    cohorts = some_of_five(2500) if partial else EVERYBODY * 1000
    final = scaffold(quadratics, cohorts, replace(PLAIN, weighting=weighting), option=option)[-1]
    np.testing.assert_allclose(final.model, quadratics.optimum(weighting), atol=1e-12)
    assert fedavg_bias(quadratics, weighting) > 1e-3


@pytest.mark.parametrize("partial", [False, True])
def test_feddyn_of_exact_solutions_reaches_the_optimum(quadratics, partial):
    cohorts = some_of_five(250) if partial else EVERYBODY * 60
    rounds = feddyn(quadratics, cohorts, Train(100, 0.3, weighting="uniform"), alpha=0.8)
    for r, cohort in zip(rounds, cohorts, strict=True):
        for i in cohort:
            np.testing.assert_allclose(r.clients["g"][i], quadratics.oracle(i, r.clients["y"][i])[1], atol=1e-12)
        np.testing.assert_allclose(r.server["h"], np.mean(list(r.clients["g"].values()), axis=0), atol=1e-12)
    np.testing.assert_allclose(rounds[-1].model, quadratics.optimum(), atol=1e-12)
    assert fedavg_bias(quadratics) > 1e-3


def test_h_of_feddyn_is_the_mean_state_without_exact_solutions_too(problem, start, cohorts, train):
    for r in feddyn(problem, cohorts, train, start, alpha=0.3):
        np.testing.assert_allclose(r.server["h"], np.mean(list(r.clients["g"].values()), axis=0), atol=1e-12)
        np.testing.assert_allclose(r.model, r.x_mean - r.server["h"] / 0.3, atol=1e-12)


def test_feddyn_begins_without_state_and_prox(problem, start):
    cohorts, train = SOME[:2], replace(PLAIN, steps=1, weighting="uniform")
    server = feddyn(problem, cohorts, train, start, alpha=0.3)
    g = {i: problem.oracle(i, start)[1] for i in (0, 1)}
    for i in g:
        np.testing.assert_allclose(server[0].clients["y"][i], start - 0.05 * g[i], atol=1e-14)
    # the bookkeeping of the official code: two of five clients have moved by q
    q = -0.05 * (g[0] + g[1])
    np.testing.assert_allclose(server[0].model, start + q / 2 + q / 5, atol=1e-13)
    averaged = feddyn(problem, cohorts, train, start, alpha=0.3, eval="avg_selected")
    np.testing.assert_allclose(averaged[0].model, start + q / 2, atol=1e-13)
    np.testing.assert_allclose(averaged[1].server["x"], server[1].model, atol=0)


def test_corrections_are_clipped_with_the_gradient_and_weight_decay_is_not(problem, start):
    train = Train(1, 0.1, weight_decay=2.0, grad_clip=0.01)
    one, two = feddyn(problem, [[1], [1]], train, start, alpha=0.3)
    x = one.model
    g = problem.oracle(1, x)[1] + 0.3 * (one.x_mean - start)
    expected = x - 0.1 * (0.01 * g / np.linalg.norm(g) + 2.0 * x)
    np.testing.assert_allclose(two.x_mean, expected, atol=1e-13)
    np.testing.assert_allclose(direction(g, x, train), (x - expected) / 0.1, atol=1e-12)


def test_adabest_forgets_with_the_gap(problem, start):
    rounds = adabest(problem, [[0, 1], [1], [1], [0]], PLAIN, start, mu=0.3, beta=0.5)
    first = rounds[0].clients["h"][0]
    x = rounds[2].model
    y = x
    for _ in range(PLAIN.steps):
        y = y - PLAIN.lr * (problem.oracle(0, y)[1] - first)
    np.testing.assert_allclose(rounds[3].x_mean, y, atol=1e-13)
    np.testing.assert_allclose(rounds[3].clients["h"][0], first / 3 + 0.3 * (x - y), atol=1e-13)
    np.testing.assert_allclose(rounds[3].model, y - 0.5 * (rounds[2].x_mean - y), atol=1e-13)
    alone = fedavgm(problem, [[0]], PLAIN, start)[0].model
    np.testing.assert_allclose(first, 0.3 * (start - alone), atol=1e-13)


def test_fedsim_divides_adabests_mu_by_the_batches(problem, start, cohorts):
    ours = adabest(problem, cohorts, PLAIN, start, mu=0.6, beta=0.5, mu_scaling="fedsim", batches_per_epoch=[2] * 5)
    same(ours, adabest(problem, cohorts, PLAIN, start, mu=0.3, beta=0.5))
    differ(ours, adabest(problem, cohorts, PLAIN, start, mu=0.6, beta=0.5))


@pytest.mark.parametrize("xi", [{"xi_scale": 0.0}, {"xi_mode": "const", "xi_const": 0.0}])
def test_fedtrip_without_history_is_fedprox(logistic, cohorts, train, xi):
    start = np.random.default_rng(7).normal(size=logistic.dimension)
    train = replace(train, server_lr=0.8)
    same(fedtrip(logistic, cohorts, train, start, mu=0.7, **xi), fedprox(logistic, cohorts, train, start, mu=0.7))


def test_fedtrip_of_one_client_has_less_prox(logistic):
    start = np.random.default_rng(7).normal(size=logistic.dimension)
    one, two = fedtrip(logistic, [[1], [1]], PLAIN, start, mu=0.8, xi_mode="const", xi_const=0.3)
    same([one], fedprox(logistic, [[1]], PLAIN, start, mu=0.8))
    same([two], fedprox(logistic, [[1]], PLAIN, one.model, mu=0.8 * 0.7))


def test_fedtrip_by_hand():
    """At y = 1 with x = 0.5, wh = 0.2, mu = 0.4 and xi = 0.5 the gradient is 0.04."""
    lr = 0.5 / 0.06
    problem = Linear((0.0, -0.3 / lr))
    train = replace(PLAIN, steps=(2, 1), lr=lr)
    cohorts = [[0], [1], [0]]
    for xi in ({"xi_mode": "const", "xi_const": 0.5}, {"xi_mode": "inverse_gap"}, {"xi_mode": "gap", "xi_scale": 0.25}):
        rounds = fedtrip(problem, cohorts, train, np.array([0.2]), mu=0.4, **xi)
        assert rounds[1].model == pytest.approx(0.5)
        assert rounds[2].loss[0] == pytest.approx((0.5 + 1) / 2)
        assert rounds[2].model == pytest.approx(1 - lr * 0.04)
    # at xi = 1 it is mu (wh - x), wherever y is
    rounds = fedtrip(problem, cohorts, train, np.array([0.2]), mu=0.4, xi_mode="const")
    assert rounds[2].model == pytest.approx(0.5 + 2 * lr * 0.4 * 0.3)


def test_gaps_are_counted_in_rounds(problem, start):
    cohorts = [[0], [1], [2], [0], [0]]
    by_gap = fedtrip(problem, cohorts, PLAIN, start)
    constant = fedtrip(problem, cohorts, PLAIN, start, xi_mode="const", xi_const=1 / 3)
    same(by_gap[:4], constant[:4])
    differ(by_gap, constant, 1e-6)
