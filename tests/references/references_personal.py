"""Private layers and personal models, as the papers print them, in the setting of references_momentum.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from references import Cohorts, Train, Vector, direction, mean, steps
from references_momentum import Objectives, Outcome, beginning, local_sgd, schedule


def descend(
    problem: Objectives,
    i: int,
    y: Vector,
    train: Train,
    lr: float,
    count: int,
    corrected: Callable[[Vector, Vector], Vector] = lambda y, g: g,
    moving: Vector | float = 1.0,
) -> tuple[Vector, float]:
    """So many steps of client i from y, of the places where ``moving`` is 1: the model and the mean loss."""
    b, losses = np.zeros_like(y), []
    for _ in range(count):
        value, g = problem.oracle(i, y)
        b = train.momentum * b + direction(corrected(y, g) * moving, y, train)
        y = y - lr * b * moving
        losses.append(value)
    return y, float(np.mean(losses)) if losses else 0.0


def only(private: Sequence[int], size: int) -> Vector:
    found = np.zeros(size)
    found[np.asarray(private, int)] = 1
    return found


def own_layers(problem: Objectives, x: Vector, private: Sequence[int]) -> tuple[Vector, dict[int, Vector]]:
    """Where private layers are, and what each client keeps of them before the first round."""
    return only(private, len(x)), {i: x for i in range(len(problem.sizes))}


def fedrep(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, private, head_steps=10
) -> list[Outcome]:
    x = beginning(problem, start)
    head, kept = own_layers(problem, x, private)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            y = np.where(head, kept[i], x)
            y, _ = descend(problem, i, y, train, lr, head_steps, moving=head)
            ys[i], loss[i] = descend(problem, i, y, train, lr, steps(train, i), moving=1 - head)
            kept[i] = ys[i]
        middle = mean(p, ys)
        x = np.where(head, x, x - train.server_lr * (x - middle))
        rounds.append(Outcome(x, loss, middle, personal={i: np.where(head, kept[i], x) for i in cohort}))
    return rounds


def fedbabu(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, private
) -> list[Outcome]:
    x = beginning(problem, start)
    base = 1 - only(private, len(x))
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            ys[i], loss[i] = descend(problem, i, x, train, lr, steps(train, i), moving=base)
        middle = mean(p, ys)
        x = x - train.server_lr * (x - middle)
        rounds.append(Outcome(x, loss, middle))
    return rounds


def lg_fedavg(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, private, warmup_rounds=0
) -> list[Outcome]:
    x = beginning(problem, start)
    own, kept = only(private, len(x)), {}
    rounds = []
    for r, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            begin = np.where(own, kept.get(i, x), x)
            of_client, losses = local_sgd(problem, [i], begin, train, lr)
            ys[i], loss[i] = of_client[i], losses[i]
        middle = mean(p, ys)
        moved = x - train.server_lr * (x - middle)
        if r > warmup_rounds:
            kept |= ys
            moved = np.where(own, x, moved)
        x = moved
        rounds.append(Outcome(x, loss, middle, personal={i: np.where(own, kept.get(i, x), x) for i in cohort}))
    return rounds


def ditto(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *,
    lam=0.1, personal_lr=None, personal_steps=None, private=(),
) -> list[Outcome]:  # fmt: skip
    """Private layers of w; those of v are its own anyway."""
    x = beginning(problem, start)
    v = {i: x for i in range(len(problem.sizes))}
    own, kept = own_layers(problem, x, private)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            begin = np.where(own, kept[i], x)
            of_client, losses = local_sgd(problem, [i], begin, train, lr)
            ys[i], loss[i] = of_client[i], losses[i]
            kept[i] = ys[i]
            count = personal_steps or steps(train, i)
            v[i], _ = descend(
                problem, i, v[i], train, personal_lr or lr, count, lambda y, g, x=begin: g + lam * (y - x)
            )  # fmt: skip
        middle = mean(p, ys)
        x = np.where(own, x, x - train.server_lr * (x - middle))
        rounds.append(Outcome(x, loss, middle, personal={i: v[i] for i in cohort}))
    return rounds


def pfedme(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *,
    lam=15.0, inner_steps=5, personal_lr=None, beta=1.0,
) -> list[Outcome]:  # fmt: skip
    x = beginning(problem, start)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ws, thetas, loss = {}, {}, {}
        for i in cohort:
            w, theta, b, losses = x, x, np.zeros_like(x), []
            for _ in range(steps(train, i)):
                losses.append(problem.oracle(i, theta)[0])
                for _ in range(inner_steps):
                    pulled = problem.oracle(i, theta)[1] + lam * (theta - w)
                    b = train.momentum * b + direction(pulled, theta, train)
                    theta = theta - (personal_lr or lr) * b
                w = w - lr * lam * (w - theta)
            ws[i], thetas[i], loss[i] = w, theta, float(np.mean(losses))
        middle = mean(p, ws)
        x = (1 - beta) * x + beta * middle
        rounds.append(Outcome(x, loss, middle, personal=thetas))
    return rounds


def apfl(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *,
    alpha=0.5, adaptive=True, private=(),
) -> list[Outcome]:  # fmt: skip
    """Private layers of w; those of v are its own anyway."""
    x = beginning(problem, start)
    vs = {i: x for i in range(len(problem.sizes))}
    own, kept = own_layers(problem, x, private)
    share = dict.fromkeys(vs, alpha)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ws, loss = {}, {}
        for i in cohort:
            w, v, a, losses = np.where(own, kept[i], x), vs[i], share[i], []
            of_w, of_v = np.zeros_like(x), np.zeros_like(x)
            for _ in range(steps(train, i)):
                value, g = problem.oracle(i, w)
                of_mixed = problem.oracle(i, a * v + (1 - a) * w)[1]
                of_v = train.momentum * of_v + direction(a * of_mixed, v, train)
                of_w = train.momentum * of_w + direction(g, w, train)
                if adaptive:
                    a = min(max(a - lr * (v - w) @ of_mixed, 0.0), 1.0)
                v, w = v - lr * of_v, w - lr * of_w
                losses.append(value)
            ws[i], kept[i], vs[i], share[i], loss[i] = w, w, v, a, float(np.mean(losses))
        middle = mean(p, ws)
        x = np.where(own, x, x - train.server_lr * (x - middle))
        personal = {i: share[i] * vs[i] + (1 - share[i]) * np.where(own, kept[i], x) for i in cohort}
        rounds.append(Outcome(x, loss, middle, personal=personal))
    return rounds


def perfedavg(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, alpha=0.01, private=()
) -> list[Outcome]:
    x = beginning(problem, start)
    own, kept = own_layers(problem, x, private)
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            y, b, losses = np.where(own, kept[i], x), np.zeros_like(x), []
            for j in range(0, steps(train, i), 2):
                value, g = problem.oracle(i, y)
                near, g = problem.oracle(i, y - alpha * g)
                b = train.momentum * b + direction(g, y, train)
                y = y - lr * b
                # the mini-batch of a last step that has no partner counts once
                losses += [value] if j + 1 == steps(train, i) else [value, near]
            ys[i], kept[i], loss[i] = y, y, float(np.mean(losses))
        middle = mean(p, ys)
        x = np.where(own, x, x - train.server_lr * (x - middle))
        begin = {i: np.where(own, kept[i], x) for i in cohort}
        personal = {i: begin[i] - alpha * problem.oracle(i, begin[i])[1] for i in cohort}
        rounds.append(Outcome(x, loss, middle, personal=personal))
    return rounds


def ifca(
    problem: Objectives, cohorts: Cohorts, train: Train, start: Vector | None = None, *, others: Sequence[Vector]
) -> list[Outcome]:
    """``others`` are the other models to begin with. ``clients["k"]`` are the models that the cohort took, from 1."""
    models = [beginning(problem, start), *others]

    def best(i: int) -> int:
        return int(np.argmin([problem.oracle(i, model)[0] for model in models]))

    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        took = {i: best(i) for i in cohort}
        ys, loss = {}, {}
        for i in cohort:
            of_client, losses = local_sgd(problem, [i], models[took[i]], train, lr)
            ys[i], loss[i] = of_client[i], losses[i]
        for k, model in enumerate(models):
            share = sum(p[i] for i in cohort if took[i] == k)
            if share:
                average = sum(p[i] * ys[i] for i in cohort if took[i] == k) / share
                models[k] = model - train.server_lr * (model - average)
        personal = {i: models[best(i)] for i in cohort}
        clients = {"k": {i: np.array(took[i] + 1) for i in cohort}}
        rounds.append(Outcome(models[0], loss, mean(p, ys), personal=personal, clients=clients))
    return rounds
