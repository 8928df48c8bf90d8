"""Algorithms with momentum are each other, FedAvg or torch's SGD where their terms are set so."""

import numpy as np
import pytest
import torch
import traced_runs
from traced_runs import (
    FULL,
    LR,
    OBJECTIVES,
    ONE_STEP,
    ROUNDS,
    UNIFORM,
    descent,
    differ,
    flat,
    make_logistic,
    minibatches,
    same,
    torch_sgd,
)

anyhow, even, logistic, run = traced_runs.anyhow, traced_runs.even, traced_runs.logistic, traced_runs.run


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


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_fedcm_is_ghbm_of_tau_one(run, logistic, even, alpha):
    fedcm = run(logistic, even | UNIFORM | {"train.lr": 0.3}, "fedcm", alpha=alpha)
    settings = even | UNIFORM | {"train.lr": 0.3 * alpha}
    same(fedcm, run(logistic, settings, "ghbm", tau=1, beta=1 - alpha))
    differ(fedcm, run(logistic, settings, "fedavg"))


def test_fedacg_without_momentum_is_fedprox(run, logistic, anyhow):
    fedacg = run(logistic, anyhow | UNIFORM, "fedacg", lam=0.0, beta=0.4)
    same(fedacg, run(logistic, anyhow | UNIFORM, "fedprox", mu=0.4))
    differ(fedacg, run(logistic, anyhow | UNIFORM, "fedacg", lam=0.5, beta=0.4))


def test_one_step_of_fedacg_is_nesterovs_accelerated_gradient(run, logistic):
    x, m, path = logistic.start, 0.0, [logistic.start]
    for _ in range(ROUNDS):
        ahead = x + 0.7 * m
        m = 0.7 * m - LR * np.mean([logistic.gradient(i, ahead) for i in range(5)], axis=0)
        x = x + m
        path.append(x)
    same(run(logistic, ONE_STEP | UNIFORM, "fedacg", lam=0.7, beta=0.0), path)


def test_scaffold_m_with_fresh_gradients_alone_is_scaffold(run, logistic, anyhow):
    """Its second option, since under plain SGD the local steps are the gradients that the client met."""
    scaffold = run(logistic, anyhow | UNIFORM, "scaffold", option=2)
    same(run(logistic, anyhow | UNIFORM, "scaffold_m", beta=1.0), scaffold)
    differ(run(logistic, anyhow | UNIFORM, "scaffold_m", beta=0.5), scaffold)


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_scaffold_m_of_equal_clients_is_fedcm(run, alpha):
    """Where all clients have the same gradient, in full cohorts, c_i and c cancel."""
    problem = make_logistic((11,))
    settings = FULL | UNIFORM | {"train.lr": 0.2}
    same(run(problem, settings, "scaffold_m", beta=alpha), run(problem, settings, "fedcm", alpha=alpha))
