"""References of MOON and FedSiam-DA over rounds, against torch's modules and optimizers, and their limiting cases."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import representation_problems
import torch
from references_momentum import Logistic
from references_representation import fedsiam_da, moon
from representation_problems import (
    EVERYBODY,
    PLAIN,
    SIAM,
    SIZES,
    SOME,
    differ,
    draw,
    make_problem,
    net_of,
    off,
    same,
    tensors,
)
from torch.nn import functional as F

cohorts = representation_problems.cohorts
problem = representation_problems.problem
start = representation_problems.start
train = representation_problems.train


def model_of(net):
    return {name: t.detach().clone() for name, t in net.state_dict().items() if "num_batches" not in name}


def optimizer(net, train, lr):
    return torch.optim.SGD(net.parameters(), lr, momentum=train.momentum, weight_decay=train.weight_decay)


def step(net, optimizer, train):
    for p in net.parameters():
        # torch leaves out what has no gradient, weight decay does not
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    norm = torch.cat([p.grad.ravel() for p in net.parameters()]).norm()
    if 0 < train.grad_clip < norm:
        for p in net.parameters():
            p.grad *= train.grad_clip / norm
    optimizer.step()


def federated(problem, cohorts, train, start, local):
    """Returns the model and losses after each round of FedAvg around local(net, optimizer, client, data, x)."""
    x, outcomes = start, []
    for r, cohort in enumerate(cohorts):
        ys, loss, weights = [], {}, []
        for i in cohort:
            net = net_of(x)
            losses = local(net, optimizer(net, train, train.lr * train.lr_decay**r), i, tensors(problem, i), x)
            ys.append(model_of(net))
            loss[i] = np.mean(losses)
            weights.append(problem.sizes[i] if train.weighting == "samples" else 1)
        weights = np.array(weights) / sum(weights)
        x_mean = {k: sum(w * y[k] for w, y in zip(weights, ys, strict=True)) for k in x}
        x = {k: (1 - train.server_lr) * x[k] + train.server_lr * x_mean[k] for k in x}
        outcomes.append((x, loss))
    return outcomes


def agree(rounds, outcomes, buffers=True):
    for one, (model, loss) in zip(rounds, outcomes, strict=True):
        for name in model:
            if buffers or "running" not in name:
                # in double precision; the contrasts of FedSiam-DA amplify what processors round differently
                torch.testing.assert_close(one.model[name], model[name], rtol=0, atol=1e-11)
        assert one.loss == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("algorithm", ["moon", "fedsiam_da"])
def test_without_their_terms_both_are_fedavg(problem, start, cohorts, train, algorithm):
    def local(net, sgd, i, data, x):
        losses = []
        for _ in range(train.steps):
            sgd.zero_grad()
            loss = F.cross_entropy(net(data[0]), data[1])
            loss.backward()
            step(net, sgd, train)
            losses.append(loss.item())
        return losses

    if algorithm == "moon":
        train = replace(train, server_lr=0.7)
        rounds = moon(problem, cohorts, train, start, mu=0.0)
    else:
        rounds = fedsiam_da(problem, cohorts, train, start, mu=0.0, dual=False)
    agree(rounds, federated(problem, cohorts, train, start, local), buffers=algorithm == "moon")


@pytest.mark.parametrize("first", ["skip", "global", "init"])
@pytest.mark.parametrize("P", [1, 2])
def test_moon_by_modules(problem, start, cohorts, train, P, first):
    mu, T = 5.0, 0.3
    pools = {}

    def local(net, sgd, i, data, x):
        if i not in pools:
            pools[i] = {"skip": [], "global": [net_of(x, False)], "init": [net_of(draw(50 + i), False)]}[first]
        z_global, losses = net_of(x, False).z(data[0]).detach(), []
        for _ in range(train.steps):
            sgd.zero_grad()
            z = net.z(data[0])
            loss = F.cross_entropy(net.classifier(z), data[1])
            positive = (F.cosine_similarity(z, z_global) / T).exp()
            negative = sum((F.cosine_similarity(z, old.z(data[0]).detach()) / T).exp() for old in pools[i])
            (loss + mu * -(positive / (positive + negative)).log().mean()).backward()
            step(net, sgd, train)
            losses.append(loss.item())
        pools[i] = [deepcopy(net).eval(), *pools[i]][:P]
        return losses

    hyper = {"mu": mu, "temperature": T, "buffer": P, "first": first, "initial": lambda i: draw(50 + i)}
    agree(moon(problem, cohorts, train, start, **hyper), federated(problem, cohorts, train, start, local))


@pytest.mark.parametrize("hist", ["prev_epoch", "prev_step", "prev_round"])
def test_fedsiam_by_modules(problem, start, cohorts, train, hist):
    """Batches are full, so that each step is an epoch."""
    mu = 1.0
    last = {}

    def forward(net, x):
        net.predictor[1].train(len(x) > 1)
        z = net.z(x)
        return z, net.predictor(z)

    def local(net, sgd, i, data, x):
        wf, losses = net_of(x), []
        wf_sgd = torch.optim.SGD(wf.parameters(), sgd.param_groups[0]["lr"])
        old, before = last.get(i), None
        for _ in range(train.steps):
            now = deepcopy(net)
            if before is not None and hist != "prev_round":
                old = now if hist == "prev_epoch" else before
            z, p = forward(net, data[0])
            wf_sgd.zero_grad()
            (-mu / 2 * F.cosine_similarity(forward(wf, data[0])[1], z.detach()).mean()).backward()
            wf_sgd.step()
            loss = F.cross_entropy(net.classifier(z), data[1])
            extra = -F.cosine_similarity(p, wf.z(data[0]).detach()).mean() / 2
            if old is not None:
                extra = extra + F.cosine_similarity(old.z(data[0]).detach(), z).mean()
            sgd.zero_grad()
            (loss + mu * extra).backward()
            step(net, sgd, train)
            losses.append(loss.item())
            before = now
        last[i] = deepcopy(net)
        return losses

    rounds = fedsiam_da(problem, cohorts, train, start, mu=mu, hist=hist, dual=False)
    agree(rounds, federated(problem, cohorts, train, start, local))


def test_hist_that_has_no_time_to_differ(problem, start, cohorts, train):
    run = {h: fedsiam_da(problem, cohorts, replace(train, steps=1), start, mu=1.0, hist=h) for h, _ in SIAM}
    same(run["prev_epoch"], run["prev_round"])
    same(run["prev_step"], run["prev_round"])
    # an epoch as long as the round
    epochs = {"batches": [(n,) * train.steps for n in SIZES]}
    one, other = (fedsiam_da(problem, cohorts, train, start, hist=h, **epochs) for h in ("prev_epoch", "prev_round"))
    same(one, other)


def test_nobody_has_a_hist_in_the_first_round(problem, start):
    rounds = [fedsiam_da(problem, EVERYBODY * 2, PLAIN, start, mu=1.0, hist=h) for h in ("prev_epoch", "prev_round")]
    # an epoch is a step: from the second on, hist is y itself, and its cosine with itself is at its top
    same(*([r[0]] for r in rounds))
    differ(*rounds)


MOON_OPTIONS = [
    ({"mu": 5.0}, {"mu": 1.0}),
    ({"temperature": 0.5}, {"temperature": 0.3}),
    ({"buffer": 1}, {"buffer": 3}),
    ({"buffer": 2}, {"buffer": 3}),
    ({"first": "skip", "buffer": 2}, {"first": "global", "buffer": 2}),
    ({"first": "skip"}, {"first": "init"}),
]
SIAM_OPTIONS = [
    ({"mu": 1.0}, {"mu": 0.5}),
    ({"hist": "prev_epoch"}, {"hist": "prev_step"}),
    ({"hist": "prev_epoch"}, {"hist": "prev_round"}),
    ({"hist": "prev_step"}, {"hist": "prev_round"}),
]


@pytest.mark.parametrize(("one", "other"), MOON_OPTIONS)
def test_moon_options_matter(problem, start, cohorts, train, one, other):
    base = {"mu": 5.0, "initial": lambda i: draw(50 + i)}
    differ(*(moon(problem, cohorts, train, start, **(base | hyper)) for hyper in (one, other)))


@pytest.mark.parametrize(("one", "other"), SIAM_OPTIONS)
def test_fedsiam_options_matter(problem, start, cohorts, train, one, other):
    differ(*(fedsiam_da(problem, cohorts, train, start, **({"mu": 1.0} | hyper)) for hyper in (one, other)))


def test_dual_does_not_count_samples(problem, start, cohorts, train):
    train = replace(train, weighting="samples")
    differ(*(fedsiam_da(problem, cohorts, train, start, dual=dual) for dual in (True, False)))


def test_first_global_is_first_skip_where_one_model_is_kept(problem, start, cohorts, train):
    """The received model against itself: a constant."""
    one, other = (moon(problem, cohorts, train, start, mu=5.0, first=first) for first in ("skip", "global"))
    same(one, other)


def test_clients_keep_their_last_models(problem, start):
    rounds = moon(problem, [[0, 1], [1, 2], [1], [0, 1]], PLAIN, start, buffer=3)
    kept = [
        [k for k, r in enumerate(rounds) for y in [r.ys.get(1)] if y is not None and y is past]
        for past in rounds[-1].past[1]
    ]
    assert kept == [[3], [2], [1]]
    assert [len(rounds[-1].past[i]) for i in range(3)] == [2, 3, 1]
    (old,) = moon(problem, [[0, 1]], PLAIN, start, first="global", buffer=2)
    assert old.past[0][1] is start


def test_running_statistics_reach_whoever_has_one_sample(problem, start):
    moved = start | {"predictor.1.running_mean": start["predictor.1.running_mean"] + 1}
    for cohort, reached in ([0, 1, 2, 4], False), ([3], True):
        one, other = (fedsiam_da(problem, [cohort], PLAIN, s, mu=1.0) for s in (start, moved))
        assert (off(one[0], other[0]) > 1e-6) == reached
    # through the server, in the second round
    one, other = (fedsiam_da(problem, [[0, 1], [3]], PLAIN, s, mu=1.0) for s in (start, moved))
    assert off(one[0], other[0]) == 0
    assert off(one[1], other[1]) > 1e-6


def test_batches_of_an_epoch(start):
    """Clients whose samples are alike: the sizes of batches only say where epochs end."""
    problem = make_problem()
    alike = Logistic(
        [np.repeat(x[:1], len(x), axis=0) for x in problem.x], [y[:1].repeat(len(y)) for y in problem.y], 3
    )
    batches = [[4] * (n // 4) + [n % 4] * (n % 4 > 0) for n in SIZES]
    train = replace(PLAIN, steps=tuple(2 * len(b) for b in batches))
    run = {h: fedsiam_da(alike, EVERYBODY * 2, train, start, mu=1.0, hist=h, batches=batches) for h, _ in SIAM}
    differ(run["prev_epoch"], run["prev_step"])
    differ(run["prev_epoch"], run["prev_round"])
    full = fedsiam_da(alike, EVERYBODY * 2, train, start, mu=1.0)
    differ(run["prev_epoch"], full)
    same(moon(alike, SOME, train, start, batches=batches), moon(alike, SOME, train, start))


@pytest.mark.parametrize(("algorithm", "hyper"), [(moon, {"first": "last"}), (fedsiam_da, {"hist": "last"})])
def test_unknown_options(problem, start, algorithm, hyper):
    with pytest.raises(ValueError, match="last"):
        algorithm(problem, EVERYBODY, PLAIN, start, **hyper)
