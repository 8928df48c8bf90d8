"""Algorithms that use past models pull or push as their papers say, and without a past they are simpler algorithms."""

import numpy as np
import pytest
import traced_runs
from standing_clients import made, padded, standing
from traced_runs import (
    EVEN,
    FULL,
    LR,
    OBJECTIVES,
    ONE_STEP,
    ROUNDS,
    TOLERANCE,
    UNEVEN,
    Problem,
    descent,
    differ,
    make_logistic,
    make_quadratics,
    off,
    same,
)

anyhow, logistic, quadratics, run = traced_runs.anyhow, traced_runs.logistic, traced_runs.quadratics, traced_runs.run


@pytest.mark.parametrize("settings", [ONE_STEP, EVEN | {"train.local_steps": 1}], ids=["full", "partial"])
def test_one_step_of_fedprox_is_fedavg_whatever_mu(run, logistic, settings):
    fedavg = run(logistic, settings, "fedavg")
    for mu in (0.01, 1.0, 50.0):
        same(run(logistic, settings, "fedprox", mu=mu), fedavg)
    two = settings | {"train.local_steps": 2}
    differ(run(logistic, two, "fedprox", mu=1.0), run(logistic, two, "fedavg"))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("none", [{"xi_scale": 0.0}, {"xi_mode": "const", "xi_const": 0.0}], ids=["scale", "const"])
def test_fedtrip_without_history_is_fedprox(run, logistic, anyhow, none, momentum):
    settings = anyhow | {"train.momentum": momentum}
    fedprox = run(logistic, settings, "fedprox", mu=1.0)
    same(run(logistic, settings, "fedtrip", mu=1.0, **none), fedprox)
    differ(run(logistic, settings, "fedtrip", mu=1.0), fedprox)


def test_fedtrip_of_one_client_is_fedprox_with_less_mu(run):
    """Its own last model is the global one: the pull is mu (1 - xi), after a first round with all of mu."""
    problem = make_logistic((11,))
    fedtrip = run(problem, FULL, "fedtrip", mu=1.0, xi_mode="const", xi_const=0.4)
    first = run(problem, FULL | {"run.rounds": 1}, "fedprox", mu=1.0)
    assert off(fedtrip.models[1], first.models[1]) <= TOLERANCE
    later = Problem(problem.source, problem.at(fedtrip.models[1]).float(), problem.loss)
    fedprox = run(later, FULL | {"run.rounds": ROUNDS - 1}, "fedprox", mu=0.6)
    same(fedtrip.models[1:], fedprox)


def test_fedtrip_of_everybody_pulls_the_same_at_every_step(run, quadratics):
    """Every gap is 1, so that xi = 1 from round 2 on: mu (w_i - x), wherever y is."""
    traces = [
        run(quadratics, FULL, "fedtrip", mu=0.8, xi_mode=mode, xi_const=1.0) for mode in ("inverse_gap", "gap", "const")
    ]
    p = quadratics.sizes / quadratics.sizes.sum()
    for fedtrip in traces:
        path = [quadratics.start, fedtrip.models[1]]
        for x, states in zip(fedtrip.models[1:-1], fedtrip.states, strict=False):
            ys = [quadratics.local_sgd(i, x, 4, pull=0.8 * (states[i]["w"] - x)) for i in range(5)]
            path.append(p @ np.array(ys))
        same(fedtrip, path)


@pytest.mark.parametrize("weighting", OBJECTIVES)
def test_one_step_of_ghbm_is_heavy_ball(run, logistic, weighting):
    settings = ONE_STEP | {"train.weighting": weighting}
    same(run(logistic, settings, "ghbm", tau=1, beta=0.8), descent(logistic, weighting, momentum=0.8))


@pytest.mark.parametrize("tau", [1, 2, 3, 5])
def test_ghbm_is_a_recursion_of_momenta(run, logistic, tau):
    """m^t = (beta / tau) sum_{k=1..tau} m^{t-k} + g^t, from zeros; exact if the past before x^1 is x^1."""
    beta, p = 0.9, logistic.sizes / logistic.sizes.sum()
    x, momenta, path = logistic.start, [0.0] * tau, [logistic.start]
    for _ in range(10):
        g = sum(p[i] * logistic.gradient(i, x) for i in range(5))
        momenta.append(beta / tau * sum(momenta[-tau:]) + g)
        x = x - LR * momenta[-1]
        path.append(x)
    settings = ONE_STEP | {"run.rounds": 10}
    init = run(logistic, settings, "ghbm", tau=tau, beta=beta, warmup="init")
    same(init, path)
    zero = run(logistic, settings, "ghbm", tau=tau, beta=beta, warmup="zero")
    if tau == 1:
        same(zero, init)
    else:
        differ(zero, init)


@pytest.mark.parametrize("scale", ["inv_gap", "participation"])
@pytest.mark.parametrize("settings", [FULL, {"train.batch_size": 4, "train.local_epochs": 2}], ids=["even", "uneven"])
def test_local_ghbm_of_everybody_is_ghbm_of_tau_one(run, logistic, settings, scale):
    ghbm = run(logistic, settings, "ghbm", tau=1, beta=0.8, warmup="zero")
    same(run(logistic, settings, "local_ghbm", beta=0.8, scale=scale), ghbm)
    differ(ghbm, run(logistic, settings, "fedavg"))


def test_anchors_of_local_ghbm_are_what_clients_received_last(run, logistic):
    """A client that was never sampled has none."""
    local = run(logistic, UNEVEN, "local_ghbm")
    last = {}
    for r, cohort in enumerate(local.cohorts):
        last |= dict.fromkeys(cohort, r + 1)
        assert local.last[r] == last
        assert set(local.past[r]) == set(last.values())
        for number, anchor in local.past[r].items():
            np.testing.assert_array_equal(anchor, local.models[number - 1])
    assert len(local.last[0]) == 2


CYCLIC = FULL | {"train.sampling": "cyclic", "train.cohort_size": 2}


@pytest.mark.parametrize("scale", ["inv_gap", "participation"])
def test_second_participation_in_local_ghbm_after_a_gap_of_three(run, scale):
    """Two of six in turn: from round 4 on M = (x^{r-3} - x^r) / 3 with both scales, a third of them being there."""
    problem, beta, steps = make_quadratics((2, 4, 6, 5, 3, 1)), 0.8, 4
    local = run(problem, CYCLIC, "local_ghbm", beta=beta, scale=scale)
    path = [problem.start]
    for r, cohort in enumerate(local.cohorts):
        x = local.models[r]
        M = (local.models[r - 3] - x) / 3 if r >= 3 else 0 * x
        p = problem.sizes[cohort] / problem.sizes[cohort].sum()
        path.append(p @ np.array([problem.local_sgd(i, x, steps, pull=beta / (LR * steps) * M) for i in cohort]))
    same(local, path)
    assert local.cohorts[:3] == local.cohorts[3:]


@pytest.mark.parametrize(
    ("name", "without", "hyper"),
    [("local_ghbm", "fedavg", {}), ("fedhbm", "fedavg", {}), ("fedtrip", "fedprox", {"mu": 1.0})],
    ids=["local_ghbm", "fedhbm", "fedtrip"],
)
def test_first_participations_know_no_past(run, name, without, hyper):
    problem = make_quadratics((2, 4, 6, 5, 3, 1))
    one, other = run(problem, CYCLIC, name, **hyper), run(problem, CYCLIC, without, **hyper)
    same(one.models[:4], other.models[:4])
    assert off(one.models[4], other.models[4]) > 1e-3


@pytest.mark.parametrize("scale", ["inv_gap", "participation"])
def test_fedhbm_of_one_client_corrects_nothing_in_its_first_step(run, scale):
    """It starts where it ended: one step is FedAvg's, of two the second is not."""
    problem = make_logistic((11,))
    same(run(problem, ONE_STEP, "fedhbm", beta=1.0, scale=scale), run(problem, ONE_STEP, "fedavg"))
    two = ONE_STEP | {"train.local_steps": 2}
    differ(run(problem, two, "fedhbm", beta=1.0, scale=scale), run(problem, two, "fedavg"))


def pull(name, hyper, y, x, lr=0.5, **client):
    """Returns the direction of a local step at y, where the gradient is zero."""
    algorithm, phase = made(name, **hyper), standing(lr=lr, shared={"x": x}, **client)
    at = phase.start("x").with_parameters(padded(y, phase.objective.network)[None])
    after = algorithm.step(phase, algorithm.begin(phase).update(y=at), next(phase.data.batches()))["y"]
    return (y - float(after.parameters[0, 0])) / lr


def test_the_pull_of_fedprox_is_mu_and_not_half_of_it():
    assert pull("fedprox", {"mu": 0.4}, y=1.0, x=0.5) == pytest.approx(0.2, rel=1e-6)


@pytest.mark.parametrize(
    ("hyper", "gap"),
    [
        ({"xi_mode": "const", "xi_const": 0.5}, 1),
        ({}, 2),
        ({"xi_scale": 0.5}, 1),
        ({"xi_mode": "gap", "xi_scale": 0.25}, 2),
    ],
)
def test_the_pull_of_fedtrip(hyper, gap):
    """mu ((y - x) + xi (w - y)) with xi = 1/2, in four ways to say so."""
    found = pull("fedtrip", {"mu": 0.4, **hyper}, y=1.0, x=0.5, state={"w": 0.2}, gap=gap)
    assert found == pytest.approx(0.04, rel=1e-5)


@pytest.mark.parametrize("y", [-3.0, 0.5, 1.0, 20.0])
def test_the_pull_of_fedtrip_with_xi_of_one_does_not_depend_on_y(y):
    assert pull("fedtrip", {"mu": 0.4}, y=y, x=0.5, state={"w": 0.2}, gap=1) == pytest.approx(-0.12, rel=1e-4)


@pytest.mark.parametrize("xi", [0.25, 0.5, 1.0])
def test_fedtrip_with_its_own_model_at_the_global_one_is_fedprox(xi):
    hyper = {"mu": 0.4, "xi_mode": "const", "xi_const": xi}
    fedprox = pull("fedprox", {"mu": 0.4 * (1 - xi)}, y=1.0, x=0.5)
    assert pull("fedtrip", hyper, y=1.0, x=0.5, state={"w": 0.5}, gap=1) == pytest.approx(fedprox, abs=1e-6)


def test_fedtrip_ignores_history_that_is_not_there():
    assert pull("fedtrip", {"mu": 0.4}, y=1.0, x=0.5, state={"w": 0.0}, gap=0) == pytest.approx(0.2, rel=1e-6)


@pytest.mark.parametrize(
    ("scale", "client"),
    [("inv_gap", {"gap": 10, "members": 3, "N": 4}), ("participation", {"gap": 7, "members": 1, "N": 10})],
)
def test_fedhbm_is_pushed_away_from_its_own_model(scale, client):
    """From y = 2 with a = 1, beta = 1, s = 0.1 and J = 2 to 2.05, whatever the lr."""
    for lr in (0.01, 0.5):
        found = pull("fedhbm", {"beta": 1.0, "scale": scale}, 2.0, 2.0, lr, state={"a": 1.0}, steps=2, **client)
        assert 2 - lr * found == pytest.approx(2.05, rel=1e-6)
