"""A client's local steps are those of torch's SGD, whoever else is in its stack."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from client_stacks import EVERYTHING, SIZES, assert_close, client_phase, data, trained
from small_modules import MODELS, made
from torch import nn

from fedray.algorithms import Carry, Model, find_algorithm
from fedray.client.optimizer import LocalOptimizer
from fedray.core.local_training import LocalTraining
from fedray.core.task import cross_entropy
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.stack import StackNetwork
from fedray.models.small import MLP, Logistic

TRAININGS = {
    "epochs": LocalTraining(0, batch_size=5, local_steps=None, local_epochs=2, **EVERYTHING),
    "steps": LocalTraining(0, batch_size=5, local_steps=4, **EVERYTHING),
    "full": LocalTraining(0, batch_size=None, local_steps=3, **EVERYTHING),
}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize("name", ["lenet5", "mlp", "tied"])
def test_loop_and_stack_agree(name, training):
    """FedNAG, which carries a model and a vector, over clients with unequal batches and unequal numbers of steps."""
    make, shape = MODELS[name]
    samples, algorithm = data(shape, sum(SIZES)), find_algorithm("fednag")()
    loop, stack = (client_phase(kind(made(make)), samples, SIZES, training) for kind in (LoopNetwork, StackNetwork))
    one, other = trained(algorithm, loop), trained(algorithm, stack)
    moved = (one["x"] - loop.shared["x"]).norm(dim=1)
    assert (moved > 1e-2).all()
    for carried in ("x", "y"):
        assert ((one[carried] - other[carried]).norm(dim=1) <= 1e-4 * moved).all()
    logged, again = loop.objective.logged(), stack.objective.logged()
    np.testing.assert_allclose(logged["loss"], again["loss"], rtol=1e-4)
    assert logged["accuracy"] == again["accuracy"]


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_alone_or_together_is_the_same_to_the_bit(training):
    samples, algorithm = data((12,), sum(SIZES)), find_algorithm("fednag")()
    network = LoopNetwork(made(lambda: MLP((12,), 4, [9])))
    together = client_phase(network, samples, SIZES, training)
    carried, logged = trained(algorithm, together), together.objective.logged()
    for row in range(len(SIZES)):
        alone = client_phase(network, samples, SIZES, training, rows=[row], start=together.shared["x"])
        assert torch.equal(trained(algorithm, alone)["x"].row[0], carried["x"].row[row])
        assert alone.objective.logged()["loss"] == logged["loss"][row : row + 1]
        assert alone.objective.logged()["accuracy"] == logged["accuracy"][row : row + 1]


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
def test_a_client_that_has_made_its_steps_stands_still(kind):
    training, steps = LocalTraining(0, batch_size=5, local_steps=6, **EVERYTHING), [2, 6, 1]
    samples, algorithm = data((12,), 30), find_algorithm("fednag")()
    client = client_phase(kind(made(lambda: MLP((12,), 4, [9]))), samples, [10, 10, 10], training, steps=steps)
    carry, history = algorithm.begin(client), []
    for batch in client.data.batches():
        carry = client.hold(algorithm.step(client, carry, batch), carry, batch.step)
        history.append((carry["x"].row, carry["y"], carry.memory("x").buffers["momentum"]))
    assert len(history) == 6
    for row, count in enumerate(steps):
        for carried in zip(*history, strict=True):
            for j in range(1, 6):
                assert torch.equal(carried[j][row], carried[j - 1][row]) == (j >= count)


def test_what_is_logged_covers_a_clients_own_steps_only():
    """Means over its mini-batches of loss and of accuracy, the latter weighted by samples."""
    training = LocalTraining(0, batch_size=4, local_steps=None, local_epochs=1)
    samples = data((12,), 16)
    network = LoopNetwork(made(lambda: Logistic((12,), 4)))
    client, algorithm = client_phase(network, samples, [10, 6], training), find_algorithm("fedavg")()
    module, losses, right = made(lambda: Logistic((12,), 4)), [[], []], [0, 0]
    carry = algorithm.begin(client)
    for batch in client.data.batches():
        for row in range(2):
            if batch.step >= (3, 2)[row]:
                continue
            count = (batch.counts or [4, 4])[row]
            module.load_state_dict(network.layout.named(carry["y"][row]))
            logits = module(batch.x[row, :count])
            losses[row].append(float(cross_entropy(logits, batch.y[row, :count]).mean().detach()))
            right[row] += int((logits.argmax(1) == batch.y[row, :count]).sum())
        carry = client.hold(algorithm.step(client, carry, batch), carry, batch.step)
    logged = client.objective.logged()
    assert [len(each) for each in losses] == [3, 2]
    np.testing.assert_allclose(logged["loss"], [np.mean(each) for each in losses], rtol=1e-6)
    assert logged["accuracy"] == [right[0] / 10, right[1] / 6]


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fednag", "pfedmo"])
def test_row_padding_stays_zero(name, kind):
    """Else it would leak into norms: nothing may ever write behind the P numbers."""
    algorithm = find_algorithm(name)()
    network = kind(made(lambda: MLP((12,), 4, [9])))
    assert network.layout.width > network.layout.parameters
    start = network.loaded()
    shared = {"m": 0.1 * start.parameters, "m_rep": 0.2 * start.parameters}
    shared["x_rep"] = start.with_parameters(0.9 * start.parameters)
    training = LocalTraining(0, batch_size=5, local_steps=None, local_epochs=2, **EVERYTHING)
    client = client_phase(network, data((12,), sum(SIZES)), SIZES, training, **shared)
    client.scalars = {"a": torch.linspace(0, 1, 5)[:, None]}
    carry = trained(algorithm, client)
    found = [upload.value for upload in algorithm.end(client, carry).uploads.values()]
    (memory,) = carry.memories.values()
    found += [memory.buffers["momentum"], client.objective.full_gradient(client.start("x"))]
    for value in found:
        vector = value.parameters if isinstance(value, Model) else value
        assert vector[:, : network.layout.parameters].all(dim=0).any()
        assert not vector[:, network.layout.parameters :].any()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_local_training_is_torchs_sgd(weight_decay, nesterov):
    """FedAvg with client momentum, and FedNAG (whose rule is Nesterov's), against torch.optim.SGD over many batches."""
    momentum = 0.8
    training = LocalTraining(
        4, batch_size=5, local_steps=30, weight_decay=weight_decay, momentum=0.0 if nesterov else momentum
    )
    name = "fednag" if nesterov else "fedavg"
    algorithm = find_algorithm(name)(find_algorithm(name).Hyper(**({"gamma": momentum} if nesterov else {})))
    samples = data((12,), 23)
    module = made(lambda: MLP((12,), 4, [9]))
    network = LoopNetwork(copy.deepcopy(module))
    client = client_phase(network, samples, [23], training, lr=0.05)
    optimizer = torch.optim.SGD(
        module.parameters(), lr=0.05, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov
    )
    for batch in client.data.batches():
        optimizer.zero_grad()
        cross_entropy(module(batch.x[0]), batch.y[0]).mean().backward()
        optimizer.step()
    final = trained(algorithm, client)["x" if nesterov else "y"][0]
    assert_close(network.layout.named(final), {name: p.detach() for name, p in module.named_parameters()})


def padded(*rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor([[*row, *[0.0] * (64 - len(row))] for row in rows])


def test_the_order_of_clipping_decay_and_momentum():
    """R2 by hand: (c) clip to norm 2, (d) plus 0.5 w, (e) momentum 0.5, (f) w - 0.1 of it."""
    optimizer = LocalOptimizer(LocalTraining(0, grad_clip=2.0, weight_decay=0.5, momentum=0.5), lr=0.1)
    w = Model(padded([4, 2], [1, 1]), 64)
    # first step: client 0 has norm 5, so (3, 4) -> (1.2, 1.6), + (2, 1); client 1 is short enough, (1, 0) + (0.5, 0.5)
    carry = optimizer.descend(Carry({"w": w}), "w", padded([3, 4], [1, 0]))
    torch.testing.assert_close(carry["w"].parameters, padded([4 - 0.32, 2 - 0.26], [1 - 0.15, 1 - 0.05]))
    # second step, at the same w for simplicity: the new directions, plus half of the first (3.2, 2.6), (1.5, 0.5)
    second, carry = optimizer.direction(carry.update(w=w), "w", padded([0, 2], [0, 8]))
    torch.testing.assert_close(second, padded([2 + 1.6, 3 + 1.3], [0.5 + 0.75, 2.5 + 0.25]))
    assert torch.equal(carry.memory("w").buffers["momentum"], second)


def test_clipping_is_torchs():
    rng = np.random.default_rng(0)
    direction = torch.from_numpy(rng.normal(size=(4, 64)) * [[0.01], [0.05], [1], [30]]).float()
    carry = Carry({"w": Model(torch.ones(4, 64), 64)})
    found, _ = LocalOptimizer(LocalTraining(0, grad_clip=0.7), lr=0.1).direction(carry, "w", direction)
    for row in range(4):
        p = nn.Parameter(torch.zeros(64))
        p.grad = direction[row].clone()
        nn.utils.clip_grad_norm_([p], 0.7)
        torch.testing.assert_close(found[row], p.grad, rtol=1e-5, atol=0)
    assert torch.equal(found[:2], direction[:2])
    unclipped, _ = LocalOptimizer(LocalTraining(0), lr=0.1).direction(carry, "w", direction)
    assert torch.equal(unclipped, direction)


def test_an_epoch_is_as_many_steps_as_the_samples_need():
    training = LocalTraining(0, batch_size=4, local_steps=10)
    network = LoopNetwork(made(lambda: Logistic((12,), 4)))
    client = client_phase(network, data((12,), 14), [9, 4, 1], training)
    epochs = torch.cat([client.data.epoch(j) for j in range(7)], dim=1)
    assert epochs.tolist() == [[0, 0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]]
    full = client_phase(network, data((12,), 14), [9, 4, 1], LocalTraining(0, batch_size=None, local_steps=10))
    assert full.data.epoch(3).tolist() == [[3]] * 3


def test_epochs_of_any_length_begin_where_they_begin():
    """Also where the rounded inverse of a length, times the length, is less than 1."""
    lengths = list(range(1, 400))
    training = LocalTraining(0, batch_size=1, local_steps=10)
    client = client_phase(LoopNetwork(made(lambda: Logistic((12,), 4))), data((12,), 400), lengths, training)
    for j in (0, 1, 40, 41, 46, 47, 82, 94, 123, 399, 400, 798, 1995):
        assert client.data.begins_epoch(j)[:, 0].tolist() == [j % length == 0 for length in lengths], j
