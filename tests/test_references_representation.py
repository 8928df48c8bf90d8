"""References of MOON and FedSiam-DA, against torch's modules and optimizers, closed forms and their limiting cases."""

from copy import deepcopy
from dataclasses import replace
from math import exp, log, log1p, sqrt

import numpy as np
import pytest
import torch
from references import Train
from references_momentum import Logistic
from references_representation import (
    attentive,
    contrast,
    cosine,
    dual_mean,
    fedsiam_da,
    global_step,
    gradient,
    hist_model,
    moon,
    predict,
    project,
    siamese,
    similarities,
    task,
    vector,
)
from torch import nn
from torch.nn import functional as F

FEATURES, WIDTH, PROJECTION, CLASSES = 5, 8, 6, 3
SIZES = (3, 11, 7, 1, 20)
EVERYBODY = [[0, 1, 2, 3, 4]]
SOME = [[0, 1], [1, 4], [0, 3], [2, 4], [0, 1], [2, 3], [3, 4]]
PLAIN = Train(4, 0.1)
EVERYTHING = Train(3, 0.2, 0.8, weighting="uniform", weight_decay=0.05, grad_clip=0.4, momentum=0.9)
SIAM = [(hist, dual) for hist in ("prev_epoch", "prev_step", "prev_round") for dual in (True, False)]


class Net(nn.Module):
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


def model_of(net):
    return {name: t.detach().clone() for name, t in net.state_dict().items() if "num_batches" not in name}


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
    """FedAvg's frame around local(net, optimizer, client, data): models after each round, losses."""
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
                torch.testing.assert_close(one.model[name], model[name], rtol=0, atol=1e-12)
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
    """Full batches: each step is an epoch."""
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


def test_moon_loss_in_closed_form():
    z = torch.randn(6, 4, dtype=torch.float64)
    assert contrast(z, z, [-z], 0.5).item() == pytest.approx(log1p(exp(-4)))
    assert contrast(z, 3 * z, [], 0.5).item() == 0
    assert contrast(z, -z, [z, z], 0.5).item() == pytest.approx(-log(exp(-2) / (exp(-2) + 2 * exp(2))))
    # exponentials of 2000 would not be finite
    assert contrast(z, -z, [z], 1e-3).item() == pytest.approx(2000)
    assert contrast(torch.zeros_like(z), z, [-z], 0.5).item() == pytest.approx(log(2))
    # over z_1 = (1, 0) and z_2 = (0, 1): the mean of the losses, not the loss of the mean
    e = torch.eye(2, dtype=torch.float64)
    expected = (log1p(exp(-2)) + log1p(exp(2))) / 2
    assert contrast(e, e[:1].expand(2, 2), [e[1:].expand(2, 2)], 0.5).item() == pytest.approx(expected)


def test_a_past_model_that_is_the_global_one_teaches_nothing(problem, start):
    x, _ = tensors(problem, 1)
    at = attentive(draw(2))
    other = project(start, x)
    l_con = contrast(project(at, x), other, [other], 0.5)
    assert l_con.item() == pytest.approx(log(2))
    assert all((g.abs() < 1e-15).all() for g in gradient(l_con, at).values())


def slope(function, model, name, at, width=1e-6):
    sides = []
    for sign in (1, -1):
        moved = {k: t.clone() for k, t in model.items()}
        moved[name].ravel()[at] += sign * width
        sides.append(function(moved).item())
    return (sides[0] - sides[1]) / (2 * width)


@pytest.mark.parametrize("client", [1, 3])
def test_gradients_are_slopes(problem, start, client):
    """Also that nothing flows through the frozen sides, which do not move here; client 3 has one sample."""
    x, labels = tensors(problem, client)
    others = [project(draw(seed), x) for seed in (2, 3, 4)]

    def with_moon(y):
        z = project(y, x)
        return task(y, z, labels) + 2 * contrast(z, others[0], others[1:], 0.3)

    def with_siam(y):
        z = project(y, x)
        return task(y, z, labels) + 2 * siamese(z, predict(y, z)[0], others[0], others[1])

    for function in (with_moon, with_siam):
        at = attentive(start)
        g = gradient(function(at), at)
        for name in g:
            for k in range(0, g[name].numel(), 7):
                assert g[name].ravel()[k].item() == pytest.approx(slope(function, start, name, k), abs=1e-7)
        reached = function is with_siam
        assert all((g[name].abs().max() > 0) == reached for name in g if name.startswith("predictor.3"))


@pytest.mark.parametrize("client", [1, 3])
def test_the_global_copy_goes_up_its_cosine_with_the_local_projection(problem, start, client):
    x, _ = tensors(problem, client)
    zk = project(draw(2), x).requires_grad_()
    mu, lr = 0.7, 0.05
    new = global_step(start, x, zk, mu, lr)
    assert zk.grad is None

    def objective(wf):
        return cosine(predict(wf, project(wf, x))[0], zk.detach()).mean()

    for name in ("encoder.weight", "hidden.bias", "projection.weight", "predictor.0.weight", "predictor.1.weight"):
        for k in range(0, start[name].numel(), 5):
            ascent = lr * mu / 2 * slope(objective, start, name, k)
            assert (new[name] - start[name]).ravel()[k].item() == pytest.approx(ascent, abs=1e-9)
    torch.testing.assert_close(new["classifier.weight"], start["classifier.weight"], rtol=0, atol=0)
    assert (new["predictor.1.running_mean"] - start["predictor.1.running_mean"]).abs().max() > 0 or client == 3


def test_hist_pushes_and_the_global_copy_pulls():
    z = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    assert siamese(z, z, 5 * z, None).item() == -0.5
    assert siamese(z, z, -z, None).item() == 0.5
    assert siamese(z, z, z, z).item() == 0.5
    assert siamese(z, z, z, -z).item() == -1.5


def test_predictor_is_torchs(start):
    z = torch.randn(4, PROJECTION, dtype=torch.float64)
    net = net_of(start)
    p, statistics = predict(start, z)
    torch.testing.assert_close(p, net.predictor(z), rtol=0, atol=1e-13)
    for name, t in statistics.items():
        torch.testing.assert_close(t, net.state_dict()[name], rtol=0, atol=1e-14)
    p, statistics = predict(start, z[:1])
    torch.testing.assert_close(p, net_of(start, False).predictor(z[:1]), rtol=0, atol=1e-13)
    assert all(torch.equal(t, start[name]) for name, t in statistics.items())


def test_hist_of_each_step():
    """Five steps in epochs of two; y_j are stood for by their numbers, the last participation's model by -1."""

    def pasts(hist, last=-1):
        return [hist_model(list(range(j + 1)), last, hist, 2) for j in range(5)]

    assert pasts("prev_round") == [-1] * 5
    assert pasts("prev_epoch") == [-1, -1, 2, 2, 4]
    assert pasts("prev_step") == [-1, 0, 1, 2, 3]
    assert pasts("prev_round", None) == [None] * 5
    assert pasts("prev_epoch", None) == [None, None, 2, 2, 4]
    assert pasts("prev_step", None) == [None, 0, 1, 2, 3]


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


def scaled(model, factor):
    return {name: factor * t for name, t in model.items()}


def test_two_clients_of_equal_norm_count_alike():
    one, other = draw(1), draw(2)
    other = scaled(other, vector(one).norm() / vector(other).norm())
    middle = scaled({k: one[k] + other[k] for k in one}, 0.5)
    new = dual_mean({4: one, 7: other}, middle)
    torch.testing.assert_close(vector(new), vector(middle), rtol=0, atol=1e-14)


def test_clients_that_are_alike_give_their_model(start):
    problem = make_problem((6,))
    copies = Logistic(problem.x * 3, problem.y * 3, CLASSES)
    for hist, dual in SIAM:
        (r,) = fedsiam_da(copies, [[0, 1, 2]], PLAIN, start, hist=hist, dual=dual)
        torch.testing.assert_close(vector(r.model), vector(r.ys[1]), rtol=0, atol=1e-14)
        assert not dual or r.similarity == pytest.approx({0: 1, 1: 1, 2: 1})


def test_second_aggregation():
    axis = torch.eye(3, dtype=torch.float64)
    ys = {i: {"weight": v} for i, v in enumerate([axis[0], axis[1], -3 * axis[0]])}
    w0 = {"weight": axis[0] + axis[1]}
    assert similarities(ys, w0) == pytest.approx({0: sqrt(0.5), 1: sqrt(0.5), 2: 0})
    torch.testing.assert_close(dual_mean(ys, w0)["weight"], (axis[0] + axis[1]) / 2)
    # nobody is similar: the first mean
    apart = {"weight": axis[2]}
    assert dual_mean(ys, apart) is apart
    # running statistics follow the weights, and have no say in them
    far = {i: y | {"running_mean": (10.0**i) * axis[0]} for i, y in ys.items()}
    assert similarities(far, w0 | {"running_mean": axis[2]}) == similarities(ys, w0)
    assert dual_mean(far, w0)["running_mean"].tolist() == pytest.approx([5.5, 0, 0])


def test_similarity_replaces_the_weights_of_the_first_mean(problem, start):
    for weighting in ("samples", "uniform"):
        (r,) = fedsiam_da(problem, EVERYBODY, replace(PLAIN, weighting=weighting), start, mu=1.0)
        p = np.array(SIZES if weighting == "samples" else (1,) * 5) / (sum(SIZES) if weighting == "samples" else 5)
        w0 = sum(p[i] * vector(r.ys[i]) for i in range(5))
        D = [(vector(r.ys[i]) @ w0 / vector(r.ys[i]).norm() / w0.norm()).item() for i in range(5)]
        x = sum(D[i] * vector(r.ys[i]) for i in range(5)) / sum(D)
        torch.testing.assert_close(vector(r.model), x, rtol=0, atol=1e-13)


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
