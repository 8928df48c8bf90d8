"""Federated algorithms as the papers print them: float64 numpy, one loop over rounds, clients and steps.

The problem is multinomial logistic regression with full-batch local gradients, so nothing is random: the cohorts are
given from outside. A model is the flat vector of torch's Linear(features, classes): weight row by row, then bias.
Where clients take different numbers of steps, Train.steps is a sequence with one number per client.
This file shares no code and no data structure with fedray, whose algorithms the tests compare with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Vector = np.ndarray
Cohorts = list[list[int]]


@dataclass(frozen=True)
class Problem:
    """Per-client samples, and for pFedMo the server's public ones."""

    x: list[np.ndarray]
    y: list[np.ndarray]
    classes: int
    x_public: np.ndarray | None = None
    y_public: np.ndarray | None = None

    @property
    def dimension(self) -> int:
        return self.classes * (self.x[0].shape[1] + 1)


@dataclass(frozen=True)
class Train:
    """What all algorithms share."""

    steps: int | Sequence[int]
    lr: float
    lr_decay: float = 1.0
    server_lr: float = 1.0
    weighting: str = "samples"
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    momentum: float = 0.0


@dataclass
class Round:
    """What one round left behind; dicts are keyed by the clients of its cohort."""

    model: Vector
    loss: dict[int, float]
    x_mean: Vector
    m_mean: Vector | None = None
    representation: Vector | None = None
    rep_momentum: Vector | None = None
    scores: dict[int, float] = field(default_factory=dict)
    personal: dict[int, Vector] = field(default_factory=dict)
    personal_momentum: dict[int, Vector] = field(default_factory=dict)


def logits(w: Vector, x: np.ndarray) -> np.ndarray:
    features = x.shape[1]
    classes = w.size // (features + 1)
    weight, bias = w[: classes * features].reshape(classes, features), w[classes * features :]
    return np.asarray(x, np.float64) @ weight.T + bias


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def loss_and_gradient(w: Vector, x: np.ndarray, y: np.ndarray) -> tuple[float, Vector]:
    n = len(y)
    log_p = log_softmax(logits(w, x))
    error = np.exp(log_p)
    error[np.arange(n), y] -= 1
    gradient = np.concatenate([(error.T @ np.asarray(x, np.float64)).ravel(), error.sum(axis=0)]) / n
    return -log_p[np.arange(n), y].mean(), gradient


def accuracy(w: Vector, x: np.ndarray, y: np.ndarray) -> float:
    return float((logits(w, x).argmax(axis=1) == y).mean())


def direction(g: Vector, at: Vector, train: Train) -> Vector:
    """Rule R2: g holds gradient and corrections; clip it, then add weight decay."""
    norm = np.linalg.norm(g)
    if train.grad_clip > 0 and norm > train.grad_clip:
        g = g * (train.grad_clip / norm)
    return g + train.weight_decay * at


def steps(train: Train, i: int) -> int:
    """J_i."""
    return train.steps if isinstance(train.steps, int) else train.steps[i]


def shares(problem: Problem, cohort: list[int], train: Train) -> dict[int, float]:
    """p_i, normalised inside the cohort."""
    size = {i: len(problem.y[i]) if train.weighting == "samples" else 1 for i in cohort}
    return {i: size[i] / sum(size.values()) for i in cohort}


def mean(p: dict[int, float], values: dict[int, Vector]) -> Vector:
    return sum(p[i] * values[i] for i in p)


def beginning(problem: Problem, start: Vector | None) -> Vector:
    return np.zeros(problem.dimension) if start is None else np.array(start, np.float64)


def fedavg(problem: Problem, cohorts: Cohorts, train: Train, start: Vector | None = None) -> list[Round]:
    x = beginning(problem, start)
    rounds = []
    for r, cohort in enumerate(cohorts):
        lr = train.lr * train.lr_decay**r
        p = shares(problem, cohort, train)
        local, loss = {}, {}
        for i in cohort:
            y, b, losses = x, np.zeros_like(x), []
            for _ in range(steps(train, i)):
                value, g = loss_and_gradient(y, problem.x[i], problem.y[i])
                b = train.momentum * b + direction(g, y, train)
                y = y - lr * b
                losses.append(value)
            local[i], loss[i] = y, np.mean(losses)
        x_mean = mean(p, local)
        x = x - train.server_lr * (x - x_mean)
        rounds.append(Round(x, loss, x_mean))
    return rounds


def fedprox(problem: Problem, cohorts: Cohorts, train: Train, start: Vector | None = None, *, mu: float) -> list[Round]:
    """The gradient of f_i(y) + mu/2 ||y - x||^2; the loss that is reported is f_i alone."""
    x = beginning(problem, start)
    rounds = []
    for r, cohort in enumerate(cohorts):
        lr = train.lr * train.lr_decay**r
        p = shares(problem, cohort, train)
        local, loss = {}, {}
        for i in cohort:
            y, b, losses = x, np.zeros_like(x), []
            for _ in range(steps(train, i)):
                value, g = loss_and_gradient(y, problem.x[i], problem.y[i])
                b = train.momentum * b + direction(g + mu * (y - x), y, train)
                y = y - lr * b
                losses.append(value)
            local[i], loss[i] = y, np.mean(losses)
        x_mean = mean(p, local)
        x = x - train.server_lr * (x - x_mean)
        rounds.append(Round(x, loss, x_mean))
    return rounds


def fednag(
    problem: Problem, cohorts: Cohorts, train: Train, start: Vector | None = None, *, gamma: float
) -> list[Round]:
    """The (x, y) form: gradients are taken at x, and both x and y are averaged and sent back."""
    x_mean = beginning(problem, start)
    y_mean = x_mean
    rounds = []
    for r, cohort in enumerate(cohorts):
        lr = train.lr * train.lr_decay**r
        p = shares(problem, cohort, train)
        xs, ys, loss = {}, {}, {}
        for i in cohort:
            x, y, losses = x_mean, y_mean, []
            for _ in range(steps(train, i)):
                value, g = loss_and_gradient(x, problem.x[i], problem.y[i])
                y_next = x - lr * direction(g, x, train)
                x = y_next + gamma * (y_next - y)
                y = y_next
                losses.append(value)
            xs[i], ys[i], loss[i] = x, y, np.mean(losses)
        x_mean, y_mean = mean(p, xs), mean(p, ys)
        rounds.append(Round(x_mean, loss, x_mean, y_mean))
    return rounds


def worker(
    form: str, x: Vector, m: Vector, samples: tuple[np.ndarray, np.ndarray], train: Train, lr: float, gamma: float
) -> tuple[Vector, Vector, float]:
    """pFedMo's local steps (its equations 6 and 7); m is v in the velocity form and y in the printed one."""
    losses = []
    for _ in range(train.steps):
        value, g = loss_and_gradient(x, *samples)
        d = direction(g, x, train)
        if form == "velocity":
            m = gamma * m - lr * d
            x = x + gamma * m - lr * d
        else:
            y = x - lr * d
            x = y + gamma * (y - m)
            m = y
        losses.append(value)
    return x, m, float(np.mean(losses))


def personalize(
    a: float, x_mean: Vector, m_mean: Vector, x_rep: Vector, m_rep: Vector, contrast: bool = True
) -> tuple[Vector, Vector]:
    """Equations 11 and 12 of pFedMo: the pair (x_i+, m_i+)."""
    m = (1 - a) * m_mean + a * m_rep
    x = (1 - a) * x_mean + a * x_rep
    if contrast:
        x = x + (m_mean - m)
    return x, m


def score_loss(rep_logits: np.ndarray, client_logits: np.ndarray) -> float:
    """l_i, equations 8 to 10: cross-entropy against the representation model's probabilities."""
    w = np.exp(log_softmax(rep_logits))
    return float(-(w * log_softmax(client_logits)).sum(axis=1).mean())


def pfedmo(
    problem: Problem,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    gamma: float,
    pi: float,
    form: str = "velocity",
    contrast: bool = True,
) -> list[Round]:
    if form not in ("velocity", "printed"):
        raise ValueError(form)
    public = problem.x_public, problem.y_public
    x_mean = beginning(problem, start)
    m_mean = np.zeros_like(x_mean) if form == "velocity" else x_mean
    x_rep, m_rep = x_mean, m_mean
    u: dict[int, float] = {}
    a: dict[int, float] = {}
    unscored = 0.0
    rounds = []
    for r, cohort in enumerate(cohorts):
        lr = train.lr * train.lr_decay**r
        p = shares(problem, cohort, train)
        xs, ms, loss = {}, {}, {}
        for i in cohort:
            x, m = personalize(a.get(i, unscored), x_mean, m_mean, x_rep, m_rep, contrast)
            xs[i], ms[i], loss[i] = worker(form, x, m, (problem.x[i], problem.y[i]), train, lr, gamma)
        x_rep, m_rep, _ = worker(form, x_rep, m_rep, public, train, lr, gamma)

        scores = {}
        for i in cohort:
            l = score_loss(logits(x_rep, public[0]), logits(xs[i], public[0]))
            u[i] = max(u.get(i, l), l)
            scores[i] = 1 - l / u[i] if u[i] > 0 else 0.0
            a[i] = pi * scores[i]
        unscored = sum(p[i] * a[i] for i in cohort)

        x_mean, m_mean = mean(p, xs), mean(p, ms)
        personal, momentum = {}, {}
        for i in cohort:
            personal[i], momentum[i] = personalize(a[i], x_mean, m_mean, x_rep, m_rep, contrast)
        model = mean(p, personal)
        rounds.append(Round(model, loss, x_mean, m_mean, x_rep, m_rep, scores, personal, momentum))
    return rounds
