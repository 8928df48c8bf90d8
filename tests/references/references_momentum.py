"""Server and local momentum, as the papers print it: float64 numpy, in the setting of references.py.

Clients are known by their gradient oracle alone, so that logistic regression and quadratics go through the same code.
This file shares no code and no data structure with fedray, whose algorithms the tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from references import Cohorts, Problem, Round, Train, Vector, direction, loss_and_gradient, mean, steps


class Objectives(Protocol):
    @property
    def dimension(self) -> int: ...

    @property
    def sizes(self) -> Sequence[int]: ...

    def oracle(self, i: int, w: Vector) -> tuple[float, Vector]:
        """Loss and gradient of client i over all its samples."""


class Logistic(Problem):
    @property
    def sizes(self) -> list[int]:
        return [len(y) for y in self.y]

    def oracle(self, i: int, w: Vector) -> tuple[float, Vector]:
        return loss_and_gradient(w, self.x[i], self.y[i])


@dataclass
class Outcome(Round):
    """A round, and the state after it by the papers' letters; clients that have none yet are left out."""

    server: dict[str, Vector] = field(default_factory=dict)
    clients: dict[str, dict[int, Vector]] = field(default_factory=dict)


def beginning(problem: Objectives, start: Vector | None) -> Vector:
    return np.zeros(problem.dimension) if start is None else np.array(start, np.float64)


def shares(problem: Objectives, cohort: list[int], train: Train) -> dict[int, float]:
    size = {i: problem.sizes[i] if train.weighting == "samples" else 1 for i in cohort}
    return {i: size[i] / sum(size.values()) for i in cohort}


def schedule(
    problem: Objectives, cohorts: Cohorts, train: Train
) -> Iterator[tuple[int, list[int], float, dict[int, float]]]:
    """Round r = 1, 2, ..., its cohort, client lr and weights p_i."""
    for r, cohort in enumerate(cohorts, 1):
        yield r, cohort, train.lr * train.lr_decay ** (r - 1), shares(problem, cohort, train)


def local_sgd(
    problem: Objectives,
    cohort: list[int],
    x: Vector,
    train: Train,
    lr: float,
    corrected: Callable[[int, Vector, Vector], Vector] = lambda i, y, g: g,
    buffers: dict[int, Vector] | None = None,
) -> tuple[dict[int, Vector], dict[int, float]]:
    """All clients of the cohort from x: y_{i,J} and mean loss; corrected gets client, y_{j-1} and its gradient.

    Momentum starts from the buffers where clients have one, and is left there.
    """
    buffers = {} if buffers is None else buffers
    ys, loss = {}, {}
    for i in cohort:
        y, b, losses = x, buffers.get(i, np.zeros_like(x)), []
        for _ in range(steps(train, i)):
            value, g = problem.oracle(i, y)
            b = train.momentum * b + direction(corrected(i, y, g), y, train)
            y = y - lr * b
            losses.append(value)
        ys[i], buffers[i], loss[i] = y, b, np.mean(losses)
    return ys, loss


def anew_in_epochs(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, mu, batches_per_epoch
) -> list[Outcome]:
    """FedProx whose momentum and anchor begin anew in each local epoch."""
    x = beginning(problem, start)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            y, losses = x, []
            for j in range(steps(train, i)):
                if j % batches_per_epoch[i] == 0:
                    b, anchor = np.zeros_like(x), y
                value, g = problem.oracle(i, y)
                b = train.momentum * b + direction(g + mu * (y - anchor), y, train)
                y = y - lr * b
                losses.append(value)
            ys[i], loss[i] = y, np.mean(losses)
        x_mean = mean(p, ys)
        x = x - train.server_lr * (x - x_mean)
        rounds.append(Outcome(x, loss, x_mean))
    return rounds


def fedavgm(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, beta=0.9, nesterov=False
) -> list[Outcome]:
    x = beginning(problem, start)
    v = np.zeros_like(x)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr)
        x_mean = mean(p, ys)
        d = x - x_mean
        v = beta * v + d
        x = x - train.server_lr * (d + beta * v if nesterov else v)
        rounds.append(Outcome(x, loss, x_mean, server={"v": v}))
    return rounds


def slowmo(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    beta=0.5,
    alpha=1.0,
    buffer="reset",
) -> list[Outcome]:
    """Clients start from no local momentum, from their own of the last time, or from the last cohort's mean."""
    if buffer not in ("reset", "maintain", "average"):
        raise ValueError(buffer)
    x = beginning(problem, start)
    u = np.zeros_like(x)
    b = {}
    b_mean = np.zeros_like(x)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        if buffer != "maintain":
            b = {i: b_mean if buffer == "average" else np.zeros_like(x) for i in cohort}
        ys, loss = local_sgd(problem, cohort, x, train, lr, buffers=b)
        b_mean = mean(p, b)
        x_mean = mean(p, ys)
        u = beta * u + (x - x_mean) / lr
        x = x - alpha * lr * u
        rounds.append(Outcome(x, loss, x_mean, server={"u": u, "b": b_mean}, clients={"b": dict(b)}))
    return rounds


def fedmom(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, beta=0.9, eta=1.0
) -> list[Outcome]:
    x = beginning(problem, start)
    v = x
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr)
        x_mean = mean(p, ys)
        v_new = x - eta * (x - x_mean)
        x = v_new + beta * (v_new - v)
        v = v_new
        rounds.append(Outcome(x, loss, x_mean, server={"v": v}))
    return rounds


def fastslowmo(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    gamma=0.5,
    gamma_a=0.5,
    carry="y",
) -> list[Outcome]:
    """What workers carry on after the server's jump is their mean iterate y, or their mean torch buffer."""
    if carry not in ("y", "velocity"):
        raise ValueError(carry)
    x = beginning(problem, start)
    y_srv = x
    momentum = x if carry == "y" else np.zeros_like(x)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        xs, ms, loss = {}, {}, {}
        for i in cohort:
            x_i, m, losses = x, momentum, []
            for _ in range(steps(train, i)):
                value, g = problem.oracle(i, x_i)
                g = direction(g, x_i, train)
                if carry == "y":
                    y = x_i - lr * g
                    x_i, m = y + gamma * (y - m), y
                else:
                    m = gamma * m + g
                    x_i = x_i - lr * (g + gamma * m)
                losses.append(value)
            xs[i], ms[i], loss[i] = x_i, m, np.mean(losses)
        x_mean, momentum = mean(p, xs), mean(p, ms)
        y_new = x_mean
        x = y_new + gamma_a * (y_new - y_srv)
        y_srv = y_new
        rounds.append(Outcome(x, loss, x_mean, momentum, server={"y_srv": y_srv, "momentum": momentum}))
    return rounds


def domo(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    mu_s=0.9,
    mu_l=0.9,
    alpha=1.0,
    beta=0.9,
    variant="pre",
) -> list[Outcome]:
    if variant not in ("pre", "step"):
        raise ValueError(variant)
    x = beginning(problem, start)
    m = np.zeros_like(x)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, uploads, loss = {}, {}, {}
        for i in cohort:
            J = steps(train, i)
            y = x - beta * lr * J * m if variant == "pre" else x
            buffer, total, losses = np.zeros_like(x), np.zeros_like(x), []
            for _ in range(J):
                value, g = problem.oracle(i, y)
                buffer = mu_l * buffer + direction(g, y, train)
                y = y - lr * buffer
                if variant == "step":
                    y = y - lr * beta * m
                total = total + buffer
                losses.append(value)
            ys[i], uploads[i], loss[i] = y, total / J, np.mean(losses)
        m = mu_s * m + mean(p, uploads)
        x = x - alpha * lr * mean(p, {i: steps(train, i) for i in cohort}) * m
        rounds.append(Outcome(x, loss, mean(p, ys), server={"m": m}))
    return rounds


def fedadc(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    beta_g=0.9,
    beta_l=None,
    alpha=1.0,
    variant="heavyball",
) -> list[Outcome]:
    if variant not in ("heavyball", "nesterov"):
        raise ValueError(variant)
    beta_l = beta_g if beta_l is None else beta_l
    x = beginning(problem, start)
    m = np.zeros_like(x)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            m_bar = beta_l * m / steps(train, i)
            y, losses = x, []
            for _ in range(steps(train, i)):
                if variant == "heavyball":
                    value, g = problem.oracle(i, y)
                    y = y - lr * direction(g + m_bar, y, train)
                else:
                    # the step starts at z: m_bar is in z, not in the gradient that is clipped
                    z = y - lr * m_bar
                    value, g = problem.oracle(i, z)
                    y = z - lr * direction(g, z, train)
                losses.append(value)
            ys[i], loss[i] = y, np.mean(losses)
        x_mean = mean(p, ys)
        m = (x - x_mean) / lr + (beta_g - beta_l) * m
        x = x - alpha * lr * m
        rounds.append(Outcome(x, loss, x_mean, server={"m": m}))
    return rounds


def adaptive(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None,
    second_moment: Callable[[Vector, Vector], Vector],
    beta1: float,
    tau: float,
) -> list[Outcome]:
    """Reddi et al. 2021, Algorithm 2; its printed rules have no bias correction."""
    x = beginning(problem, start)
    m, v = np.zeros_like(x), np.full_like(x, tau**2)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr)
        x_mean = mean(p, ys)
        delta = mean(p, {i: ys[i] - x for i in cohort})
        m = beta1 * m + (1 - beta1) * delta
        v = second_moment(v, delta**2)
        x = x + train.server_lr * m / (np.sqrt(v) + tau)
        rounds.append(Outcome(x, loss, x_mean, server={"m": m, "v": v}))
    return rounds


def fedadagrad(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, beta1: float, tau: float
) -> list[Outcome]:
    return adaptive(problem, cohorts, train, start, lambda v, square: v + square, beta1, tau)


def fedyogi(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    beta1: float,
    beta2: float,
    tau: float,
) -> list[Outcome]:
    def second_moment(v, square):
        return v - (1 - beta2) * square * np.sign(v - square)

    return adaptive(problem, cohorts, train, start, second_moment, beta1, tau)


def fedadam(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    beta1: float,
    beta2: float,
    tau: float,
) -> list[Outcome]:
    def second_moment(v, square):
        return beta2 * v + (1 - beta2) * square

    return adaptive(problem, cohorts, train, start, second_moment, beta1, tau)
