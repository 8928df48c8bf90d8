"""Other rules of aggregation and of local steps, in the setting of references_momentum.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from references import Cohorts, Train, Vector, mean
from references_momentum import Objectives, Outcome, beginning, local_sgd, schedule, steps


def fednova(problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None) -> list[Outcome]:
    x = beginning(problem, start)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr)
        worth = {i: sum_of_factors(steps(train, i), train.momentum) for i in cohort}
        d = mean(p, {i: (x - ys[i]) / worth[i] for i in cohort})
        x = x - train.server_lr * sum(p[i] * worth[i] for i in cohort) * d
        rounds.append(Outcome(x, loss, mean(p, ys)))
    return rounds


def sum_of_factors(steps: int, rho: float, nesterov: bool = False) -> float:
    """How much gradients that are all 1 move a model in so many steps of rate 1."""
    buffer = moved = 0.0
    for _ in range(steps):
        buffer = rho * buffer + 1
        moved += 1 + rho * buffer if nesterov else buffer
    return moved


def fedexp(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, eps=1e-3, average_last=True
) -> list[Outcome]:
    x = beginning(problem, start)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr)
        deltas = {i: x - ys[i] for i in cohort}
        whole = mean(p, deltas)
        rate = sum(p[i] * (deltas[i] @ deltas[i]) for i in cohort) / (2 * (whole @ whole + eps))
        before, x = x, x - max(1.0, rate) * whole
        rounds.append(Outcome((before + x) / 2 if average_last else x, loss, mean(p, ys)))
    return rounds


def fedsam(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, rho=0.05, adaptive=False
) -> list[Outcome]:
    def corrected(i, y, g):
        t = np.abs(y) if adaptive else 1.0
        norm = np.linalg.norm(t * g)
        return problem.oracle(i, y + rho * t * t * g / norm)[1] if norm else g

    x = beginning(problem, start)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected)
        x_mean = mean(p, ys)
        x = x - train.server_lr * (x - x_mean)
        rounds.append(Outcome(x, loss, x_mean))
    return rounds


def qfedavg(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, q=1.0
) -> list[Outcome]:
    x = beginning(problem, start)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr)
        deltas = {i: (x - ys[i]) / lr for i in cohort}
        losses = {i: problem.oracle(i, x)[0] for i in cohort}
        h = sum(q * losses[i] ** (q - 1) * (deltas[i] @ deltas[i]) + losses[i] ** q / lr for i in cohort)
        x = x - train.server_lr * sum(losses[i] ** q * deltas[i] for i in cohort) / h
        rounds.append(Outcome(x, loss, mean(p, ys)))
    return rounds


def fedper(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, private: Sequence[int]
) -> list[Outcome]:
    """``private`` are places in the model. ``clients["own"]`` are the personal models of the cohort after the round."""
    x = beginning(problem, start)
    kept = {i: x[private] for i in range(len(problem.sizes))}
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            begin = x.copy()
            begin[private] = kept[i]
            of_client, losses = local_sgd(problem, [i], begin, train, lr)
            ys[i], loss[i] = of_client[i], losses[i]
            kept[i] = ys[i][private]
        x_mean = mean(p, ys)
        x_mean[private] = x[private]
        x = x - train.server_lr * (x - x_mean)
        own = {i: x.copy() for i in cohort}
        for i in cohort:
            own[i][private] = kept[i]
        rounds.append(Outcome(x, loss, x_mean, personal=own))
    return rounds
