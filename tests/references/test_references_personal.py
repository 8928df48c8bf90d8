"""What the references of personal models reduce to."""

from __future__ import annotations

import numpy as np
import pytest
import references_personal
from reference_problems import make_quadratics
from references import Train


def test_pfedme_finds_the_proximal_point_of_a_quadratic() -> None:
    """With many inner steps theta minimises f_i(theta) + lambda / 2 |theta - w|^2: it is (A + lambda)^-1 (A b +
    lambda w). w makes a step of the Moreau envelope's gradient, lambda (w - theta)."""
    problem, lam, lr, beta = make_quadratics(), 2.0, 0.05, 0.8
    train = Train(4, lr)
    cohorts = [[0, 1, 2], [1, 3, 4], [0, 2, 4]]
    found = references_personal.pfedme(problem, cohorts, train, lam=lam, inner_steps=300, personal_lr=0.1, beta=beta)
    x = np.zeros(problem.dimension)
    p = np.array(problem.sizes, dtype=float)
    for number, cohort in enumerate(cohorts):
        ws = []
        for i in cohort:
            w, a = x, problem.a[i]
            for _ in range(4):
                theta = np.linalg.solve(a + lam * np.eye(len(x)), a @ problem.b[i] + lam * w)
                w = w - lr * lam * (w - theta)
            ws.append(w)
            assert found[number].personal[i] == pytest.approx(theta, abs=1e-12)
        x = (1 - beta) * x + beta * np.average(ws, axis=0, weights=p[cohort])
        assert found[number].model == pytest.approx(x, abs=1e-12)
