"""pFedMo without personalisation is FedNAG, and its two printed forms agree where they should."""

import numpy as np
import pytest
import traced_runs
from standing_clients import made, standing
from traced_runs import EVEN, FULL, TOLERANCE, differ, float64, make_logistic, off, same

anyhow, logistic, run = traced_runs.anyhow, traced_runs.logistic, traced_runs.run

FORMS = ("velocity", "printed")


@pytest.mark.parametrize("contrast", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_pfedmo_without_pi_is_fednag(run, logistic, anyhow, form, contrast):
    """Model, momentum and global model; in the printed form the arithmetic is the same, too."""
    gamma = 0.7
    pfedmo = run(logistic, anyhow, "pfedmo", gamma=gamma, pi=0.0, form=form, contrast=contrast)
    fednag = run(logistic, anyhow, "fednag", gamma=gamma)
    same(pfedmo, fednag, 0 if form == "printed" else TOLERANCE)
    for mine, other in zip(pfedmo.vectors, fednag.vectors, strict=True):
        if form == "printed":
            np.testing.assert_array_equal(mine["x"], other["x"])
            np.testing.assert_array_equal(mine["m"], other["y"])
        else:
            assert off(mine["x"], other["x"]) <= TOLERANCE
            assert off(mine["x"] - gamma * mine["m"], other["y"]) <= TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_round_one_of_pfedmo_is_fednag_whatever_pi(run, logistic, anyhow, form):
    fednag = run(logistic, anyhow, "fednag", gamma=0.7)
    for pi in (0.5, 1.0):
        pfedmo = run(logistic, anyhow, "pfedmo", gamma=0.7, pi=pi, form=form)
        assert set(pfedmo.tables[0]["a"].values()) == {0.0}
        assert off(pfedmo.models[1], fednag.models[1]) <= 1e-6
        differ(pfedmo, fednag)


def test_both_forms_of_pfedmos_workers_take_the_same_forty_steps(run, logistic):
    settings = EVEN | {"train.local_steps": 40, "train.weight_decay": 0.02, "train.grad_clip": 0.5}
    velocity, printed = (run(logistic, settings, "pfedmo", gamma=0.8, pi=0.0, form=form) for form in FORMS)
    same(velocity, printed)


def test_without_contrast_the_forms_of_pfedmo_agree_and_with_it_they_do_not(run, logistic, anyhow):
    velocity, printed = (run(logistic, anyhow, "pfedmo", pi=0.7, form=form, contrast=False) for form in FORMS)
    same(velocity, printed)
    differ(*(run(logistic, anyhow, "pfedmo", pi=0.7, form=form) for form in FORMS))


@pytest.mark.parametrize("form", FORMS)
def test_clients_like_pfedmos_representation_model_stay_like_it(run, form):
    problem = make_logistic((1, 1, 1, 1), alike=True)
    settings = FULL | {"train.cohort_size": 2}
    pfedmo = run(problem, settings, "pfedmo", gamma=0.7, pi=1.0, form=form)
    same(pfedmo, run(problem, settings, "fednag", gamma=0.7))
    same([after["x_rep"] for after in pfedmo.vectors], pfedmo.models[1:])
    assert max(pfedmo.tables[-1]["a"].values()) > 0.01


def personal(form, a, contrast=True, **four):
    """(x_i+, m_i+) of eqs. 11-12 for clients with the scores ``a``: where their local steps begin."""
    client = standing(dimension=6, clients=len(a), shared=four, scalars={"a": a})
    carry = made("pfedmo", form=form, contrast=contrast).begin(client)
    return float64(carry["x"])[:, :6], float64(carry["m"])[:, :6]


def test_the_printed_form_collapses_to_a_difference_of_velocities():
    """x_i+ = xbar + a_i gamma (v_rep - vbar), because x - y = gamma v."""
    gamma, a = 0.6, [0.0, 0.3, 0.75, 1.0]
    y, v, y_rep, v_rep = np.random.default_rng(1).normal(size=(4, 6))
    x = y + gamma * v
    found, _ = personal("printed", a, x=x, m=y, x_rep=y_rep + gamma * v_rep, m_rep=y_rep)
    for row, score in zip(found, a, strict=True):
        np.testing.assert_allclose(row, x + score * gamma * (v_rep - v), atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_client_of_full_score_starts_from_the_representation_model(form):
    x, m, x_rep, m_rep = np.random.default_rng(2).normal(size=(4, 6))
    four = {"x": x, "m": m, "x_rep": x_rep, "m_rep": m_rep}
    (found,), (momentum,) = personal(form, [1.0], **four)
    np.testing.assert_allclose(found, x_rep + m - m_rep, atol=1e-6)
    np.testing.assert_allclose(momentum, m_rep, atol=1e-6)
    (found,), _ = personal(form, [1.0], contrast=False, **four)
    np.testing.assert_allclose(found, x_rep, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_server_like_its_representation_model_is_what_everybody_starts_from(form):
    x, m = np.random.default_rng(3).normal(size=(2, 6))
    found, momentum = personal(form, [0.0, 0.4, 1.0], x=x, m=m, x_rep=x, m_rep=m)
    np.testing.assert_allclose(found, [x] * 3, atol=1e-6)
    np.testing.assert_allclose(momentum, [m] * 3, atol=1e-6)
