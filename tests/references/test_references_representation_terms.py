"""The terms of the references of MOON and FedSiam-DA, against closed forms, slopes and torch's modules."""

from dataclasses import replace
from math import exp, log, log1p, sqrt

import numpy as np
import pytest
import representation_problems
import torch
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
    predict,
    project,
    siamese,
    similarities,
    task,
    vector,
)
from representation_problems import (
    CLASSES,
    EVERYBODY,
    PLAIN,
    PROJECTION,
    SIAM,
    SIZES,
    draw,
    make_problem,
    net_of,
    tensors,
)

problem, start = representation_problems.problem, representation_problems.start


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
