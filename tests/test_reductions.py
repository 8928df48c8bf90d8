"""Identities that hold between the algorithms and with known optimizers: what ALGORITHMS.md lists under '10 Test'.

That coefficients of zero give FedAvg is a contract (test_contracts.py, test_momentum_contracts.py) and not here.
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

from fedray.algorithms import ClientPhase, Model, find_algorithm
from fedray.config import load
from fedray.core.batches import schedule
from fedray.core.client import Stack
from fedray.core.local_data import Samples
from fedray.core.local_training import LocalTraining
from fedray.core.network import LoopNetwork, cross_entropy
from fedray.core.seeds import Purpose
from fedray.data.source import Source
from fedray.engine.opening import open_run
from fedray.engine.pool import LocalPool
from fedray.engine.process import computing_process, describe
from fedray.experiment import Own
from fedray.models.small import Logistic
from fedray.resolve import resolve

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
        """(1/N) sum_i f_i."""
        clients = range(len(self.sizes))
        return sum(self.mean_loss(module, self.source.client_train == i) for i in clients) / len(clients)

    def local_sgd(self, i, w, steps, lr=LR, pull=0.0):
        for _ in range(steps):
            w = w - lr * (self.gradient(i, w) + pull)
        return w

    def optimum(self, weight_decay=0.0):
        """Of (1/N) sum_i f_i, each with the weight decay's own term."""
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
    """w itself; a sample (s, b) has the loss |s (w - b)|^2 / 2, entry by entry."""

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
    """Alike: the clients and the public set have the same samples."""
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
    """A client's samples are copies of one, so that there is no noise."""
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
    """The same number of steps for everybody."""
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
    experiment, data = resolve(load(config), Own(problem.source, problem.model, problem.loss))

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
    """run(problem, settings, algorithm, **hyper)."""

    def numbered(*args, **hyper):
        return trace(tmp_path / str(len(list(tmp_path.iterdir()))), *args, **hyper)

    return numbered


def float64(vector):
    """The numbers of a vector, or a model's parameters."""
    vector = vector.parameters if isinstance(vector, Model) else vector
    return torch.as_tensor(vector).double().numpy()


def off(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def same(one, other, tolerance=TOLERANCE):
    """Traces or paths agree in every round, and go somewhere."""
    one, other = getattr(one, "models", one), getattr(other, "models", other)
    assert len(one) == len(other) > 3
    assert off(other[0], other[-1]) > 0.03
    for r, (x, expected) in enumerate(zip(one, other, strict=True)):
        assert off(x, expected) <= tolerance, f"x^{r + 1} is off by {off(x, expected):.1e}"


def differ(one, other, least=1e-3):
    assert off(one.models[-1], other.models[-1]) > least


def torch_sgd(problem, objectives, lr=LR, **options):
    """The path of torch.optim.SGD in float64: an objective of the module for each step."""
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
    """The path of torch.optim.SGD with the objective that ``weighting`` stands for, a step for each round."""
    objective = OBJECTIVES[weighting]
    return torch_sgd(problem, [lambda module: objective(problem, module)] * ROUNDS, **options)


def minibatches(problem, settings):
    """The objectives of a single client's steps, in DESIGN.md's order of batches."""
    (samples,) = problem.sizes
    steps, epochs = settings.get("train.local_steps"), settings.get("train.local_epochs")
    for number in range(1, ROUNDS + 1):
        plan = schedule(SEED, Purpose.BATCHES, number, 0, samples, settings["train.batch_size"], steps, epochs)
        for order, count in zip(plan.order, plan.counts, strict=True):
            yield lambda module, rows=order[:count]: problem.mean_loss(module, rows)


@pytest.mark.parametrize("weighting", OBJECTIVES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_one_step_of_fedavg_is_gradient_descent(run, logistic, weighting, weight_decay, server_lr):
    settings = ONE_STEP | {"train.weighting": weighting, "train.weight_decay": weight_decay}
    fedavg = run(logistic, settings | {"train.server_lr": server_lr}, "fedavg")
    same(fedavg, descent(logistic, weighting, lr=LR * server_lr, weight_decay=weight_decay))


@pytest.mark.parametrize("steps", [{"train.local_steps": 4}, {"train.local_epochs": 2}], ids=["steps", "epochs"])
def test_fedavg_of_one_client_is_plain_sgd(run, steps):
    problem, settings = make_logistic((11,)), {"train.batch_size": 4, **steps}
    path = torch_sgd(problem, minibatches(problem, settings))
    same(run(problem, settings, "fedavg"), path[:: len(path) // ROUNDS])


@pytest.mark.parametrize("settings", [ONE_STEP, EVEN | {"train.local_steps": 1}], ids=["full", "partial"])
def test_one_step_of_fedprox_is_fedavg_whatever_mu(run, logistic, settings):
    fedavg = run(logistic, settings, "fedavg")
    for mu in (0.01, 1.0, 50.0):
        same(run(logistic, settings, "fedprox", mu=mu), fedavg)
    two = settings | {"train.local_steps": 2}
    differ(run(logistic, two, "fedprox", mu=1.0), run(logistic, two, "fedavg"))


def test_slowmo_is_fedavgm_while_the_lr_is_constant(run, logistic, anyhow):
    fedavgm = run(logistic, anyhow, "fedavgm", beta=0.7)
    same(run(logistic, anyhow, "slowmo", beta=0.7, alpha=1.0), fedavgm)
    slower = run(logistic, anyhow | {"train.server_lr": 0.6}, "fedavgm", beta=0.7)
    same(run(logistic, anyhow, "slowmo", beta=0.7, alpha=0.6), slower)
    differ(fedavgm, run(logistic, anyhow, "fedavg"))


def test_slowmo_halves_its_momentum_with_the_lr(run, logistic):
    """The lr is halved from every round to the next, and v = gamma_r u with it."""
    p = logistic.sizes / logistic.sizes.sum()
    x, v, path, velocities = logistic.start, 0.0, [logistic.start], []
    for r in range(ROUNDS):
        lr = 0.4 * 0.5**r
        d = x - sum(p[i] * logistic.local_sgd(i, x, 4, lr) for i in range(5))
        v = 0.7 * v / 2 + d
        x = x - v
        path.append(x)
        velocities.append(v / lr)
    halved = FULL | {"train.lr": 0.4, "train.lr_decay": 0.5}
    slowmo = run(logistic, halved, "slowmo", beta=0.7)
    same(slowmo, path)
    same([after["u"] for after in slowmo.vectors], velocities)
    differ(slowmo, run(logistic, halved, "fedavgm", beta=0.7))


def test_fedmom_is_nesterov_at_the_server(run, logistic, anyhow):
    fedmom = run(logistic, anyhow, "fedmom", beta=0.7)
    same(run(logistic, anyhow, "fedavgm", beta=0.7, nesterov=True), fedmom)
    differ(fedmom, run(logistic, anyhow, "fedavgm", beta=0.7))


@pytest.mark.parametrize("scaling", ["paper", "fedsim"])
def test_adabest_without_mu_is_fedmom(run, logistic, anyhow, scaling):
    uniform = anyhow | UNIFORM
    same(
        run(logistic, uniform, "adabest", mu=0.0, beta=0.7, mu_scaling=scaling),
        run(logistic, uniform, "fedmom", beta=0.7),
    )


@pytest.mark.parametrize("carry", ["y", "velocity"])
def test_fastslowmo_without_worker_momentum_is_fedmom(run, logistic, anyhow, carry):
    fastslowmo = run(logistic, anyhow, "fastslowmo", gamma=0.0, gamma_a=0.7, carry=carry)
    same(fastslowmo, run(logistic, anyhow, "fedmom", beta=0.7))


@pytest.mark.parametrize("carry", ["y", "velocity"])
def test_fastslowmo_without_aggregator_momentum_is_fednag(run, logistic, anyhow, carry):
    fednag = run(logistic, anyhow, "fednag", gamma=0.7)
    same(run(logistic, anyhow, "fastslowmo", gamma=0.7, gamma_a=0.0, carry=carry), fednag)
    differ(fednag, run(logistic, anyhow, "fedavg"))


def test_what_fastslowmo_carries_matters(run, logistic, anyhow):
    y, velocity = (run(logistic, anyhow, "fastslowmo", carry=carry) for carry in ("y", "velocity"))
    differ(y, velocity, 1e-2)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("steps", [{"train.local_steps": 4}, {"train.local_epochs": 2}], ids=["steps", "epochs"])
def test_fednag_of_one_client_is_torchs_nesterov_without_rounds(run, steps, weight_decay):
    problem = make_logistic((11,))
    settings = {"train.batch_size": 4, "train.weight_decay": weight_decay, **steps}
    path = torch_sgd(problem, minibatches(problem, settings), momentum=0.8, nesterov=True, weight_decay=weight_decay)
    same(run(problem, settings, "fednag", gamma=0.8), path[:: len(path) // ROUNDS])


def torchs_nesterov(problem, i, x, buffers, steps, momentum):
    """J steps of client i from x and from momentum buffers, one for each parameter."""
    module = problem.at(x)
    optimizer = torch.optim.SGD(module.parameters(), LR, momentum=momentum, nesterov=True)
    for parameter, buffer in zip(module.parameters(), buffers, strict=False):
        optimizer.state[parameter]["momentum_buffer"] = buffer.clone()
    for _ in range(steps):
        optimizer.zero_grad()
        problem.mean_loss(module, problem.source.client_train == i).backward()
        optimizer.step()
    return flat(module), [optimizer.state[parameter]["momentum_buffer"] for parameter in module.parameters()]


@pytest.mark.parametrize("partial", [{}, {"train.cohort_size": 2}], ids=["full", "partial"])
def test_fednag_averages_torchs_momentum_buffers(run, logistic, partial):
    """Averaging x and y is averaging x and the buffer of torch.optim.SGD(nesterov=True): the map is linear."""
    fednag = run(logistic, FULL | partial, "fednag", gamma=0.7)
    x, buffers, path = logistic.start, [], [logistic.start]
    for cohort in fednag.cohorts:
        p = logistic.sizes[cohort] / logistic.sizes[cohort].sum()
        xs, their = zip(*(torchs_nesterov(logistic, i, x, buffers, 4, 0.7) for i in cohort), strict=True)
        x = p @ np.array(xs)
        buffers = [
            sum(share * buffer for share, buffer in zip(p, each, strict=True)) for each in zip(*their, strict=True)
        ]
        path.append(x)
    same(fednag, path)


def test_where_rounds_end_does_not_matter_to_fednag_of_one_client(run):
    problem = make_logistic((11,))
    path = torch_sgd(problem, [problem.mean_loss] * 24, momentum=0.8, nesterov=True)
    for tau in (1, 2, 4, 8):
        settings = FULL | {"train.local_steps": tau, "run.rounds": 24 // tau}
        same(run(problem, settings, "fednag", gamma=0.8), path[::tau])


@pytest.mark.parametrize("variant", ["pre", "step"])
@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_domo_without_local_momentum_is_fedavgm(run, logistic, even, variant, alpha):
    fedavgm = run(logistic, even | {"train.server_lr": alpha}, "fedavgm", beta=0.7)
    same(run(logistic, even, "domo", mu_s=0.7, mu_l=0.0, beta=0.0, alpha=alpha, variant=variant), fedavgm)


def test_domos_variants_differ_even_at_one_step(run, logistic):
    pre, step = (run(logistic, ONE_STEP, "domo", mu_l=0.0, variant=variant) for variant in ("pre", "step"))
    differ(pre, step)


def test_fedadc_with_equal_betas_is_ghbm_of_tau_one(run, logistic, anyhow):
    fedadc = run(logistic, anyhow, "fedadc", beta_g=0.7, beta_l=0.7)
    same(fedadc, run(logistic, anyhow, "ghbm", tau=1, beta=0.7))
    same(run(logistic, anyhow, "fedadc", beta_g=0.7), fedadc, 0)
    differ(fedadc, run(logistic, anyhow, "fedavg"))


@pytest.mark.parametrize("variant", ["heavyball", "nesterov"])
@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_fedadc_without_local_momentum_is_fedavgm(run, logistic, anyhow, variant, alpha):
    fedavgm = run(logistic, anyhow | {"train.server_lr": alpha}, "fedavgm", beta=0.7)
    same(run(logistic, anyhow, "fedadc", beta_g=0.7, beta_l=0.0, alpha=alpha, variant=variant), fedavgm)


@pytest.mark.parametrize("weighting", OBJECTIVES)
@pytest.mark.parametrize("name", ["mime", "mimelite"])
def test_one_step_of_mime_is_gradient_descent(run, logistic, name, weighting):
    same(run(logistic, ONE_STEP | {"train.weighting": weighting}, name), descent(logistic, weighting))


@pytest.mark.parametrize("weighting", OBJECTIVES)
@pytest.mark.parametrize("dampening", [True, False])
@pytest.mark.parametrize("name", ["mimemom", "mimelitemom"])
def test_one_step_of_mimemom_is_momentum_sgd(run, logistic, name, dampening, weighting):
    settings = ONE_STEP | {"train.lr": 0.2, "train.weighting": weighting}
    # with s = (1 - beta) times torch's buffer, dampening is a smaller lr; torch's own would not damp the first gradient
    expected = descent(logistic, weighting, lr=0.2 * (0.3 if dampening else 1), momentum=0.7)
    same(run(logistic, settings, name, beta=0.7, dampening=dampening), expected)


STEEP = FULL | UNIFORM | {"train.lr": 0.2, "run.rounds": 80}
PARTLY = STEEP | {"train.cohort_size": 2, "run.rounds": 120}
LONG = {"train.local_steps": 10}
OPTIMAL = {
    "mime": ("mime", {}, STEEP),
    "scaffold-1": ("scaffold", {"option": 1}, STEEP),
    "scaffold-2": ("scaffold", {"option": 2}, STEEP),
    "scaffold-1-partial": ("scaffold", {"option": 1}, PARTLY),
    "scaffold-2-partial": ("scaffold", {"option": 2}, PARTLY),
    "feddyn": ("feddyn", {"alpha": 1.0}, STEEP | LONG),
    "feddyn-partial": ("feddyn", {"alpha": 1.0}, PARTLY | LONG),
}


@pytest.fixture(
    scope="module",
    params=[(make_quadratics, 0.0), (make_logistic, 0.3)],
    ids=["quadratics", "logistic"],
)
def convex(request):
    """A problem, its weight decay, which belongs to f_i, and the minimum of (1/N) sum_i f_i."""
    make, weight_decay = request.param
    problem = make()
    return problem, {"train.weight_decay": weight_decay}, problem.optimum(weight_decay)


@pytest.mark.parametrize(("name", "hyper", "settings"), OPTIMAL.values(), ids=OPTIMAL)
def test_the_optimum_of_heterogeneous_clients_is_reached(run, convex, name, hyper, settings):
    problem, decay, optimum = convex
    assert off(run(problem, settings | decay, name, **hyper).models[-1], optimum) <= TOLERANCE


def test_fedavg_is_biased(run, convex):
    problem, decay, optimum = convex
    fedavg = run(problem, STEEP | decay, "fedavg")
    assert off(fedavg.models[-1], fedavg.models[-2]) < TOLERANCE
    assert off(fedavg.models[-1], optimum) > 0.01


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("weighting", OBJECTIVES)
def test_c_of_scaffold_is_the_mean_of_all_clients(run, logistic, anyhow, option, weighting):
    """A client that was never sampled counts with zero."""
    scaffold = run(logistic, anyhow | {"train.weighting": weighting, "run.rounds": 12}, "scaffold", option=option)
    p = logistic.sizes / logistic.sizes.sum() if weighting == "samples" else np.full(5, 0.2)
    for after, states in zip(scaffold.vectors, scaffold.states, strict=True):
        assert off(after["c"], sum(p[i] * state["c"] for i, state in states.items())) <= TOLERANCE
    if "train.cohort_size" in anyhow:
        assert len(scaffold.states[0]) == 2


@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("weighting", OBJECTIVES)
def test_one_step_of_scaffold_is_gradient_descent(run, logistic, option, weighting):
    scaffold = run(logistic, ONE_STEP | {"train.weighting": weighting}, "scaffold", option=option)
    same(scaffold, descent(logistic, weighting))


def test_h_of_feddyn_is_the_mean_state(run, logistic, anyhow):
    """fedray keeps q = -h / alpha and q_i = -gstate_i / alpha."""
    feddyn = run(logistic, anyhow | {"run.rounds": 12}, "feddyn", alpha=0.3)
    for after, states in zip(feddyn.vectors, feddyn.states, strict=True):
        assert off(after["q"], sum(state["q"] for state in states.values()) / 5) <= TOLERANCE


@pytest.mark.parametrize("partial", [{}, {"train.cohort_size": 2}], ids=["full", "partial"])
def test_states_of_feddyn_are_gradients_where_clients_solve_exactly(run, quadratics, partial):
    alpha = 0.5
    feddyn = run(quadratics, FULL | {"train.lr": 0.4, "train.local_steps": 60} | partial, "feddyn", alpha=alpha)
    for r, cohort in enumerate(feddyn.cohorts):
        for i in cohort:
            q = feddyn.states[r][i]["q"]
            before = feddyn.states[r - 1].get(i, {"q": 0.0})["q"] if r else 0.0
            y = feddyn.models[r] + q - before
            np.testing.assert_allclose(-alpha * q, quadratics.gradient(i, y), atol=1e-5)


def test_feddyn_begins_without_state_and_prox(run, logistic):
    """Round 1, J = 1: y_i = x - eta g_i, so that q_i is the step and x^2 is twice as far as the mean."""
    first = ONE_STEP | {"run.rounds": 1}
    feddyn = run(logistic, first, "feddyn", alpha=0.7)
    x, steps = logistic.start, [-LR * logistic.gradient(i, logistic.start) for i in range(5)]
    for i in range(5):
        assert off(feddyn.states[0][i]["q"], steps[i]) <= TOLERANCE
    average = run(logistic, first, "feddyn", alpha=0.7, eval="avg_selected")
    assert off(average.models[1], x + np.mean(steps, axis=0)) <= TOLERANCE
    assert off(feddyn.models[1], x + 2 * np.mean(steps, axis=0)) <= TOLERANCE


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_fedcm_is_ghbm_of_tau_one(run, logistic, even, alpha):
    fedcm = run(logistic, even | UNIFORM | {"train.lr": 0.3}, "fedcm", alpha=alpha)
    settings = even | UNIFORM | {"train.lr": 0.3 * alpha}
    same(fedcm, run(logistic, settings, "ghbm", tau=1, beta=1 - alpha))
    differ(fedcm, run(logistic, settings, "fedavg"))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("none", [{"xi_scale": 0.0}, {"xi_mode": "const", "xi_const": 0.0}], ids=["scale", "const"])
def test_fedtrip_without_history_is_fedprox(run, logistic, anyhow, none, momentum):
    settings = anyhow | {"train.momentum": momentum}
    fedprox = run(logistic, settings, "fedprox", mu=1.0)
    same(run(logistic, settings, "fedtrip", mu=1.0, **none), fedprox)
    differ(run(logistic, settings, "fedtrip", mu=1.0), fedprox)


def test_fedtrip_of_one_client_is_fedprox_with_less_mu(run):
    """Its own last model is the global one: the pull is mu (1 - xi), after a first round with all of mu."""
    problem = make_logistic((11,))
    fedtrip = run(problem, FULL, "fedtrip", mu=1.0, xi_mode="const", xi_const=0.4)
    first = run(problem, FULL | {"run.rounds": 1}, "fedprox", mu=1.0)
    assert off(fedtrip.models[1], first.models[1]) <= TOLERANCE
    later = Problem(problem.source, problem.at(fedtrip.models[1]).float(), problem.loss)
    fedprox = run(later, FULL | {"run.rounds": ROUNDS - 1}, "fedprox", mu=0.6)
    same(fedtrip.models[1:], fedprox)


def test_fedtrip_of_everybody_pulls_the_same_at_every_step(run, quadratics):
    """Every gap is 1, so that xi = 1 from round 2 on: mu (w_i - x), wherever y is."""
    traces = [
        run(quadratics, FULL, "fedtrip", mu=0.8, xi_mode=mode, xi_const=1.0) for mode in ("inverse_gap", "gap", "const")
    ]
    p = quadratics.sizes / quadratics.sizes.sum()
    for fedtrip in traces:
        path = [quadratics.start, fedtrip.models[1]]
        for x, states in zip(fedtrip.models[1:-1], fedtrip.states, strict=False):
            ys = [quadratics.local_sgd(i, x, 4, pull=0.8 * (states[i]["w"] - x)) for i in range(5)]
            path.append(p @ np.array(ys))
        same(fedtrip, path)


@pytest.mark.parametrize("weighting", OBJECTIVES)
def test_one_step_of_ghbm_is_heavy_ball(run, logistic, weighting):
    settings = ONE_STEP | {"train.weighting": weighting}
    same(run(logistic, settings, "ghbm", tau=1, beta=0.8), descent(logistic, weighting, momentum=0.8))


@pytest.mark.parametrize("tau", [1, 2, 3, 5])
def test_ghbm_is_a_recursion_of_momenta(run, logistic, tau):
    """m^t = (beta / tau) sum_{k=1..tau} m^{t-k} + g^t, from zeros; exact if the past before x^1 is x^1."""
    beta, p = 0.9, logistic.sizes / logistic.sizes.sum()
    x, momenta, path = logistic.start, [0.0] * tau, [logistic.start]
    for _ in range(10):
        g = sum(p[i] * logistic.gradient(i, x) for i in range(5))
        momenta.append(beta / tau * sum(momenta[-tau:]) + g)
        x = x - LR * momenta[-1]
        path.append(x)
    settings = ONE_STEP | {"run.rounds": 10}
    init = run(logistic, settings, "ghbm", tau=tau, beta=beta, warmup="init")
    same(init, path)
    zero = run(logistic, settings, "ghbm", tau=tau, beta=beta, warmup="zero")
    if tau == 1:
        same(zero, init)
    else:
        differ(zero, init)


@pytest.mark.parametrize("scale", ["inv_gap", "participation"])
@pytest.mark.parametrize("settings", [FULL, {"train.batch_size": 4, "train.local_epochs": 2}], ids=["even", "uneven"])
def test_local_ghbm_of_everybody_is_ghbm_of_tau_one(run, logistic, settings, scale):
    ghbm = run(logistic, settings, "ghbm", tau=1, beta=0.8, warmup="zero")
    same(run(logistic, settings, "local_ghbm", beta=0.8, scale=scale), ghbm)
    differ(ghbm, run(logistic, settings, "fedavg"))


def test_anchors_of_local_ghbm_are_what_clients_received_last(run, logistic):
    """A client that was never sampled has none."""
    local = run(logistic, UNEVEN, "local_ghbm")
    last = {}
    for r, cohort in enumerate(local.cohorts):
        last |= dict.fromkeys(cohort, r + 1)
        assert local.last[r] == last
        assert set(local.past[r]) == set(last.values())
        for number, anchor in local.past[r].items():
            np.testing.assert_array_equal(anchor, local.models[number - 1])
    assert len(local.last[0]) == 2


CYCLIC = FULL | {"train.sampling": "cyclic", "train.cohort_size": 2}


@pytest.mark.parametrize("scale", ["inv_gap", "participation"])
def test_second_participation_in_local_ghbm_after_a_gap_of_three(run, scale):
    """Two of six in turn: from round 4 on M = (x^{r-3} - x^r) / 3 with both scales, a third of them being there."""
    problem, beta, steps = make_quadratics((2, 4, 6, 5, 3, 1)), 0.8, 4
    local = run(problem, CYCLIC, "local_ghbm", beta=beta, scale=scale)
    path = [problem.start]
    for r, cohort in enumerate(local.cohorts):
        x = local.models[r]
        M = (local.models[r - 3] - x) / 3 if r >= 3 else 0 * x
        p = problem.sizes[cohort] / problem.sizes[cohort].sum()
        path.append(p @ np.array([problem.local_sgd(i, x, steps, pull=beta / (LR * steps) * M) for i in cohort]))
    same(local, path)
    assert local.cohorts[:3] == local.cohorts[3:]


@pytest.mark.parametrize(
    ("name", "without", "hyper"),
    [("local_ghbm", "fedavg", {}), ("fedhbm", "fedavg", {}), ("fedtrip", "fedprox", {"mu": 1.0})],
    ids=["local_ghbm", "fedhbm", "fedtrip"],
)
def test_first_participations_know_no_past(run, name, without, hyper):
    problem = make_quadratics((2, 4, 6, 5, 3, 1))
    one, other = run(problem, CYCLIC, name, **hyper), run(problem, CYCLIC, without, **hyper)
    same(one.models[:4], other.models[:4])
    assert off(one.models[4], other.models[4]) > 1e-3


@pytest.mark.parametrize("scale", ["inv_gap", "participation"])
def test_fedhbm_of_one_client_corrects_nothing_in_its_first_step(run, scale):
    """It starts where it ended: one step is FedAvg's, of two the second is not."""
    problem = make_logistic((11,))
    same(run(problem, ONE_STEP, "fedhbm", beta=1.0, scale=scale), run(problem, ONE_STEP, "fedavg"))
    two = ONE_STEP | {"train.local_steps": 2}
    differ(run(problem, two, "fedhbm", beta=1.0, scale=scale), run(problem, two, "fedavg"))


MODELS = ("x", "x_rep")
"""Of what servers send, the models; the rest are vectors."""


def standing(dimension=1, clients=1, lr=0.5, steps=1, gap=0, members=1, N=1, shared=None, state=None, scalars=None):
    """Clients with f = 0; models and vectors of ``dimension`` numbers, ``scalars`` by client."""
    network = LoopNetwork(Point(np.zeros(dimension)), half_square)
    samples = Samples(torch.zeros(1, 2 * dimension), torch.zeros(1, dtype=torch.int64))
    stack = Stack(
        ids=range(clients),
        indices=[np.zeros(1, np.int64)] * clients,
        steps=[steps] * clients,
        weights=[1 / clients] * clients,
        gaps=[gap] * clients,
        scalars=scalars or {},
    )
    vectors = {name: padded(numbers, network) for name, numbers in (shared or {}).items()}
    return ClientPhase(
        network,
        samples,
        LocalTraining(SEED, batch_size=None, local_steps=steps),
        stack,
        round=12,
        lr=lr,
        clients=N,
        members=members,
        shared={name: network.layout.model(row) if name in MODELS else row for name, row in vectors.items()},
        state={name: padded(numbers, network).expand(clients, -1) for name, numbers in (state or {}).items()},
    )


def padded(numbers, network):
    row = torch.zeros(network.layout.width)
    row[: np.size(numbers)] = torch.as_tensor(numbers)
    return row


def made(name, **hyper):
    algorithm = find_algorithm(name)
    return algorithm(algorithm.Hyper(**hyper))


def pull(name, hyper, y, x, lr=0.5, **client):
    """The direction of a local step at y, the gradient being zero."""
    algorithm, phase = made(name, **hyper), standing(lr=lr, shared={"x": x}, **client)
    at = phase.start("x").with_parameters(padded(y, phase.objective.network)[None])
    after = algorithm.step(phase, algorithm.begin(phase).update(y=at), next(phase.data.batches()))["y"]
    return (y - float(after.parameters[0, 0])) / lr


def test_the_pull_of_fedprox_is_mu_and_not_half_of_it():
    assert pull("fedprox", {"mu": 0.4}, y=1.0, x=0.5) == pytest.approx(0.2, rel=1e-6)


@pytest.mark.parametrize(
    ("hyper", "gap"),
    [
        ({"xi_mode": "const", "xi_const": 0.5}, 1),
        ({}, 2),
        ({"xi_scale": 0.5}, 1),
        ({"xi_mode": "gap", "xi_scale": 0.25}, 2),
    ],
)
def test_the_pull_of_fedtrip(hyper, gap):
    """mu ((y - x) + xi (w - y)) with xi = 1/2, in four ways to say so."""
    found = pull("fedtrip", {"mu": 0.4, **hyper}, y=1.0, x=0.5, state={"w": 0.2}, gap=gap)
    assert found == pytest.approx(0.04, rel=1e-5)


@pytest.mark.parametrize("y", [-3.0, 0.5, 1.0, 20.0])
def test_the_pull_of_fedtrip_with_xi_of_one_does_not_depend_on_y(y):
    assert pull("fedtrip", {"mu": 0.4}, y=y, x=0.5, state={"w": 0.2}, gap=1) == pytest.approx(-0.12, rel=1e-4)


@pytest.mark.parametrize("xi", [0.25, 0.5, 1.0])
def test_fedtrip_with_its_own_model_at_the_global_one_is_fedprox(xi):
    hyper = {"mu": 0.4, "xi_mode": "const", "xi_const": xi}
    fedprox = pull("fedprox", {"mu": 0.4 * (1 - xi)}, y=1.0, x=0.5)
    assert pull("fedtrip", hyper, y=1.0, x=0.5, state={"w": 0.5}, gap=1) == pytest.approx(fedprox, abs=1e-6)


def test_fedtrip_ignores_history_that_is_not_there():
    assert pull("fedtrip", {"mu": 0.4}, y=1.0, x=0.5, state={"w": 0.0}, gap=0) == pytest.approx(0.2, rel=1e-6)


@pytest.mark.parametrize(
    ("scale", "client"),
    [("inv_gap", {"gap": 10, "members": 3, "N": 4}), ("participation", {"gap": 7, "members": 1, "N": 10})],
)
def test_fedhbm_is_pushed_away_from_its_own_model(scale, client):
    """From y = 2 with a = 1, beta = 1, s = 0.1 and J = 2 to 2.05, whatever the lr."""
    for lr in (0.01, 0.5):
        found = pull("fedhbm", {"beta": 1.0, "scale": scale}, 2.0, 2.0, lr, state={"a": 1.0}, steps=2, **client)
        assert 2 - lr * found == pytest.approx(2.05, rel=1e-6)


FORMS = ("velocity", "printed")


@pytest.mark.parametrize("contrast", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_pfedmo_without_pi_is_fednag(run, logistic, anyhow, form, contrast):
    """Model, momentum and global model; in the printed form the arithmetic is the same, too."""
    gamma = 0.7
    pfedmo = run(logistic, anyhow, "pfedmo", gamma=gamma, pi=0.0, form=form, contrast=contrast)
    fednag = run(logistic, anyhow, "fednag", gamma=gamma)
    same(pfedmo, fednag, 0 if form == "printed" else TOLERANCE)
    for mine, other in zip(pfedmo.vectors, fednag.vectors, strict=True):
        if form == "printed":
            np.testing.assert_array_equal(mine["x"], other["x"])
            np.testing.assert_array_equal(mine["m"], other["y"])
        else:
            assert off(mine["x"], other["x"]) <= TOLERANCE
            assert off(mine["x"] - gamma * mine["m"], other["y"]) <= TOLERANCE


@pytest.mark.parametrize("form", FORMS)
def test_round_one_of_pfedmo_is_fednag_whatever_pi(run, logistic, anyhow, form):
    fednag = run(logistic, anyhow, "fednag", gamma=0.7)
    for pi in (0.5, 1.0):
        pfedmo = run(logistic, anyhow, "pfedmo", gamma=0.7, pi=pi, form=form)
        assert set(pfedmo.tables[0]["a"].values()) == {0.0}
        assert off(pfedmo.models[1], fednag.models[1]) <= 1e-6
        differ(pfedmo, fednag)


def test_both_forms_of_pfedmos_workers_take_the_same_forty_steps(run, logistic):
    settings = EVEN | {"train.local_steps": 40, "train.weight_decay": 0.02, "train.grad_clip": 0.5}
    velocity, printed = (run(logistic, settings, "pfedmo", gamma=0.8, pi=0.0, form=form) for form in FORMS)
    same(velocity, printed)


def test_without_contrast_the_forms_of_pfedmo_agree_and_with_it_they_do_not(run, logistic, anyhow):
    velocity, printed = (run(logistic, anyhow, "pfedmo", pi=0.7, form=form, contrast=False) for form in FORMS)
    same(velocity, printed)
    differ(*(run(logistic, anyhow, "pfedmo", pi=0.7, form=form) for form in FORMS))


@pytest.mark.parametrize("form", FORMS)
def test_clients_like_pfedmos_representation_model_stay_like_it(run, form):
    problem = make_logistic((1, 1, 1, 1), alike=True)
    settings = FULL | {"train.cohort_size": 2}
    pfedmo = run(problem, settings, "pfedmo", gamma=0.7, pi=1.0, form=form)
    same(pfedmo, run(problem, settings, "fednag", gamma=0.7))
    same([after["x_rep"] for after in pfedmo.vectors], pfedmo.models[1:])
    assert max(pfedmo.tables[-1]["a"].values()) > 0.01


def personal(form, a, contrast=True, **four):
    """(x_i+, m_i+) of eqs. 11-12 for clients with the scores ``a``: where their local steps begin."""
    client = standing(dimension=6, clients=len(a), shared=four, scalars={"a": a})
    carry = made("pfedmo", form=form, contrast=contrast).begin(client)
    return float64(carry["x"])[:, :6], float64(carry["m"])[:, :6]


def test_the_printed_form_collapses_to_a_difference_of_velocities():
    """x_i+ = xbar + a_i gamma (v_rep - vbar), because x - y = gamma v."""
    gamma, a = 0.6, [0.0, 0.3, 0.75, 1.0]
    y, v, y_rep, v_rep = np.random.default_rng(1).normal(size=(4, 6))
    x = y + gamma * v
    found, _ = personal("printed", a, x=x, m=y, x_rep=y_rep + gamma * v_rep, m_rep=y_rep)
    for row, score in zip(found, a, strict=True):
        np.testing.assert_allclose(row, x + score * gamma * (v_rep - v), atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_client_of_full_score_starts_from_the_representation_model(form):
    x, m, x_rep, m_rep = np.random.default_rng(2).normal(size=(4, 6))
    four = {"x": x, "m": m, "x_rep": x_rep, "m_rep": m_rep}
    (found,), (momentum,) = personal(form, [1.0], **four)
    np.testing.assert_allclose(found, x_rep + m - m_rep, atol=1e-6)
    np.testing.assert_allclose(momentum, m_rep, atol=1e-6)
    (found,), _ = personal(form, [1.0], contrast=False, **four)
    np.testing.assert_allclose(found, x_rep, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_server_like_its_representation_model_is_what_everybody_starts_from(form):
    x, m = np.random.default_rng(3).normal(size=(2, 6))
    found, momentum = personal(form, [0.0, 0.4, 1.0], x=x, m=m, x_rep=x, m_rep=m)
    np.testing.assert_allclose(found, [x] * 3, atol=1e-6)
    np.testing.assert_allclose(momentum, [m] * 3, atol=1e-6)
