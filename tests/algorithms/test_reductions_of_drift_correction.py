"""Algorithms that correct the clients' drift reach the optimum, and their states are what the papers say they are."""

import numpy as np
import pytest
import traced_runs
from traced_runs import (
    FULL,
    LR,
    OBJECTIVES,
    ONE_STEP,
    TOLERANCE,
    UNIFORM,
    descent,
    make_logistic,
    make_quadratics,
    off,
    same,
)

anyhow, logistic, quadratics, run = traced_runs.anyhow, traced_runs.logistic, traced_runs.quadratics, traced_runs.run

STEEP = FULL | UNIFORM | {"train.lr": 0.2, "run.rounds": 80}
PARTLY = STEEP | {"train.cohort_size": 2, "run.rounds": 120}
LONG = {"train.local_steps": 10}
OPTIMAL = {
    "mime": ("mime", {}, STEEP),
    "scaffold-1": ("scaffold", {"option": 1}, STEEP),
    "scaffold-2": ("scaffold", {"option": 2}, STEEP),
    "scaffold-1-partial": ("scaffold", {"option": 1}, PARTLY),
    "scaffold-2-partial": ("scaffold", {"option": 2}, PARTLY),
    "feddyn": ("feddyn", {"alpha": 1.0}, STEEP | LONG),
    "feddyn-partial": ("feddyn", {"alpha": 1.0}, PARTLY | LONG),
}


QUICK = ("mime", "scaffold-1-partial", "feddyn")


@pytest.fixture(
    scope="module",
    params=[(make_quadratics, 0.0), (make_logistic, 0.3)],
    ids=["quadratics", "logistic"],
)
def convex(request):
    """A problem, its weight decay, which belongs to f_i, and the minimum of (1/N) sum_i f_i."""
    make, weight_decay = request.param
    problem = make()
    return problem, {"train.weight_decay": weight_decay}, problem.optimum(weight_decay)


@pytest.mark.parametrize(
    ("name", "hyper", "settings"),
    [pytest.param(*case, id=i, marks=() if i in QUICK else pytest.mark.slow) for i, case in OPTIMAL.items()],
)
def test_the_optimum_of_heterogeneous_clients_is_reached(run, convex, name, hyper, settings):
    problem, decay, optimum = convex
    assert off(run(problem, settings | decay, name, **hyper).models[-1], optimum) <= TOLERANCE


@pytest.mark.parametrize("settings", [STEEP, PARTLY | {"run.rounds": 240}], ids=["full", "partial"])
def test_scaffold_m_reaches_the_optimum(run, quadratics, settings):
    """Weight decay is left out: D contains it too, so that it counts 1 / beta times, as in FedCM."""
    assert off(run(quadratics, settings, "scaffold_m", beta=0.3).models[-1], quadratics.optimum()) <= TOLERANCE


def test_fedavg_is_biased(run, convex):
    problem, decay, optimum = convex
    fedavg = run(problem, STEEP | decay, "fedavg")
    assert off(fedavg.models[-1], fedavg.models[-2]) < TOLERANCE
    assert off(fedavg.models[-1], optimum) > 0.01


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("weighting", OBJECTIVES)
def test_c_of_scaffold_is_the_mean_of_all_clients(run, logistic, anyhow, option, weighting):
    """A client that was never sampled counts with zero."""
    scaffold = run(logistic, anyhow | {"train.weighting": weighting, "run.rounds": 12}, "scaffold", option=option)
    p = logistic.sizes / logistic.sizes.sum() if weighting == "samples" else np.full(5, 0.2)
    for after, states in zip(scaffold.vectors, scaffold.states, strict=True):
        assert off(after["c"], sum(p[i] * state["c"] for i, state in states.items())) <= TOLERANCE
    if "train.cohort_size" in anyhow:
        assert len(scaffold.states[0]) == 2


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("weighting", OBJECTIVES)
def test_one_step_of_scaffold_is_gradient_descent(run, logistic, option, weighting):
    scaffold = run(logistic, ONE_STEP | {"train.weighting": weighting}, "scaffold", option=option)
    same(scaffold, descent(logistic, weighting))


def test_h_of_feddyn_is_the_mean_state(run, logistic, anyhow):
    """fedray keeps q = -h / alpha and q_i = -gstate_i / alpha."""
    feddyn = run(logistic, anyhow | {"run.rounds": 12}, "feddyn", alpha=0.3)
    for after, states in zip(feddyn.vectors, feddyn.states, strict=True):
        assert off(after["q"], sum(state["q"] for state in states.values()) / 5) <= TOLERANCE


@pytest.mark.parametrize("partial", [{}, {"train.cohort_size": 2}], ids=["full", "partial"])
def test_states_of_feddyn_are_gradients_where_clients_solve_exactly(run, quadratics, partial):
    alpha = 0.5
    feddyn = run(quadratics, FULL | {"train.lr": 0.4, "train.local_steps": 60} | partial, "feddyn", alpha=alpha)
    for r, cohort in enumerate(feddyn.cohorts):
        for i in cohort:
            q = feddyn.states[r][i]["q"]
            before = feddyn.states[r - 1].get(i, {"q": 0.0})["q"] if r else 0.0
            y = feddyn.models[r] + q - before
            np.testing.assert_allclose(-alpha * q, quadratics.gradient(i, y), atol=1e-5)


def test_feddyn_begins_without_state_and_prox(run, logistic):
    """Round 1, J = 1: y_i = x - eta g_i, so that q_i is the step and x^2 is twice as far as the mean."""
    first = ONE_STEP | {"run.rounds": 1}
    feddyn = run(logistic, first, "feddyn", alpha=0.7)
    x, steps = logistic.start, [-LR * logistic.gradient(i, logistic.start) for i in range(5)]
    for i in range(5):
        assert off(feddyn.states[0][i]["q"], steps[i]) <= TOLERANCE
    average = run(logistic, first, "feddyn", alpha=0.7, eval="avg_selected")
    assert off(average.models[1], x + np.mean(steps, axis=0)) <= TOLERANCE
    assert off(feddyn.models[1], x + 2 * np.mean(steps, axis=0)) <= TOLERANCE
