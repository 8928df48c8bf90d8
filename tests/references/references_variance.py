"""Variance reduction, drift correction and momentum from past models, in the setting of references_momentum.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from references import Cohorts, Train, Vector, mean
from references_momentum import Objectives, Outcome, beginning, local_sgd, schedule, shares, steps


def mimemom(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    beta=0.9,
    dampening=True,
    lite=False,
) -> list[Outcome]:
    fresh = 1 - beta if dampening else 1.0

    def corrected(i, y, g):
        if not lite:
            g = g - problem.oracle(i, x)[1] + c
        return fresh * g + beta * s

    x = beginning(problem, start)
    s = np.zeros_like(x)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        c = mean(p, {i: problem.oracle(i, x)[1] for i in cohort})
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected)
        s = fresh * c + beta * s
        x_mean = mean(p, ys)
        x = x - train.server_lr * (x - x_mean)
        rounds.append(Outcome(x, loss, x_mean, server={"s": s, "c": c}))
    return rounds


def mime(problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None) -> list[Outcome]:
    return mimemom(problem, cohorts, train, start, beta=0.0)


def mimelitemom(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, beta=0.9, dampening=True
) -> list[Outcome]:
    return mimemom(problem, cohorts, train, start, beta=beta, dampening=dampening, lite=True)


def mimelite(problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None) -> list[Outcome]:
    return mimelitemom(problem, cohorts, train, start, beta=0.0)


def scaffold(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, option=2
) -> list[Outcome]:
    if option not in (1, 2):
        raise ValueError(option)

    def corrected(i, y, g):
        return g - c_i[i] + c

    x = beginning(problem, start)
    clients = list(range(len(problem.sizes)))
    c = np.zeros_like(x)
    c_i = dict.fromkeys(clients, c)
    # 1/N, or n_i/n where the model is averaged by samples, so that c stays the mean of all c_i
    p_all = shares(problem, clients, train)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected)
        new = {}
        for i in cohort:
            new[i] = problem.oracle(i, x)[1] if option == 1 else c_i[i] - c + (x - ys[i]) / (steps(train, i) * lr)
        c = c + sum(p_all[i] * (new[i] - c_i[i]) for i in cohort)
        c_i = c_i | new
        x = x + train.server_lr * mean(p, {i: ys[i] - x for i in cohort})
        rounds.append(Outcome(x, loss, mean(p, ys), server={"c": c}, clients={"c": c_i}))
    return rounds


def feddyn(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, alpha=0.01, eval="server"
) -> list[Outcome]:
    if eval not in ("server", "avg_selected"):
        raise ValueError(eval)

    def corrected(i, y, g):
        return g - state[i] + alpha * (y - x)

    x = beginning(problem, start)
    N = len(problem.sizes)
    h = np.zeros_like(x)
    state = dict.fromkeys(range(N), h)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected)
        state = state | {i: state[i] - alpha * (ys[i] - x) for i in cohort}
        h = h - alpha / N * sum(ys[i] - x for i in cohort)
        x_mean = mean(p, ys)
        x = x_mean - h / alpha
        model = x if eval == "server" else x_mean
        rounds.append(Outcome(model, loss, x_mean, server={"h": h, "x": x}, clients={"g": state, "y": ys}))
    return rounds


def adabest(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    mu: float,
    beta: float,
    mu_scaling="paper",
    batches_per_epoch: Sequence[int] | None = None,
) -> list[Outcome]:
    """fedsim's mu is the paper's times the client's batches per epoch, one without batches."""
    if mu_scaling not in ("paper", "fedsim"):
        raise ValueError(mu_scaling)

    def corrected(i, y, g):
        return g - h_i[i]

    x = beginning(problem, start)
    x_mean_before = x
    h_i, last = dict.fromkeys(range(len(problem.sizes)), np.zeros_like(x)), {}
    rounds = []
    for r, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected)
        for i in cohort:
            mu_i = mu / batches_per_epoch[i] if mu_scaling == "fedsim" and batches_per_epoch else mu
            h_i[i] = h_i[i] / (r - last.get(i, 0)) + mu_i * (x - ys[i])
            last[i] = r
        x_mean = mean(p, ys)
        h = beta * (x_mean_before - x_mean)
        x = x_mean - h
        x_mean_before = x_mean
        rounds.append(Outcome(x, loss, x_mean, server={"h": h}, clients={"h": dict(h_i)}))
    return rounds


def fedtrip(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    mu=0.4,
    xi_scale=1.0,
    xi_mode="inverse_gap",
    xi_const=1.0,
    initial: Callable[..., Vector] | None = None,
    own_initial=True,
    epochs=1,
    momentum_is_kept=False,
) -> list[Outcome]:
    """Initial: the model that is drawn for a client, or for all without own_initial, which its authors' code takes for
    its last one, of round 0. There mu is divided by the epochs."""
    if xi_mode not in ("inverse_gap", "gap", "const"):
        raise ValueError(xi_mode)
    mu = mu / epochs

    def corrected(i, y, g):
        return g + mu * (y - x) + (mu * xi[i] * (w_hist[i] - y) if i in w_hist else 0)

    x = beginning(problem, start)
    w_hist, last, buffers = {}, {}, {}
    if initial is not None:
        everybody = range(len(problem.sizes))
        w_hist, last = {i: initial(i) if own_initial else initial() for i in everybody}, dict.fromkeys(everybody, 0)
    rounds = []
    for r, cohort, lr, p in schedule(problem, cohorts, train):
        xi = {}
        for i in set(cohort) & set(last):
            gap = r - last[i]
            xi[i] = xi_scale * {"inverse_gap": 1 / gap, "gap": gap, "const": xi_const}[xi_mode]
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected, buffers if momentum_is_kept else None)
        for i in cohort:
            w_hist[i], last[i] = ys[i], r
        x_mean = mean(p, ys)
        x = x - train.server_lr * (x - x_mean)
        rounds.append(Outcome(x, loss, x_mean, clients={"w_hist": dict(w_hist)}))
    return rounds


def fedcm(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, alpha=0.1
) -> list[Outcome]:
    def corrected(i, y, g):
        return alpha * g + (1 - alpha) * delta

    x = beginning(problem, start)
    delta = np.zeros_like(x)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected)
        delta = mean(p, {i: (x - ys[i]) / (steps(train, i) * lr) for i in cohort})
        x_mean = mean(p, ys)
        x = x - train.server_lr * (x - x_mean)
        rounds.append(Outcome(x, loss, x_mean, server={"delta": delta}))
    return rounds


def scaffold_m(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, beta=0.1
) -> list[Outcome]:
    def corrected(i, y, g):
        met[i].append(g)
        return beta * (g - c_i[i] + c) + (1 - beta) * momentum

    x = beginning(problem, start)
    clients = list(range(len(problem.sizes)))
    c = momentum = np.zeros_like(x)
    c_i = dict.fromkeys(clients, c)
    p_all = shares(problem, clients, train)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        met = {i: [] for i in cohort}
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected)
        new = {i: sum(met[i]) / len(met[i]) for i in cohort}
        c = c + sum(p_all[i] * (new[i] - c_i[i]) for i in cohort)
        c_i = c_i | new
        momentum = mean(p, {i: (x - ys[i]) / (steps(train, i) * lr) for i in cohort})
        x = x + train.server_lr * mean(p, {i: ys[i] - x for i in cohort})
        rounds.append(Outcome(x, loss, mean(p, ys), server={"c": c, "g": momentum}, clients={"c": c_i}))
    return rounds


def fedacg(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, lam=0.85, beta=0.01
) -> list[Outcome]:
    def corrected(i, y, g):
        return g + beta * (y - z)

    x = beginning(problem, start)
    m = np.zeros_like(x)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        z = x + lam * m
        ys, loss = local_sgd(problem, cohort, z, train, lr, corrected)
        m = lam * m + mean(p, {i: ys[i] - z for i in cohort})
        x = x + m
        rounds.append(Outcome(x, loss, mean(p, ys), server={"m": m}))
    return rounds


def ghbm(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    tau=None,
    beta=0.9,
    warmup="zero",
) -> list[Outcome]:
    if warmup not in ("zero", "init"):
        raise ValueError(warmup)
    tau = round(len(problem.sizes) / len(cohorts[0])) if tau is None else tau

    def corrected(i, y, g):
        return g + beta / (steps(train, i) * lr) * momentum

    sent = [beginning(problem, start)]
    rounds = []
    for r, cohort, lr, p in schedule(problem, cohorts, train):
        x = sent[-1]
        if r > tau:
            momentum = (sent[-1 - tau] - x) / tau
        else:
            momentum = (sent[0] - x) / tau if warmup == "init" else np.zeros_like(x)
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected)
        sent.append(mean(p, ys))
        rounds.append(Outcome(sent[-1], loss, sent[-1], server={"momentum": momentum}))
    return rounds


def gap_scale(scale: str, gap: int, cohort: list[int], problem: Objectives) -> float:
    """s_i: 1/tau_i, or the participation ratio C."""
    if scale not in ("inv_gap", "participation"):
        raise ValueError(scale)
    return 1 / gap if scale == "inv_gap" else len(cohort) / len(problem.sizes)


def local_ghbm(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, beta=0.9, scale="inv_gap"
) -> list[Outcome]:
    def corrected(i, y, g):
        return g + beta / (steps(train, i) * lr) * momentum[i]

    x = beginning(problem, start)
    anchor, last = {}, {}
    rounds = []
    for r, cohort, lr, p in schedule(problem, cohorts, train):
        momentum = {i: np.zeros_like(x) for i in cohort}
        for i in cohort:
            if i in anchor:
                momentum[i] = gap_scale(scale, r - last[i], cohort, problem) * (anchor[i] - x)
            anchor[i], last[i] = x, r
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected)
        x_mean = mean(p, ys)
        x = x - train.server_lr * (x - x_mean)
        rounds.append(Outcome(x, loss, x_mean, clients={"anchor": dict(anchor), "momentum": momentum}))
    return rounds


def fedhbm(
    problem: Objectives,
    cohorts: Cohorts,
    train: Train,
    start: Vector | None = None,
    *,
    beta=1.0,
    scale="inv_gap",
    variant="standard",
    initial: Callable[[int], Vector] | None = None,
) -> list[Outcome]:
    """Initial: the model that is drawn for a client where the first anchors are random."""
    if variant not in ("standard", "shared", "random"):
        raise ValueError(variant)

    def corrected(i, y, g):
        if i not in anchor:
            return g
        return g - beta / (steps(train, i) * lr) * s[i] * (y - anchor[i])

    x = beginning(problem, start)
    anchor, last = {}, {}
    if variant != "standard":
        anchor = {i: x if variant == "shared" else initial(i) for i in range(len(problem.sizes))}
    rounds = []
    for r, cohort, lr, p in schedule(problem, cohorts, train):
        # first anchors, shared or random, are r - 1 updates old where a client comes first
        gap = {i: r - last[i] if i in last else max(1, r - 1) for i in cohort}
        s = {i: gap_scale(scale, gap[i], cohort, problem) for i in cohort}
        ys, loss = local_sgd(problem, cohort, x, train, lr, corrected)
        for i in cohort:
            anchor[i], last[i] = ys[i], r
        x_mean = mean(p, ys)
        x = x - train.server_lr * (x - x_mean)
        rounds.append(Outcome(x, loss, x_mean, clients={"anchor": dict(anchor)}))
    return rounds
