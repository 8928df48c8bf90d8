"""Each client draws the random numbers of its model, such as dropout's, from a generator of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from client_stacks import SIZES, client_phase, data, trained
from small_modules import AlwaysDropping, Dropping, Normed, made
from torch import nn

from fedray import simulate
from fedray.algorithms import find_algorithm
from fedray.core.local_training import LocalTraining
from fedray.gradients.loop import LoopNetwork
from fedray.testing.contracts import SETTINGS, assert_same, small_source


def test_a_batch_of_one_still_drops():
    """A single sample switches BatchNorm to its running statistics, not the whole module to evaluation."""
    module = made(Dropping)
    module.first.requires_grad_(False)
    network, samples = LoopNetwork(module, draws=True), data((12,), 1)
    client = client_phase(network, samples, [1], LocalTraining(0, batch_size=5, local_steps=20))
    at, batches = client.start("x"), client.data.batches()
    gradients = torch.stack([client.objective.gradient(at, batch)[0] for batch in batches])
    assert len(gradients.unique(dim=0)) > 1


def test_dropout_does_not_depend_on_chunk_mates():
    network, samples = LoopNetwork(made(Dropping), draws=True), data((12,), sum(SIZES))
    algorithm = find_algorithm("fedavg")()
    training = LocalTraining(0, batch_size=5, local_steps=3)
    before = torch.random.get_rng_state()
    together = client_phase(network, samples, SIZES, training)
    carried, full = trained(algorithm, together)["y"], together.objective.full_gradient(together.start("x"))
    for row in range(len(SIZES)):
        alone = client_phase(network, samples, SIZES, training, rows=[row], start=together.shared["x"])
        assert torch.equal(trained(algorithm, alone)["y"].row[0], carried.row[row])
        assert torch.equal(alone.objective.full_gradient(alone.start("x"))[0], full[row])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_is_drawn_in_evaluation_mode_is_a_clients_own_too():
    network, samples = LoopNetwork(made(AlwaysDropping), draws=True), data((12,), 20)
    training = LocalTraining(0, batch_size=5, local_steps=1)
    before = torch.random.get_rng_state()
    together = client_phase(network, samples, [10, 10], training)
    logits = together.objective.forward(together.start("x"), samples.x).logits
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(logits[0], logits[1])
    for row in range(2):
        alone = client_phase(network, samples, [10, 10], training, rows=[row], start=together.shared["x"])
        assert torch.equal(alone.objective.forward(alone.start("x"), samples.x).logits[0], logits[row])


def test_two_gradients_on_one_batch_drop_the_same():
    network, samples = LoopNetwork(made(Dropping), draws=True), data((12,), 10)
    client = client_phase(network, samples, [10], LocalTraining(0, batch_size=5, local_steps=2))
    at, batches = client.start("x"), client.data.batches()
    one, two = [[client.objective.gradient(at, batch) for _ in range(2)] for batch in batches]
    assert torch.equal(one[0], one[1])
    assert torch.equal(two[0], two[1])
    assert not torch.equal(one[0], two[0])


@pytest.mark.parametrize("model", [Dropping, AlwaysDropping, Normed])
@pytest.mark.parametrize("algorithm", ["pfedmo", "stateful:Drift", "stateful:Contrast"])
def test_global_generators_are_neither_used_nor_advanced(algorithm, model, tmp_path):
    config = {**SETTINGS, "algorithm.name": algorithm, "run.rounds": 3}
    del config["model.name"], config["model.hidden"]
    runs = []
    for attempt in range(2):
        torch.manual_seed(attempt)
        np.random.seed(attempt)  # noqa: NPY002
        before = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        output = {"run.output": str(tmp_path / str(attempt)), "engine.chunk": (1, 4)[attempt]}
        runs.append(simulate({**config, **output}, data=small_source(), model=model))
        assert torch.equal(torch.random.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert_same(*runs)


def test_a_pass_whose_gradient_comes_later_has_the_modules_hooks_and_a_clients_own_draws():
    module = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4))
    module[0].bias.register_hook(lambda gradient: 0 * gradient)
    module[0].weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    network, samples = LoopNetwork(module, draws=True), data((12,), 10)
    client = client_phase(network, samples, [10], LocalTraining(0, batch_size=5, local_steps=1))
    at, batch = client.start("x"), next(iter(client.data.batches()))
    before = torch.random.get_rng_state()
    one, two = (client.objective.training_pass(at, batch).gradient(lambda outputs, losses: losses) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.random.get_rng_state(), before)
    named = network.layout.unflatten(one[0])
    assert not named["0.bias"].any()
    assert named["0.weight"].std() > 0.5
    assert torch.equal(one, client.objective.gradient(at, batch))
