"""FedBN in float64 torch autograd, with BatchNorm and LayerNorm written out, in the setting of references_momentum.py.

A model is a dict of named tensors: a Linear, a BatchNorm (which may be missing), ReLU, a LayerNorm and a Linear. Names
are those of torch modules. Clients have full batches, of more than one sample each. This file shares no code with
fedray.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from references import Cohorts, Train, steps
from references_momentum import Logistic, schedule
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, relu

Model = dict[str, Tensor]
NORMS = ("batch.", "layer.")
MOMENTUM, EPS = 0.1, 1e-5


@dataclass
class Outcome:
    """What a round left behind: the server's model, the mean loss of each client of the cohort, and the personal models
    of all clients."""

    model: Model
    loss: dict[int, float]
    personal: dict[int, Model]


def trainable(model: Model) -> list[str]:
    return [name for name in model if "running" not in name]


def forward(model: Model, x: Tensor) -> tuple[Tensor, Model]:
    """The logits in training mode, and the running statistics after it."""
    z, running = linear(x, model["first.weight"], model["first.bias"]), {}
    if "batch.weight" in model:
        average, var = z.mean(0), z.var(0, correction=0)
        seen = {"batch.running_mean": average.detach(), "batch.running_var": z.detach().var(0, correction=1)}
        running = {name: (1 - MOMENTUM) * model[name] + MOMENTUM * seen[name] for name in seen}
        z = (z - average) / torch.sqrt(var + EPS) * model["batch.weight"] + model["batch.bias"]
    z = relu(z)
    centred = z - z.mean(1, keepdim=True)
    z = centred / torch.sqrt(centred.square().mean(1, keepdim=True) + EPS) * model["layer.weight"] + model["layer.bias"]
    return linear(z, model["last.weight"], model["last.bias"]), running


def trained(model: Model, x: Tensor, y: Tensor, train: Train, lr: float, count: int) -> tuple[Model, float]:
    """So many steps of SGD: clipping, then weight decay, then momentum, which begins with 0."""
    memory = {name: torch.zeros_like(model[name]) for name in trainable(model)}
    losses = []
    for _ in range(count):
        leaves = {name: model[name].clone().requires_grad_() for name in memory}
        logits, running = forward({**model, **leaves}, x)
        loss = cross_entropy(logits, y)
        g = dict(zip(memory, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        norm = torch.cat([each.ravel() for each in g.values()]).norm()
        short = min(1.0, train.grad_clip / float(norm)) if train.grad_clip else 1.0
        for name in memory:
            memory[name] = train.momentum * memory[name] + short * g[name] + train.weight_decay * model[name]
        model = {**model, **running, **{name: model[name] - lr * memory[name] for name in memory}}
        losses.append(loss.item())
    return model, sum(losses) / len(losses)


def fedbn(problem: Logistic, cohorts: Cohorts, train: Train, start: Model) -> list[Outcome]:
    """The norms and their statistics stay with each client; the server's stay those of ``start``."""
    x, kept = {name: value.double() for name, value in start.items()}, {}
    rounds = []
    for _, cohort, lr, p in schedule(problem, cohorts, train):
        ys, loss = {}, {}
        for i in cohort:
            samples, labels = torch.tensor(problem.x[i]).double(), torch.tensor(problem.y[i])
            ys[i], loss[i] = trained({**x, **kept.get(i, {})}, samples, labels, train, lr, steps(train, i))
            kept[i] = {name: value for name, value in ys[i].items() if name.startswith(NORMS)}
        shared = [name for name in x if not name.startswith(NORMS)]
        mean = {name: sum(p[i] * ys[i][name] for i in cohort) for name in shared}
        x = {**x, **{name: x[name] - train.server_lr * (x[name] - mean[name]) for name in shared}}
        personal = {i: {**x, **kept.get(i, {})} for i in range(len(problem.sizes))}
        rounds.append(Outcome(x, loss, personal))
    return rounds
