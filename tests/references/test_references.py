"""The references themselves, against the identities that hold between the algorithms."""

import numpy as np
import pytest
import torch
from references import (
    Problem,
    Train,
    accuracy,
    fedavg,
    fednag,
    fedprox,
    log_softmax,
    logits,
    loss_and_gradient,
    personalize,
    pfedmo,
    score_loss,
    shares,
)

SIZES = (3, 11, 7, 1, 20)
FEATURES, CLASSES = 5, 3
EVERYBODY = [[0, 1, 2, 3, 4]] * 6
SOME = [[0, 1], [1, 4], [0, 3], [2, 4], [0, 1], [2, 3]]
FORMS = ("velocity", "printed")


def make_problem(seed=0, sizes=SIZES):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, FEATURES))

    def draw(n, shift):
        y = rng.integers(0, CLASSES, n)
        return centres[y] + rng.normal(size=(n, FEATURES)) + shift, y

    clients = [draw(n, rng.normal(scale=0.7, size=FEATURES)) for n in sizes]
    return Problem([x for x, _ in clients], [y for _, y in clients], CLASSES, *draw(30, 0.0))


@pytest.fixture(scope="module")
def problem():
    return make_problem()


@pytest.fixture(scope="module")
def start():
    return np.random.default_rng(7).normal(size=CLASSES * (FEATURES + 1))


@pytest.fixture(
    params=[
        Train(4, 0.1),
        Train(3, 0.2, lr_decay=0.8, server_lr=1.0, weighting="uniform", weight_decay=0.05, grad_clip=0.4),
    ],
    ids=["plain", "everything"],
)
def train(request):
    return request.param


@pytest.fixture(params=[EVERYBODY, SOME], ids=["full", "partial"])
def cohorts(request):
    return request.param


def same(rounds, others, tolerance=1e-13):
    assert len(rounds) == len(others)
    for one, other in zip(rounds, others, strict=True):
        np.testing.assert_allclose(one.model, other.model, rtol=0, atol=tolerance)
        assert one.loss == pytest.approx(other.loss, abs=tolerance)


def test_gradient_against_central_differences(problem, start):
    x, y = problem.x[1], problem.y[1]
    _, gradient = loss_and_gradient(start, x, y)
    h = 1e-6
    numeric = [
        (loss_and_gradient(start + h * e, x, y)[0] - loss_and_gradient(start - h * e, x, y)[0]) / (2 * h)
        for e in np.eye(start.size)
    ]
    np.testing.assert_allclose(gradient, numeric, atol=1e-8)


def linear(w):
    layer = torch.nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(np.array(w)), layer.parameters())
    return layer


def test_loss_gradient_and_accuracy_against_torch(problem, start):
    for x, y in zip(problem.x, problem.y, strict=True):
        layer = linear(start)
        output = layer(torch.from_numpy(x))
        expected = torch.nn.functional.cross_entropy(output, torch.from_numpy(y))
        expected.backward()
        loss, gradient = loss_and_gradient(start, x, y)
        assert loss == pytest.approx(expected.item(), abs=1e-14)
        flat = torch.cat([q.grad.flatten() for q in layer.parameters()]).numpy()
        np.testing.assert_allclose(gradient, flat, atol=1e-14)
        assert accuracy(start, x, y) == (output.argmax(1).numpy() == y).mean()


def test_score_loss_against_torch(problem):
    rng = np.random.default_rng(3)
    rep, client = rng.normal(size=(2, 9, CLASSES)) * 3
    expected = torch.nn.functional.cross_entropy(torch.from_numpy(client), torch.from_numpy(rep).softmax(1))
    assert score_loss(rep, client) == pytest.approx(expected.item(), abs=1e-14)
    entropy = -(np.exp(log_softmax(rep)) * log_softmax(rep)).sum(1).mean()
    assert score_loss(rep, rep) == pytest.approx(entropy)
    assert score_loss(rep, client) > entropy


def test_shares(problem):
    assert shares(problem, [1, 4], Train(1, 1.0)) == pytest.approx({1: 11 / 31, 4: 20 / 31})
    assert shares(problem, [1, 4], Train(1, 1.0, weighting="uniform")) == {1: 0.5, 4: 0.5}


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_one_step_of_fedavg_is_gradient_descent(problem, start, weighting):
    x = start
    pooled = np.concatenate(problem.x), np.concatenate(problem.y)
    for r in fedavg(problem, EVERYBODY, Train(1, 0.3, weighting=weighting), start):
        if weighting == "samples":
            g = loss_and_gradient(x, *pooled)[1]
        else:
            g = np.mean([loss_and_gradient(x, *c)[1] for c in zip(problem.x, problem.y, strict=True)], axis=0)
        x = x - 0.3 * g
        np.testing.assert_allclose(r.model, x, atol=1e-13)


def test_cohorts_decide_who_is_averaged(problem):
    train = Train(2, 0.1)
    (both,) = fedavg(problem, [[1, 4]], train)
    alone = {i: fedavg(problem, [[i]], train)[0] for i in (1, 4)}
    np.testing.assert_allclose(both.model, (11 * alone[1].model + 20 * alone[4].model) / 31, atol=1e-14)
    assert both.loss == {i: alone[i].loss[i] for i in (1, 4)}


def test_server_lr_and_lr_decay(problem, start):
    one = fedavg(problem, SOME[:1], Train(2, 0.1), start)[0].model
    half = fedavg(problem, SOME[:1], Train(2, 0.1, server_lr=0.5), start)[0].model
    np.testing.assert_allclose(half, (start + one) / 2, atol=1e-14)
    decayed = fedavg(problem, SOME[:3], Train(2, 0.1, lr_decay=0.5), start)
    by_hand = start
    for lr, cohort, r in zip((0.1, 0.05, 0.025), SOME, decayed, strict=False):
        by_hand = fedavg(problem, [cohort], Train(2, lr), by_hand)[0].model
        np.testing.assert_allclose(r.model, by_hand, atol=1e-14)


def test_clipping_comes_before_weight_decay(problem, start):
    g = loss_and_gradient(start, problem.x[1], problem.y[1])[1]
    (r,) = fedavg(problem, [[1]], Train(1, 0.1, weight_decay=2.0, grad_clip=0.01), start)
    expected = start - 0.1 * (0.01 * g / np.linalg.norm(g) + 2.0 * start)
    np.testing.assert_allclose(r.model, expected, atol=1e-14)
    loose = Train(3, 0.1, grad_clip=100.0)
    same(fedavg(problem, SOME, loose), fedavg(problem, SOME, Train(3, 0.1)), 0)


def test_fedprox_without_mu_is_fedavg(problem, start, cohorts, train):
    same(fedprox(problem, cohorts, train, start, mu=0.0), fedavg(problem, cohorts, train, start), 0)


def test_fedprox_of_one_step_is_fedavg(problem, start, cohorts):
    train = Train(1, 0.2, server_lr=0.7)
    same(fedprox(problem, cohorts, train, start, mu=3.0), fedavg(problem, cohorts, train, start))


def test_fedprox_pulls_by_mu_times_the_distance(problem, start):
    y1 = fedavg(problem, [[1]], Train(1, 0.1), start)[0].model
    plain = fedavg(problem, [[1]], Train(2, 0.1), start)[0].model
    proximal = fedprox(problem, [[1]], Train(2, 0.1), start, mu=0.4)[0].model
    np.testing.assert_allclose(proximal, plain - 0.1 * 0.4 * (y1 - start), atol=1e-14)


def test_fednag_without_momentum_is_fedavg(problem, start, cohorts, train):
    same(fednag(problem, cohorts, train, start, gamma=0.0), fedavg(problem, cohorts, train, start))


@pytest.mark.parametrize(("steps", "rounds"), [(1, 12), (4, 3), (12, 1)])
def test_fednag_of_one_client_is_torch_nesterov_without_rounds(problem, start, steps, rounds):
    train = Train(steps, 0.1, weight_decay=0.02)
    ours = fednag(problem, [[1]] * rounds, train, start, gamma=0.8)[-1].model
    layer = linear(start)
    sgd = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.8, nesterov=True, weight_decay=0.02)
    for _ in range(12):
        sgd.zero_grad()
        output = layer(torch.from_numpy(problem.x[1]))
        torch.nn.functional.cross_entropy(output, torch.from_numpy(problem.y[1])).backward()
        sgd.step()
    theirs = torch.nn.utils.parameters_to_vector(layer.parameters()).detach().numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-13)


def test_fednag_averages_torch_nesterov_buffers(problem, start, cohorts):
    """The velocity form with averaged (x, buf), which third-party codes use."""
    train = Train(4, 0.1)
    x_mean, buf_mean = start, np.zeros_like(start)
    for cohort, r in zip(cohorts, fednag(problem, cohorts, train, start, gamma=0.6), strict=True):
        p = shares(problem, cohort, train)
        x_sum, buf_sum = 0.0, 0.0
        for i in cohort:
            x, buf = x_mean, buf_mean
            for _ in range(train.steps):
                g = loss_and_gradient(x, problem.x[i], problem.y[i])[1]
                buf = 0.6 * buf + g
                x = x - train.lr * (g + 0.6 * buf)
            x_sum, buf_sum = x_sum + p[i] * x, buf_sum + p[i] * buf
        x_mean, buf_mean = x_sum, buf_sum
        np.testing.assert_allclose(r.model, x_mean, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("contrast", [True, False])
def test_pfedmo_without_pi_is_fednag(problem, start, cohorts, train, form, contrast):
    ours = pfedmo(problem, cohorts, train, start, gamma=0.6, pi=0.0, form=form, contrast=contrast)
    theirs = fednag(problem, cohorts, train, start, gamma=0.6)
    same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        # x - y = gamma v
        m = other.m_mean if form == "printed" else (other.x_mean - other.m_mean) / 0.6
        np.testing.assert_allclose(one.m_mean, m, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pi", [0.5, 1.0])
def test_round_one_of_pfedmo_is_fednag(problem, start, cohorts, train, form, pi):
    ours = pfedmo(problem, cohorts[:2], train, start, gamma=0.6, pi=pi, form=form)
    assert set(ours[0].scores.values()) == {0.0}
    same(ours[:1], fednag(problem, cohorts[:1], train, start, gamma=0.6))


def test_scores(problem, start, cohorts):
    rounds = pfedmo(problem, cohorts, Train(4, 0.2), start, gamma=0.6, pi=1.0)
    later = [s for r in rounds[1:] for s in r.scores.values()]
    assert all(0 <= s < 1 for s in later)
    assert any(s > 0.01 for s in later)
    assert [set(r.scores) for r in rounds] == [set(c) for c in cohorts]


def test_u_persists_over_rounds_without_the_client(problem, start):
    cohorts = [[0, 1], [1, 4], [2, 4], [0, 3]]
    rounds = pfedmo(problem, cohorts, Train(4, 0.2), start, gamma=0.6, pi=0.7)

    def worst(i, r):
        """l_i of the given round, found again from the model that client i uploaded."""
        before, train = rounds[r - 1] if r else None, Train(4, 0.2)
        if before is None:
            x, m = start, np.zeros_like(start)
        else:
            a = 0.7 * rounds[0].scores[i]
            x, m = personalize(a, before.x_mean, before.m_mean, before.representation, before.rep_momentum)
        for _ in range(train.steps):
            g = loss_and_gradient(x, problem.x[i], problem.y[i])[1]
            m = 0.6 * m - train.lr * g
            x = x + 0.6 * m - train.lr * g
        return score_loss(logits(rounds[r].representation, problem.x_public), logits(x, problem.x_public))

    first, last = worst(0, 0), worst(0, 3)
    assert last < first
    assert rounds[3].scores[0] == pytest.approx(1 - last / first, abs=1e-12)


def test_printed_form_collapses_to_a_difference_of_velocities(problem, start, cohorts):
    gamma, pi = 0.6, 0.5
    for r in pfedmo(problem, cohorts, Train(4, 0.05), start, gamma=gamma, pi=pi, form="printed"):
        velocity = (r.x_mean - r.m_mean) / gamma
        rep_velocity = (r.representation - r.rep_momentum) / gamma
        for i, x in r.personal.items():
            expected = r.x_mean + pi * r.scores[i] * gamma * (rep_velocity - velocity)
            np.testing.assert_allclose(x, expected, atol=1e-12)


def test_personalize():
    x, m, x_rep, m_rep = np.random.default_rng(1).normal(size=(4, 6))
    for contrast in (True, False):
        np.testing.assert_array_equal(personalize(0.0, x, m, x_rep, m_rep, contrast), (x, m))
    np.testing.assert_allclose(personalize(1.0, x, m, x_rep, m_rep), (x_rep + m - m_rep, m_rep))
    np.testing.assert_allclose(personalize(1.0, x, m, x_rep, m_rep, False), (x_rep, m_rep))


@pytest.mark.parametrize("cohort", [[0], [0, 1, 2, 3, 4]])
def test_both_worker_forms_take_the_same_steps(problem, start, cohort):
    """With pi = 0 nothing but the worker differs: 40 steps in one round, and over a round boundary."""
    for steps, rounds in ((40, 1), (20, 2)):
        train = Train(steps, 0.1, weight_decay=0.01, grad_clip=0.5)
        velocity, printed = (
            pfedmo(problem, [cohort] * rounds, train, start, gamma=0.8, pi=0.0, form=form) for form in FORMS
        )
        same(velocity, printed)


def test_without_contrast_the_forms_agree_and_with_it_they_do_not(problem, start, cohorts, train):
    options = {"gamma": 0.6, "pi": 0.7}
    same(*(pfedmo(problem, cohorts, train, start, form=form, contrast=False, **options) for form in FORMS))
    one, other = (pfedmo(problem, cohorts, train, start, form=form, **options)[-1].model for form in FORMS)
    assert np.linalg.norm(one - other) > 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("contrast", [True, False])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_an_unscored_client_starts_from_the_global_model(problem, start, form, contrast, weighting):
    train = Train(1, 0.2, weighting=weighting)
    options = {"gamma": 0.6, "pi": 0.8, "form": form, "contrast": contrast}
    rounds = pfedmo(problem, [[0, 1]] * 8 + [[2, 4]], train, start, **options)
    before = rounds[-2]
    p = shares(problem, [0, 1], train)
    mean_a = sum(p[i] * 0.8 * before.scores[i] for i in p)
    assert mean_a > 0
    four = before.x_mean, before.m_mean, before.representation, before.rep_momentum
    x, m = personalize(mean_a, *four, contrast)
    np.testing.assert_allclose(x, before.model, atol=1e-13)
    np.testing.assert_allclose(m, sum(p[i] * before.personal_momentum[i] for i in p), atol=1e-13)
    # with one local step the round's loss is that of the start model
    for i in (2, 4):
        expected = loss_and_gradient(before.model, problem.x[i], problem.y[i])[0]
        assert rounds[-1].loss[i] == pytest.approx(expected, abs=1e-13)


def test_a_scored_client_comes_back_with_its_last_score(problem, start):
    rounds = pfedmo(problem, [[0, 1]] * 8 + [[2, 4], [0, 3]], Train(1, 0.2), start, gamma=0.6, pi=0.8)
    assert rounds[7].scores[0] > 0
    before = rounds[8]
    four = before.x_mean, before.m_mean, before.representation, before.rep_momentum
    x, _ = personalize(0.8 * rounds[7].scores[0], *four)
    assert rounds[9].loss[0] == pytest.approx(loss_and_gradient(x, problem.x[0], problem.y[0])[0], abs=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_clients_like_the_server_change_nothing(problem, start, form):
    x, y = problem.x_public, problem.y_public
    alike = Problem([x, x, x], [y, y, y], CLASSES, x, y)
    cohorts = [[0, 1, 2], [0, 2], [1], [0, 1]]
    train = Train(4, 0.1)
    ours = pfedmo(alike, cohorts, train, start, gamma=0.6, pi=1.0, form=form)
    same(ours, fednag(alike, cohorts, train, start, gamma=0.6), 1e-12)
    np.testing.assert_allclose(ours[-1].representation, ours[-1].model, atol=1e-12)


def test_the_representation_model_is_sgd_of_its_own(problem, start, cohorts, train):
    """Never overwritten: it is FedNAG of a single client that holds the public set."""
    alone = Problem([problem.x_public], [problem.y_public], CLASSES)
    expected = fednag(alone, [[0]] * len(cohorts), train, start, gamma=0.6)
    for form in FORMS:
        rounds = pfedmo(problem, cohorts, train, start, gamma=0.6, pi=0.5, form=form)
        for one, other in zip(rounds, expected, strict=True):
            np.testing.assert_allclose(one.representation, other.model, atol=1e-13)
