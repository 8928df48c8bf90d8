"""A network in plain torch, problems and settings on which the references of MOON and FedSiam-DA are compared.

A test file binds the fixtures that it wants to their names.
"""

from math import sqrt

import numpy as np
import pytest
import torch
from references import Train
from references_momentum import Logistic
from references_representation import vector
from torch import nn

FEATURES, WIDTH, PROJECTION, CLASSES = 5, 8, 6, 3
SIZES = (3, 11, 7, 1, 20)
EVERYBODY = [[0, 1, 2, 3, 4]]
SOME = [[0, 1], [1, 4], [0, 3], [2, 4], [0, 1], [2, 3], [3, 4]]
PLAIN = Train(4, 0.1)
EVERYTHING = Train(3, 0.2, 0.8, weighting="uniform", weight_decay=0.05, grad_clip=0.4, momentum=0.9)
SIAM = [(hist, dual) for hist in ("prev_epoch", "prev_step", "prev_round") for dual in (True, False)]


class Net(nn.Module):
    """An encoder, MOON's projection, a classifier, and FedSiam-DA's predictor."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(FEATURES, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.projection = nn.Linear(WIDTH, PROJECTION)
        self.classifier = nn.Linear(PROJECTION, CLASSES)
        self.predictor = nn.Sequential(
            nn.Linear(PROJECTION, PROJECTION),
            nn.BatchNorm1d(PROJECTION),
            nn.ReLU(),
            nn.Linear(PROJECTION, PROJECTION),
        )

    def z(self, x):
        return self.projection(self.hidden(self.encoder(x).relu()).relu())

    def forward(self, x):
        return self.classifier(self.z(x))


def net_of(model, training=True):
    net = Net().double()
    net.load_state_dict(model)
    return net.train(training)


def draw(seed, predictor=True):
    rng = np.random.default_rng(seed)
    model = {}
    for name, t in Net().state_dict().items():
        if "num_batches" in name or (name.startswith("predictor") and not predictor):
            continue
        value = rng.normal(size=tuple(t.shape)) * (1.5 / sqrt(t.shape[-1]) if t.ndim == 2 else 0.5)
        if name == "predictor.1.weight":
            value = 1 + value / 2
        if name.endswith("running_var"):
            value = np.exp(value)
        model[name] = torch.tensor(value)
    return model


def make_problem(sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES, FEATURES))
    x, y = [], []
    for n in sizes:
        y.append(rng.integers(0, CLASSES, n))
        x.append(centres[y[-1]] + rng.normal(size=(n, FEATURES)) + rng.normal(scale=0.7, size=FEATURES))
    return Logistic(x, y, CLASSES)


@pytest.fixture(scope="module")
def problem():
    return make_problem()


@pytest.fixture(scope="module")
def start():
    return draw(1)


@pytest.fixture(params=[PLAIN, EVERYTHING], ids=["plain", "everything"])
def train(request):
    return request.param


@pytest.fixture(params=[EVERYBODY * 4, SOME * 2], ids=["full", "partial"])
def cohorts(request):
    return request.param


def tensors(problem, i):
    return torch.tensor(problem.x[i]), torch.tensor(problem.y[i])


def off(one, other):
    return (vector(one.model) - vector(other.model)).abs().max().item()


def same(rounds, others, tolerance=1e-12):
    assert len(rounds) == len(others) > 0
    for one, other in zip(rounds, others, strict=True):
        assert off(one, other) < tolerance
        assert one.loss == pytest.approx(other.loss, abs=tolerance)


def differ(rounds, others, least=1e-4):
    assert off(rounds[-1], others[-1]) > least
