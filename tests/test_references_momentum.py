"""References of momentum, variance reduction and past models, against the identities between the algorithms."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from references import Train, fedavg, fednag, fedprox
from references_momentum import (
    Logistic,
    direction,
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
    mime,
    mimelite,
    mimelitemom,
    mimemom,
    scaffold,
)

EVERYBODY = [[0, 1, 2, 3, 4]]
SOME = [[0, 1], [1, 4], [0, 3], [2, 4], [0, 1], [2, 3]]
PLAIN = Train(4, 0.05)
EVERYTHING = Train(3, 0.2, lr_decay=0.8, weighting="uniform", weight_decay=0.05, grad_clip=0.4)


@dataclass(frozen=True)
class Quadratics:
    """f_i(w) = (w - b_i)' A_i (w - b_i) / 2."""

    a: np.ndarray
    b: np.ndarray
    sizes: tuple[int, ...]

    @property
    def dimension(self):
        return self.b.shape[1]

    def oracle(self, i, w):
        g = self.a[i] @ (w - self.b[i])
        return g @ (w - self.b[i]) / 2, g

    def optimum(self, weighting="uniform"):
        p = np.array(self.sizes) if weighting == "samples" else np.ones(len(self.sizes))
        return np.linalg.solve(np.einsum("i,ijk->jk", p, self.a), np.einsum("i,ijk,ik->j", p, self.a, self.b))


@dataclass(frozen=True)
class Linear:
    """Constant gradients of one variable; its value stands in for the loss, to show where gradients were taken."""

    slopes: tuple[float, ...]
    dimension = 1

    @property
    def sizes(self):
        return range(1, len(self.slopes) + 1)

    def oracle(self, i, w):
        return w[0], np.array([self.slopes[i]])


def make_quadratics():
    rng = np.random.default_rng(4)
    a = []
    for _ in range(5):
        basis, _ = np.linalg.qr(rng.normal(size=(6, 6)))
        a.append(basis @ np.diag(rng.uniform(0.5, 3, 6)) @ basis.T)
    return Quadratics(np.array(a), rng.normal(size=(5, 6)), (2, 4, 6, 5, 3))


def make_logistic():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 5))
    x, y = [], []
    for n in (3, 11, 7, 1, 20):
        y.append(rng.integers(0, 3, n))
        x.append(centres[y[-1]] + rng.normal(size=(n, 5)) + rng.normal(scale=0.7, size=5))
    return Logistic(x, y, 3)


@pytest.fixture(scope="module")
def quadratics():
    return make_quadratics()


@pytest.fixture(scope="module")
def logistic():
    return make_logistic()


@pytest.fixture(scope="module", params=[make_quadratics, make_logistic], ids=["quadratics", "logistic"])
def problem(request):
    return request.param()


@pytest.fixture(scope="module")
def start(problem):
    return np.random.default_rng(7).normal(size=problem.dimension)


@pytest.fixture(params=[PLAIN, EVERYTHING], ids=["plain", "everything"])
def train(request):
    return request.param


@pytest.fixture(params=["samples", "uniform"])
def constant(request):
    """A constant client lr, and nothing added to the papers' rules."""
    return replace(PLAIN, weighting=request.param)


@pytest.fixture(params=[EVERYBODY * 12, SOME * 2], ids=["full", "partial"])
def cohorts(request):
    return request.param


def same(rounds, others, tolerance=1e-12):
    assert len(rounds) == len(others) > 0
    for one, other in zip(rounds, others, strict=True):
        np.testing.assert_allclose(one.model, other.model, rtol=0, atol=tolerance)
        assert one.loss == pytest.approx(other.loss, abs=tolerance)


def differ(rounds, others, least=1e-3):
    assert np.abs(rounds[-1].model - others[-1].model).max() > least


def models_before(rounds, start):
    return [start, *(r.model for r in rounds[:-1])]


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
