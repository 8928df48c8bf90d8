"""Problems, cohorts and training settings on which the references of momentum and variance reduction are compared.

A test file binds the fixtures that it wants to their names.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from references import Train
from references_momentum import Logistic

EVERYBODY = [[0, 1, 2, 3, 4]]
SOME = [[0, 1], [1, 4], [0, 3], [2, 4], [0, 1], [2, 3]]
PLAIN = Train(4, 0.05)
EVERYTHING = Train(3, 0.2, lr_decay=0.8, weighting="uniform", weight_decay=0.05, grad_clip=0.4)


@dataclass(frozen=True)
class Quadratics:
    """The clients' objectives are f_i(w) = (w - b_i)' A_i (w - b_i) / 2."""

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
    """Gradients of one variable are constant; its value stands in for the loss, to show where gradients were taken."""

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
    """Settings with a constant client lr, and nothing added to the papers' rules."""
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
