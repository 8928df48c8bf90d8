"""MOON and FedSiam-DA as ALGORITHMS.md prints them: float64 torch autograd, in the setting of references_momentum.py.

A model is a dict of named tensors: the encoder is one Linear and ReLU, on which sit the hidden layer, the projection
and the classifier, and for FedSiam-DA beside the classifier the predictor. Names are those of torch modules.
Only the numbers of samples in a client's batches can be told, so batches other than full ones need data that are alike.
This file shares no code and no data structure with fedray, whose algorithms the tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from references import Cohorts, Train, steps
from references_momentum import Logistic, schedule
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, log_softmax, relu

Model = dict[str, Tensor]
BATCH_NORM, BATCH_NORM_MOMENTUM, BATCH_NORM_EPS = "predictor.1", 0.1, 1e-5
COSINE_EPS = 1e-8


@dataclass
class Outcome:
    """What a round left behind; loss, ys, similarity and clients' past models are by client."""

    model: Model
    loss: dict[int, float]
    x_mean: Model
    ys: dict[int, Model]
    past: dict[int, list[Model]]
    similarity: dict[int, float] = field(default_factory=dict)


def trainable(model: Model) -> list[str]:
    return sorted(name for name in model if "running" not in name)


def vector(model: Model) -> Tensor:
    return torch.cat([model[name].ravel() for name in trainable(model)])


def mean(p: dict[int, float], models: dict[int, Model]) -> Model:
    return {name: sum(p[i] * models[i][name] for i in p) for name in models[min(p)]}


def layer(model: Model, name: str, x: Tensor) -> Tensor:
    return linear(x, model[f"{name}.weight"], model[f"{name}.bias"])


def project(model: Model, x: Tensor) -> Tensor:
    """z."""
    return layer(model, "projection", relu(layer(model, "hidden", relu(layer(model, "encoder", x)))))


def predict(model: Model, z: Tensor) -> tuple[Tensor, Model]:
    """p in training mode, and the running statistics after it; a batch of one sample uses those and leaves them."""
    z = layer(model, "predictor.0", z)
    average, var = (model[f"{BATCH_NORM}.running_{s}"] for s in ("mean", "var"))
    running = {"mean": average, "var": var}
    if len(z) > 1:
        average, var = z.mean(0), z.var(0, correction=0)
        seen = {"mean": average.detach(), "var": z.detach().var(0, correction=1)}
        running = {s: (1 - BATCH_NORM_MOMENTUM) * running[s] + BATCH_NORM_MOMENTUM * seen[s] for s in seen}
    z = (z - average) / torch.sqrt(var + BATCH_NORM_EPS)
    z = z * model[f"{BATCH_NORM}.weight"] + model[f"{BATCH_NORM}.bias"]
    return layer(model, "predictor.3", relu(z)), {f"{BATCH_NORM}.running_{s}": t for s, t in running.items()}


def cosine(a: Tensor, b: Tensor) -> Tensor:
    norms = a.norm(dim=-1).clamp_min(COSINE_EPS) * b.norm(dim=-1).clamp_min(COSINE_EPS)
    return (a * b).sum(-1) / norms


def contrast(z: Tensor, z_global: Tensor, z_past: Sequence[Tensor], temperature: float) -> Tensor:
    """L_con, the batch's mean; 0 without past models."""
    similar = torch.stack([cosine(z, other) for other in (z_global, *z_past)], dim=1)
    return -log_softmax(similar / temperature, dim=1)[:, 0].mean()


def attentive(model: Model) -> Model:
    """A copy to take gradients at."""
    names = trainable(model)
    return {name: t.detach().clone().requires_grad_(name in names) for name, t in model.items()}


def gradient(loss: Tensor, model: Model) -> Model:
    names = trainable(model)
    gradients = torch.autograd.grad(loss, [model[name] for name in names], allow_unused=True, materialize_grads=True)
    return dict(zip(names, gradients, strict=True))


def descend(y: Model, g: Model, velocity: Model, train: Train, lr: float) -> tuple[Model, Model]:
    """Rule R2; y's buffers stay."""
    norm = vector(g).norm()
    clip = train.grad_clip / norm if 0 < train.grad_clip < norm else 1.0
    velocity = {k: train.momentum * velocity.get(k, 0) + clip * g[k] + train.weight_decay * y[k] for k in g}
    return y | {k: y[k] - lr * velocity[k] for k in g}, velocity


def batch(problem: Logistic, i: int, j: int, batches: Sequence[Sequence[int]] | None) -> tuple[Tensor, Tensor]:
    """The samples of step j = 0, 1, ...; batches[i] are the sizes of one epoch's."""
    n = problem.sizes[i] if batches is None else batches[i][j % len(batches[i])]
    return torch.tensor(problem.x[i][:n], dtype=torch.float64), torch.tensor(problem.y[i][:n])


def task(y: Model, z: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(layer(y, "classifier", z), labels)


def moon(
    problem: Logistic,
    cohorts: Cohorts,
    train: Train,
    start: Model,
    *,
    mu=1.0,
    temperature=0.5,
    buffer=1,
    first="skip",
    initial: Callable[[int], Model] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
) -> list[Outcome]:
    if first not in ("skip", "init", "global"):
        raise ValueError(first)
    x, pool = start, {}
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            if i not in pool:
                pool[i] = []
                if first != "skip":
                    pool[i] = [initial(i) if first == "init" else x]
            y, velocity, losses = x, {}, []
            for j in range(steps(train, i)):
                samples, labels = batch(problem, i, j, batches)
                at = attentive(y)
                z = project(at, samples)
                value = task(at, z, labels)
                l_con = contrast(z, project(x, samples), [project(prev, samples) for prev in pool[i]], temperature)
                y, velocity = descend(y, gradient(value + mu * l_con, at), velocity, train, lr)
                losses.append(value.item())
            ys[i], loss[i] = y, sum(losses) / len(losses)
            pool[i] = [y, *pool[i]][:buffer]
        x_mean = mean(p, ys)
        x = {name: x[name] + train.server_lr * (x_mean[name] - x[name]) for name in x}
        rounds.append(Outcome(x, loss, x_mean, ys, dict(pool)))
    return rounds


def global_step(wf: Model, samples: Tensor, zk: Tensor, mu: float, lr: float) -> Model:
    """(a): equation 8. No gradient reaches zk."""
    at = attentive(wf)
    pf, statistics = predict(at, project(at, samples))
    g = gradient(mu / 2 * -cosine(pf, zk.detach()).mean(), at)
    return wf | statistics | {k: wf[k] - lr * g[k] for k in g}


def siamese(zk: Tensor, pk: Tensor, zf: Tensor, zh: Tensor | None) -> Tensor:
    """What (b), equations 9 to 11, adds to the task loss, over mu."""
    away = 0 if zh is None else cosine(zh.detach(), zk).mean()
    return away - cosine(pk, zf.detach()).mean() / 2


def hist_model(path: list[Model], last: Model | None, hist: str, epoch: int) -> Model | None:
    """For the step from path[-1], where path is y_0, y_1, ...; last is the previous participation's final model."""
    j = len(path) - 1
    if hist == "prev_step" and j >= 1:
        return path[j - 1]
    if hist == "prev_epoch" and j >= epoch:
        return path[j // epoch * epoch]
    return last


def similarities(ys: dict[int, Model], w0: Model) -> dict[int, float]:
    """D_i."""
    return {i: max(0.0, cosine(vector(y), vector(w0)).item()) for i, y in ys.items()}


def dual_mean(ys: dict[int, Model], w0: Model) -> Model:
    D = similarities(ys, w0)
    total = sum(D.values())
    return w0 if total < 1e-12 else mean({i: D[i] / total for i in D}, ys)


def fedsiam_da(
    problem: Logistic,
    cohorts: Cohorts,
    train: Train,
    start: Model,
    *,
    mu=0.1,
    hist="prev_epoch",
    dual=True,
    batches: Sequence[Sequence[int]] | None = None,
) -> list[Outcome]:
    if hist not in ("prev_epoch", "prev_step", "prev_round"):
        raise ValueError(hist)
    x, last = start, {}
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            path, wf, velocity, losses = [x], x, {}, []
            for j in range(steps(train, i)):
                samples, labels = batch(problem, i, j, batches)
                at = attentive(path[-1])
                zk = project(at, samples)
                pk, statistics = predict(at, zk)
                wf = global_step(wf, samples, zk, mu, lr)
                past = hist_model(path, last.get(i), hist, 1 if batches is None else len(batches[i]))
                zh = None if past is None else project(past, samples)
                value = task(at, zk, labels)
                g = gradient(value + mu * siamese(zk, pk, project(wf, samples), zh), at)
                y, velocity = descend(path[-1], g, velocity, train, lr)
                path.append(y | statistics)
                losses.append(value.item())
            ys[i], loss[i] = path[-1], sum(losses) / len(losses)
        last = last | ys
        x_mean = mean(p, ys)
        x = dual_mean(ys, x_mean) if dual else x_mean
        rounds.append(Outcome(x, loss, x_mean, ys, {i: [last[i]] for i in last}, similarities(ys, x_mean)))
    return rounds


@dataclass
class OfClasses:
    """What a round of FedProto left behind: the clients' models, their task losses, and the prototypes by class."""

    models: dict[int, Model]
    loss: dict[int, float]
    prototypes: dict[int, Tensor]


def fedproto(problem: Logistic, cohorts: Cohorts, train: Train, start: Model, *, lam=1.0) -> list[OfClasses]:
    """V.3. The representation is what goes into the classifier, relu(encoder)."""
    models: dict[int, Model] = {}
    prototypes: dict[int, Tensor] = {}
    rounds = []
    for _, cohort, lr, _ in schedule(problem, cohorts, train):
        loss, held = {}, []
        for i in cohort:
            y, velocity, losses = models.get(i, start), {}, []
            for j in range(steps(train, i)):
                samples, labels = batch(problem, i, j, None)
                at = attentive(y)
                z = relu(layer(at, "encoder", samples))
                value, pull = task(at, z, labels), 0.0
                for sample, c in zip(z, labels.tolist(), strict=True):
                    if c in prototypes:
                        pull = pull + ((sample - prototypes[c]) ** 2).sum() / len(labels)
                y, velocity = descend(y, gradient(value + lam * pull, at), velocity, train, lr)
                losses.append(value.item())
            models[i], loss[i] = y, sum(losses) / len(losses)
            samples, labels = batch(problem, i, 0, None)
            held += zip(relu(layer(y, "encoder", samples)).detach(), labels.tolist(), strict=True)
        for c in {label for _, label in held}:
            prototypes[c] = torch.stack([z for z, label in held if label == c]).mean(0)
        rounds.append(OfClasses(dict(models), loss, dict(prototypes)))
    return rounds
