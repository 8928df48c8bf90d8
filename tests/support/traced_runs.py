"""Runs whose every round is kept, and the paths of gradient descent and torch's SGD to compare them with.

The tests of the identities between algorithms (test_reductions_of_*.py) are made of these. A test file binds the
fixtures that it wants to their names. That coefficients of zero give FedAvg is a contract (test_contracts.py,
test_more_contracts.py) and needs no test besides.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedray.algorithms import Model
from fedray.config import load
from fedray.core.batches import schedule
from fedray.core.seeds import Purpose
from fedray.core.task import cross_entropy
from fedray.data.sources.source import Source
from fedray.engine.opening import open_run
from fedray.engine.pool import LocalPool
from fedray.engine.process import computing_process, describe
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.models.small import Logistic

SEED, LR, ROUNDS = 5, 0.1, 6
TOLERANCE = 1e-5

FULL = {"train.batch_size": "full", "train.local_steps": 4}
ONE_STEP = FULL | {"train.local_steps": 1}
# two of five clients in batches of four: with epochs, J_i are from 2 to 10
EVEN = {"train.batch_size": 4, "train.local_steps": 3, "train.cohort_size": 2}
UNEVEN = {"train.batch_size": 4, "train.local_epochs": 2, "train.cohort_size": 2}
UNIFORM = {"train.weighting": "uniform"}


@dataclass(frozen=True)
class Problem:
    """The clients' objectives f_i and the model to start from; gradients are torch's, in float64."""

    source: Source
    model: nn.Module
    loss: Callable

    @property
    def sizes(self):
        return np.bincount(self.source.client_train)

    @property
    def start(self):
        return flat(self.model)

    def at(self, w):
        module = copy.deepcopy(self.model).double()
        vector_to_parameters(torch.tensor(w), module.parameters())
        return module

    def mean_loss(self, module, rows=slice(None)):
        x, y = self.source.x_train[rows], self.source.y_train[rows]
        return self.loss(module(torch.from_numpy(x).double()), torch.from_numpy(y)).mean()

    def gradient(self, i, w):
        module = self.at(w)
        self.mean_loss(module, self.source.client_train == i).backward()
        return np.concatenate([p.grad.numpy().ravel() for p in module.parameters()])

    def average(self, module):
        """Returns (1/N) sum_i f_i."""
        clients = range(len(self.sizes))
        return sum(self.mean_loss(module, self.source.client_train == i) for i in clients) / len(clients)

    def local_sgd(self, i, w, steps, lr=LR, pull=0.0):
        for _ in range(steps):
            w = w - lr * (self.gradient(i, w) + pull)
        return w

    def optimum(self, weight_decay=0.0):
        """Returns the minimum of (1/N) sum_i f_i, each with the weight decay's own term."""
        module = self.at(self.start)
        lbfgs = torch.optim.LBFGS(
            module.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def objective():
            lbfgs.zero_grad()
            decay = parameters_to_vector(module.parameters()).square().sum() * weight_decay / 2
            value = self.average(module) + decay
            value.backward()
            return value

        lbfgs.step(objective)
        return flat(module)


OBJECTIVES = {"samples": Problem.mean_loss, "uniform": Problem.average}


class Point(nn.Module):
    """The model is w itself; a sample (s, b) has the loss |s (w - b)|^2 / 2, entry by entry."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float32))

    def forward(self, x):
        s, b = x.chunk(2, dim=1)
        return s * (self.w - b)


def half_square(outputs, targets):
    return outputs.square().sum(1) / 2


def flat(module):
    return parameters_to_vector(module.parameters()).detach().double().numpy()


def make_logistic(sizes=(3, 11, 7, 1, 20), alike=False):
    """Returns clients of given sizes; with ``alike``, they and the public set have the same samples."""
    rng = np.random.default_rng(11)
    centres = rng.normal(size=(3, 5))

    def draw(n, shift=0.0):
        y = rng.integers(0, 3, n)
        return (centres[y] + 1.2 * rng.normal(size=(n, 5)) + shift).astype(np.float32), y

    parts = [draw(n, rng.normal(scale=0.7, size=5)) for n in sizes]
    test, public = draw(10), draw(30)
    if alike:
        parts = [public for _ in sizes]
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    owners = np.repeat(np.arange(len(parts)), [len(part[1]) for part in parts])
    model = Logistic((5,), 3)
    vector_to_parameters(torch.from_numpy(rng.normal(size=18)).float(), model.parameters())
    return Problem(Source("logistic", x, y, *test, 3, None, None, owners, None, *public), model, cross_entropy)


def make_quadratics(sizes=(2, 4, 6, 5, 3), dimension=6):
    """Returns quadratic objectives; a client's samples are copies of one, so that there is no noise."""
    rng = np.random.default_rng(4)
    clients = len(sizes)
    s = np.sqrt(rng.uniform(0.5, 3, (clients, dimension)))
    x = np.hstack([s, rng.normal(size=(clients, dimension))]).astype(np.float32)
    owners = np.repeat(np.arange(clients), sizes)
    y = np.zeros(len(owners), np.int64)
    source = Source("quadratics", x[owners], y, x[:1], y[:1], dimension, client_train=owners)
    return Problem(source, Point(rng.normal(size=dimension)), half_square)


@pytest.fixture(scope="module")
def logistic():
    return make_logistic()


@pytest.fixture(scope="module")
def quadratics():
    return make_quadratics()


@pytest.fixture(params=[FULL, UNEVEN], ids=["full", "partial-uneven"])
def anyhow(request):
    return request.param


@pytest.fixture(params=[ONE_STEP, FULL, EVEN], ids=["one-step", "full", "partial"])
def even(request):
    """Settings under which everybody makes the same number of steps."""
    return request.param


@dataclass
class Trace:
    """x^1 .. x^{R+1} as they are evaluated; of rounds 1 .. R, after each, cohorts, server vectors, states, tables,
    each client's last round, and the earlier models that are kept."""

    models: list = field(default_factory=list)
    cohorts: list = field(default_factory=list)
    vectors: list = field(default_factory=list)
    states: list = field(default_factory=list)
    tables: list = field(default_factory=list)
    last: list = field(default_factory=list)
    past: list = field(default_factory=list)

    def record(self, opened_run, P):
        def plain(vectors):
            return {name: float64(vector)[:P] for name, vector in vectors.items()}

        state = opened_run.state
        server = state.server
        self.models.append(float64(opened_run.experiment.algorithm.eval_model(server))[:P])
        if not server.round:
            return
        read = opened_run.worker.clients.states.read
        self.cohorts.append(list(server.cohort.ids))
        self.vectors.append(plain(server.vectors))
        self.states.append({client: plain(read(file)) for client, file in state.clients.items()})
        self.tables.append({name: dict(column) for name, column in server.table.items()})
        self.last.append(dict(server.last_round))
        self.past.append({number: plain(read(file))["x"] for number, file in state.earlier.handles.items()})


def trace(folder: Path, problem, settings, name, **hyper):
    config = {
        "algorithm.name": name,
        "data.partition.kind": "natural",
        "train.lr": LR,
        "run.rounds": ROUNDS,
        "run.seed": SEED,
        "run.output": str(folder),
        "run.eval_every": 0,
        "run.checkpoint_every": 0,
        "engine.kind": "local",
        "engine.vectorize": False,
        **settings,
        **{f"algorithm.{key}": value for key, value in hyper.items()},
    }
    experiment, data = resolve(load(config), CustomObjects(problem.source, problem.model, problem.loss))

    def pool(worker):
        return LocalPool(worker), [describe("cpu")]

    found = Trace()
    with computing_process(1, False), open_run(experiment, data, pool, False) as opened_run:
        found.record(opened_run, experiment.facts.parameters)
        for _ in opened_run.rounds():
            found.record(opened_run, experiment.facts.parameters)
    assert len(found.cohorts) == experiment.rounds
    return found


@pytest.fixture
def run(tmp_path):
    """A function of (problem, settings, algorithm, **hyper) that runs them and returns the trace."""

    def numbered(*args, **hyper):
        return trace(tmp_path / str(len(list(tmp_path.iterdir()))), *args, **hyper)

    return numbered


def float64(vector):
    """Returns the numbers of a vector, or a model's parameters."""
    vector = vector.parameters if isinstance(vector, Model) else vector
    return torch.as_tensor(vector).double().numpy()


def off(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def same(one, other, tolerance=TOLERANCE):
    """Checks that traces or paths agree in every round, and go somewhere."""
    one, other = getattr(one, "models", one), getattr(other, "models", other)
    assert len(one) == len(other) > 3
    assert off(other[0], other[-1]) > 0.03
    for r, (x, expected) in enumerate(zip(one, other, strict=True)):
        assert off(x, expected) <= tolerance, f"x^{r + 1} is off by {off(x, expected):.1e}"


def differ(one, other, least=1e-3):
    assert off(one.models[-1], other.models[-1]) > least


def torch_sgd(problem, objectives, lr=LR, **options):
    """Returns the path of torch.optim.SGD in float64; each step has an objective of the module."""
    module = problem.at(problem.start)
    optimizer = torch.optim.SGD(module.parameters(), lr, **options)
    path = [flat(module)]
    for objective in objectives:
        optimizer.zero_grad()
        objective(module).backward()
        optimizer.step()
        path.append(flat(module))
    return path


def descent(problem, weighting, **options):
    """Returns the path of torch.optim.SGD with the objective that ``weighting`` stands for, a step for each round."""
    objective = OBJECTIVES[weighting]
    return torch_sgd(problem, [lambda module: objective(problem, module)] * ROUNDS, **options)


def minibatches(problem, settings):
    """Yields the objectives of a single client's steps, in the order in which fedray draws its batches."""
    (samples,) = problem.sizes
    steps, epochs = settings.get("train.local_steps"), settings.get("train.local_epochs")
    for number in range(1, ROUNDS + 1):
        plan = schedule(SEED, Purpose.BATCHES, number, 0, samples, settings["train.batch_size"], steps, epochs)
        for order, count in zip(plan.order, plan.counts, strict=True):
            yield lambda module, rows=order[:count]: problem.mean_loss(module, rows)
