"""Gradients and forward passes are torch's own on ordinary copies of the modules, one by one and in stacks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from client_stacks import CLOSE, assert_close, client_phase, data, packed, plain_gradient
from small_modules import IMAGE, MODELS, Normed, Partial, Unused, made
from torch import nn

from fedray import simulate
from fedray.core.batches import Batch
from fedray.core.local_training import LocalTraining
from fedray.core.task import Task, cross_entropy
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.stack import StackNetwork
from fedray.models.small import MLP, LeNet5
from fedray.testing.contracts import SETTINGS, assert_same, small_source


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_torchs_own(name, kind, request):
    """Three clients with models of their own, batches of 6, 4 and 1 real samples."""
    make, shape = MODELS[name]
    copies = [made(make, seed) for seed in range(3)]
    loss = getattr(copies[0], "task_loss", cross_entropy)
    network = kind(made(make), Task(loss=loss))
    at = packed(network, copies)
    samples = data(shape, 18)
    x, y = samples.x.view(3, 6, *shape), samples.y.view(3, 6)
    counts = [6, 4, 1]
    before = at.clone()
    gradient = network.gradients(at, Batch(x, y, 0, counts))
    assert torch.equal(at.row, before.row)
    assert gradient.value.shape == at.parameters.shape
    assert not gradient.value[:, network.layout.parameters :].any()
    for row, (module, count) in enumerate(zip(copies, counts, strict=True)):
        expected = plain_gradient(module, x[row, :count], y[row, :count], loss)
        expected = {
            name: torch.zeros_like(p) if expected[name] is None else expected[name]
            for name, p in module.named_parameters()
        }
        assert_close(network.layout.unflatten(gradient.value[row]), expected)
        logits = module(x[row, :count])
        torch.testing.assert_close(gradient.task_loss[row], loss(logits, y[row, :count]).mean().detach(), **CLOSE)
        assert gradient.followed[0][row] == (logits.argmax(1) == y[row, :count]).sum()


def test_unused_parameters_have_zero_gradients():
    for kind in (LoopNetwork, StackNetwork):
        network = kind(made(Unused))
        samples = data((12,), 5)
        gradient = network.gradients(network.loaded().rows(1), Batch(samples.x[None], samples.y[None], 0))
        named = network.layout.unflatten(gradient.value[0])
        assert not named["unused.weight"].any()
        assert named["last.weight"].any()


def test_frozen_parameters_are_not_trained():
    module = made(Partial)
    samples = data((12,), 5)
    network = LoopNetwork(copy.deepcopy(module))
    assert {slot.name for slot in network.layout.slots} == {"last.weight", "last.bias", "unused.weight", "unused.bias"}
    at = network.loaded().rows(1)
    gradient = network.gradients(at, Batch(samples.x[None], samples.y[None], 0))
    expected = plain_gradient(module, samples.x, samples.y)
    named = network.layout.unflatten(gradient.value[0])
    torch.testing.assert_close(named["last.weight"], expected["last.weight"], **CLOSE)
    assert torch.equal(at.row[0], network.layout.pack(module).row)


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
def test_a_rules_own_loss_and_its_extras(kind):
    """task loss + mu_i (1 - cos(features, z)) + each client's own penalty on its logits."""
    copies = [made(lambda: MLP((12,), 4, [9, 5]), seed) for seed in range(3)]
    network = kind(copy.deepcopy(copies[0]))
    at = packed(network, copies)
    samples = data((12,), 15)
    batch = Batch(samples.x.view(3, 5, 12), samples.y.view(3, 5), 0)
    z, mu = (
        torch.from_numpy(np.random.default_rng(1).normal(size=(3, 5, 5)).astype(np.float32)),
        torch.tensor([[0.0], [0.5], [2.0]]),
    )

    def penalised(logits, features, task, z, mu):
        return task + mu * (1 - torch.cosine_similarity(features, z, dim=1)) + 0.1 * mu * logits.square().sum(1)

    def rule(outputs, task, z, mu):
        return penalised(outputs.logits, outputs.features, task, z, mu)

    gradient = network.gradients(at, batch, rule, [z, mu])
    for row, module in enumerate(copies):
        features = module.layers[:-1](batch.x[row])
        logits = module.layers[-1](features)
        each = penalised(logits, features, cross_entropy(logits, batch.y[row]), z[row], mu[row])
        expected = torch.autograd.grad(each.mean(), list(module.parameters()))
        assert_close(
            network.layout.unflatten(gradient.value[row]),
            dict(zip(dict(module.named_parameters()), expected, strict=True)),
        )
        # what is logged stays the task's loss
        torch.testing.assert_close(
            gradient.task_loss[row], cross_entropy(logits, batch.y[row]).mean().detach(), **CLOSE
        )


def test_forward_gives_logits_and_the_input_of_the_last_layer():
    module = made(lambda: LeNet5(IMAGE, 10))
    network, samples = LoopNetwork(copy.deepcopy(module)), data(IMAGE, 6)
    outputs = network.forward(network.loaded().rows(2), samples.x.view(2, 3, *IMAGE))
    seen: list[torch.Tensor] = []
    module.fc3.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        logits = module(samples.x)
    assert outputs.features is not None
    torch.testing.assert_close(outputs.logits.view(6, 10), logits, **CLOSE)
    torch.testing.assert_close(outputs.features.view(6, 84), seen[0], **CLOSE)


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
def test_the_full_gradient_is_that_of_the_mean_over_all_samples(kind):
    """Taken in parts of at most 256: 515 samples make parts of 172, 172 and 171; and 257, 129 and 128."""
    sizes = [515, 257, 3]
    module, samples = made(lambda: MLP((12,), 4, [9])), data((12,), sum(sizes))
    # later samples are quite different, so that wrong weights of the parts would show
    samples.x[172:] *= 3
    network = kind(copy.deepcopy(module))
    client = client_phase(network, samples, sizes, LocalTraining(0))
    gradient = client.objective.full_gradient(client.start("x"))
    start = 0
    for row, size in enumerate(sizes):
        expected = plain_gradient(module, samples.x[start : start + size], samples.y[start : start + size])
        assert_close(network.layout.unflatten(gradient[row]), expected)
        start += size
    assert client.objective.logged() == {}


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
def test_the_full_loss_is_the_mean_over_all_samples(kind):
    """In evaluation mode; taken in parts of at most 256."""
    sizes = [515, 257, 3]
    module, samples = made(Normed), data((12,), sum(sizes))
    samples.x[172:] *= 3
    client = client_phase(kind(copy.deepcopy(module)), samples, sizes, LocalTraining(0))
    at = client.start("x")
    before = at.clone()
    found = client.objective.full_loss(at)
    with torch.no_grad():
        each = torch.nn.functional.cross_entropy(module.eval()(samples.x), samples.y, reduction="none")
    expected = torch.stack([part.mean() for part in each.split(sizes)])[:, None]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert torch.equal(at.row, before.row)
    assert client.objective.logged() == {}


def test_the_full_gradient_leaves_buffers_alone():
    module = made(Normed)
    network, samples = LoopNetwork(copy.deepcopy(module)), data((12,), 30)
    client = client_phase(network, samples, [30], LocalTraining(0))
    at = client.start("x")
    assert at.has_buffers
    before = at.clone()
    (gradient,) = client.objective.full_gradient(at)
    assert_close(network.layout.unflatten(gradient), plain_gradient(module.train(), samples.x, samples.y))
    assert torch.equal(at.row, before.row)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "moon", "pfedmo"])
def test_large_models_are_not_copied_and_give_the_same_bits(algorithm, tmp_path, monkeypatch):
    keys = {**SETTINGS, "algorithm.name": algorithm, "model.proj_dim": 16}
    copied = simulate({**keys, "run.output": str(tmp_path / "copied")}, data=small_source())
    monkeypatch.setattr("fedray.gradients.loading.COPIED", 0)
    assert_same(copied, simulate({**keys, "run.output": str(tmp_path / "not")}, data=small_source()))


@pytest.mark.parametrize("vectorize", [False, True])
def test_bf16_is_close_to_fp32(vectorize, tmp_path):
    config = {**SETTINGS, "algorithm.name": "fedavg", "engine.vectorize": vectorize, "engine.chunk": 4}
    runs = [
        simulate({**config, "train.precision": precision, "run.output": str(tmp_path / precision)}, data=small_source())
        for precision in ("fp32", "bf16")
    ]
    start, end, rough = (
        nn.utils.parameters_to_vector(module.parameters()).detach()
        for module in (runs[0].module(), runs[0].model(), runs[1].model())
    )
    difference = (end - rough).norm() / (end - start).norm()
    assert 1e-5 < difference < 0.05
    assert runs[1].summary["final_accuracy"] == pytest.approx(runs[0].summary["final_accuracy"], abs=0.1)
    assert all(p.dtype == torch.float32 for p in runs[1].model().parameters())
