"""Gradients, local training and flat vectors against torch's own, on ordinary copies of the modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedray import simulate
from fedray.algorithms import Algorithm, Carry, ClientPhase, Model, find_algorithm
from fedray.config import load
from fedray.core.batches import Batch, steps_of
from fedray.core.client import Stack
from fedray.core.local_data import Samples
from fedray.core.local_training import LocalTraining
from fedray.core.network import LoopNetwork, Network, StackNetwork, cross_entropy
from fedray.core.optimizer import LocalOptimizer
from fedray.core.seeds import Purpose, stream, torch_rng
from fedray.core.vectors import ROW, Layout, frozen
from fedray.models.small import MLP, FedTripCNN, LeNet5, Linear, Logistic
from fedray.resolve import resolve
from fedray.testing.contracts import SETTINGS, assert_same, small_source

CLOSE = {"rtol": 2e-5, "atol": 2e-6}
IMAGE = (1, 28, 28)


@pytest.fixture(autouse=True)
def one_thread():
    """As in every computing process, and much faster where other processes compute too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Normed(nn.Module):
    """BatchNorm, and whole-number, boolean and infinite buffers that training never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 4)
        self.register_buffer("places", torch.tensor([7, 3, 2**24]))
        self.register_buffer("keep", torch.tensor([True, False]))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Dropping(nn.Module):
    """Dropout in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(12, 9), nn.Linear(9, 4), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.first(x))))


class AlwaysDropping(Dropping):
    """A common slip: F.dropout drops in evaluation mode too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(torch.relu(self.first(x))))


class Partial(nn.Module):
    """A frozen layer, and one that forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(12, 9), nn.Linear(9, 4), nn.Linear(3, 5)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.last = nn.Linear(3, 5), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


class Tied(nn.Module):
    """The same weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.again, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.again.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.again(torch.tanh(self.inner(x)))))


def made(make: Any, seed: int = 0) -> nn.Module:
    with torch_rng(seed, Purpose.INIT):
        return make()


def data(shape: Sequence[int], samples: int, classes: int = 4, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, *shape)).astype(np.float32)
    return Samples(torch.from_numpy(x), torch.from_numpy(rng.integers(0, classes, samples)))


def client_phase(
    network: Network,
    samples: Samples,
    sizes: Sequence[int],
    training: LocalTraining,
    rows: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    lr: float = 0.1,
    start: Model | None = None,
    **shared: Model | torch.Tensor,
) -> ClientPhase:
    """Clients of the given sizes, one after another in ``samples``; a stack of those in ``rows``."""
    starts = np.cumsum([0, *sizes])
    rows = range(len(sizes)) if rows is None else rows
    made_steps = [
        steps_of(sizes[i], training.batch_size, training.local_steps, training.local_epochs) for i in range(len(sizes))
    ]
    stack = Stack(
        ids=[10 + i for i in rows],
        indices=[np.arange(starts[i], starts[i + 1]) for i in rows],
        steps=[(made_steps if steps is None else steps)[i] for i in rows],
        weights=[1.0] * len(rows),
        gaps=[0] * len(rows),
    )
    start = network.initial.clone() if start is None else start
    shared = {"x": start, "y": start.parameters.clone(), **shared}
    return ClientPhase(network, samples, training, stack, round=3, lr=lr, clients=50, shared=shared)


def packed(network: Network, modules: Sequence[nn.Module]) -> Model:
    """The models of several modules, as a stack."""
    return network.layout.model(torch.stack([network.layout.pack(module).row for module in modules]))


def plain_gradient(module: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Any = cross_entropy) -> dict[str, Any]:
    """Torch's own gradient of the mean loss, in the mode that ``module`` is in."""
    module.zero_grad(set_to_none=True)
    loss(module(x), y).mean().backward()
    return {name: p.grad for name, p in module.named_parameters() if p.requires_grad}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)


# ---------------------------------------------------------------- flat vectors

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=5).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=5), st.randoms())
def test_a_layout_gives_back_what_was_packed(shapes, random):
    module = nn.Module()
    for number, (shape, permuted) in enumerate(shapes):
        value = torch.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape) + 1000 * number
        if permuted:
            order = list(range(len(shape)))
            random.shuffle(order)
            inverse = sorted(order, key=order.__getitem__)
            value = value.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
            assert value.shape == shape
            assert inverse is not None
        module.register_parameter(f"p{number}", nn.Parameter(value))
    layout = Layout(module)
    model = layout.pack(module)
    vector = model.parameters
    total = sum(p.numel() for p in module.parameters())
    assert layout.parameters == total
    assert len(vector) == layout.width >= total
    assert layout.width % ROW == 0
    assert layout.width - total < ROW
    assert not vector[total:].any()
    assert len(model.buffers) == layout.buffers == 0
    for named in (layout.named(model), layout.unflatten(vector)):
        for name, p in module.named_parameters():
            assert torch.equal(named[name], p)
            assert torch.equal(
                layout.slots[int(name[1:])].flat(p.detach()), layout.slots[int(name[1:])].flat(named[name])
            )
    # views of it, and nothing lies twice
    for tensor in layout.named(model).values():
        tensor.zero_()
    assert not vector.any()


def test_buffers_come_after_the_parameters_and_frozen_parameters_are_in_no_row():
    module = made(Normed)
    module.last.requires_grad_(False)
    layout = Layout(module)
    model = layout.pack(module)
    assert model.row.shape == (layout.row_width,)
    assert layout.parameters == 12 * 7 + 7 + 7 + 7
    assert layout.buffers == 7 + 7 + 1 + 3 + 2 + 2
    state = module.state_dict()
    named = layout.named(model)
    assert frozen(module).keys() == {"last.weight", "last.bias"}
    assert named.keys() | frozen(module).keys() == state.keys()
    for name, value in {**frozen(module), **named}.items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_modules_memory_format_is_kept(memory_format):
    module = made(lambda: LeNet5(IMAGE, 10)).to(memory_format=memory_format)
    strides = {name: p.stride() for name, p in module.named_parameters()}
    before = {name: p.clone() for name, p in module.named_parameters()}
    network = LoopNetwork(module)
    for name, p in module.named_parameters():
        assert p.stride() == strides[name]
        assert torch.equal(p, before[name])
    # the module's parameters are the flat vector: loading a model is one copy
    layout = network.layout
    network.load(layout.model(torch.arange(float(layout.row_width))))
    numbers = torch.cat([slot.flat(p.detach()) for slot, p in zip(layout.slots, module.parameters(), strict=True)])
    assert torch.equal(numbers, torch.arange(float(layout.parameters)))


# ---------------------------------------------------------------- gradients

MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "lenet5": (lambda: LeNet5(IMAGE, 10), IMAGE),
    "lenet5-contiguous": (lambda: LeNet5(IMAGE, 10).to(memory_format=torch.contiguous_format), IMAGE),
    "lenet5-colour": (lambda: LeNet5((3, 32, 32), 10), (3, 32, 32)),
    "cnn": (lambda: FedTripCNN(IMAGE, 10), IMAGE),
    "cnn-contiguous": (lambda: FedTripCNN(IMAGE, 10).to(memory_format=torch.contiguous_format), IMAGE),
    "mlp": (lambda: MLP((12,), 10, [9, 5]), (12,)),
    "logistic": (lambda: Logistic((12,), 10), (12,)),
    "linear": (lambda: Linear((12,), 10), (12,)),
    "unused": (Unused, (12,)),
    "tied": (Tied, (12,)),
}


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_torchs_own(name, kind, request):
    """Three clients with models of their own, batches of 6, 4 and 1 real samples."""
    make, shape = MODELS[name]
    copies = [made(make, seed) for seed in range(3)]
    loss = getattr(copies[0], "task_loss", cross_entropy)
    network = kind(made(make), loss)
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
        assert gradient.correct[row] == (logits.argmax(1) == y[row, :count]).sum()


def test_unused_parameters_have_zero_gradients():
    for kind in (LoopNetwork, StackNetwork):
        network = kind(made(Unused))
        samples = data((12,), 5)
        gradient = network.gradients(network.initial.rows(1), Batch(samples.x[None], samples.y[None], 0))
        named = network.layout.unflatten(gradient.value[0])
        assert not named["unused.weight"].any()
        assert named["last.weight"].any()


def test_tied_parameters_are_one():
    module = made(Tied)
    layout = Layout(module)
    assert layout.parameters == 12 * 12 + 12 + 12 + 12 * 4 + 4
    assert "again.weight" not in [slot.name for slot in layout.slots]
    LoopNetwork(module).load(layout.model(torch.zeros(layout.row_width)))
    assert module.again.weight is module.inner.weight
    assert not module.again.weight.any()


def test_frozen_parameters_are_not_trained():
    module = made(Partial)
    samples = data((12,), 5)
    network = LoopNetwork(copy.deepcopy(module))
    assert {slot.name for slot in network.layout.slots} == {"last.weight", "last.bias", "unused.weight", "unused.bias"}
    at = network.initial.rows(1)
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
    outputs = network.forward(network.initial.rows(2), samples.x.view(2, 3, *IMAGE))
    seen: list[torch.Tensor] = []
    module.fc3.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        logits = module(samples.x)
    assert outputs.features is not None
    torch.testing.assert_close(outputs.logits.view(6, 10), logits, **CLOSE)
    torch.testing.assert_close(outputs.features.view(6, 84), seen[0], **CLOSE)


# ---------------------------------------------------------------- local training

EVERYTHING: dict[str, Any] = {"momentum": 0.7, "weight_decay": 0.05, "grad_clip": 0.3}
SIZES = [23, 1, 9, 17, 4]
TRAININGS = {
    "epochs": LocalTraining(0, batch_size=5, local_steps=None, local_epochs=2, **EVERYTHING),
    "steps": LocalTraining(0, batch_size=5, local_steps=4, **EVERYTHING),
    "full": LocalTraining(0, batch_size=None, local_steps=3, **EVERYTHING),
}


def trained(algorithm: Algorithm, client: ClientPhase) -> Carry:
    return algorithm.local_steps(client, algorithm.begin(client))


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
        history.append((carry["x"].row, carry["y"], carry.momentum))
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
    start = network.initial
    shared = {"m": 0.1 * start.parameters, "m_rep": 0.2 * start.parameters}
    shared["x_rep"] = start.with_parameters(0.9 * start.parameters)
    training = LocalTraining(0, batch_size=5, local_steps=None, local_epochs=2, **EVERYTHING)
    client = client_phase(network, data((12,), sum(SIZES)), SIZES, training, **shared)
    client.scalars = {"a": torch.linspace(0, 1, 5)[:, None]}
    carry = trained(algorithm, client)
    found = [upload.value for upload in algorithm.end(client, carry).uploads.values()]
    found += [carry.momentum, client.objective.full_gradient(client.start("x"))]
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
    assert torch.equal(carry.momentum, second)


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


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
def test_the_full_gradient_is_that_of_the_mean_over_all_samples(kind):
    """Taken in parts of at most 256: 515 samples make parts of 172, 172 and 171; and 257, 129 and 128."""
    sizes = [515, 257, 3]
    module, samples = made(lambda: MLP((12,), 4, [9])), data((12,), sum(sizes))
    # later samples are quite different, so that wrong weights of the parts would show
    samples.x[172:] *= 3
    network = kind(copy.deepcopy(module))
    client = client_phase(network, samples, sizes, LocalTraining(0, augment=False))
    gradient = client.objective.full_gradient(client.start("x"))
    start = 0
    for row, size in enumerate(sizes):
        expected = plain_gradient(module, samples.x[start : start + size], samples.y[start : start + size])
        assert_close(network.layout.unflatten(gradient[row]), expected)
        start += size
    assert client.objective.logged() == {}


# ---------------------------------------------------------------- buffers


def test_running_statistics_are_torchs():
    module = made(Normed)
    network = LoopNetwork(copy.deepcopy(module))
    training = LocalTraining(0, batch_size=5, local_steps=None, local_epochs=2)
    client = client_phase(network, data((12,), 16), [16], training, lr=0.1)
    sent = client.shared["x"].clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    shapes = []
    for batch in client.data.batches():
        x = batch.x[0]
        shapes.append(len(x))
        if len(x) == 1:
            # no variance to normalise by: torch itself would refuse
            module.norm.eval()
        optimizer.zero_grad()
        cross_entropy(module(x), batch.y[0]).mean().backward()
        optimizer.step()
        module.norm.train()
    assert shapes == [5, 5, 5, 1] * 2
    carry = trained(find_algorithm("fedavg")(), client)
    assert carry["y"].has_buffers
    state = module.state_dict()
    assert state["norm.num_batches_tracked"] == 6
    for name, value in network.layout.named(carry["y"][0]).items():
        torch.testing.assert_close(value, state[name], **CLOSE)
    # the broadcast is never written to
    assert torch.equal(client.shared["x"].row, sent.row)


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


def test_a_batch_of_one_still_drops():
    """A single sample switches BatchNorm to its running statistics, not the whole module to evaluation."""
    module = made(Dropping)
    module.first.requires_grad_(False)
    network, samples = LoopNetwork(module, draws=True), data((12,), 1)
    client = client_phase(network, samples, [1], LocalTraining(0, batch_size=5, local_steps=20))
    at, batches = client.start("x"), client.data.batches()
    gradients = torch.stack([client.objective.gradient(at, batch)[0] for batch in batches])
    assert len(gradients.unique(dim=0)) > 1


def two_clients(sizes: Sequence[int]) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, np.ndarray]]:
    samples = data((12,), sum(sizes))
    client = np.repeat(np.arange(len(sizes)), sizes)
    return (samples.x.numpy(), samples.y.numpy(), client), (samples.x.numpy()[:8], np.arange(8) % 4)


OWN: dict[str, Any] = {
    "algorithm.name": "fedavg",
    "data.partition.kind": "natural",
    "train.local_epochs": 1,
    "train.batch_size": 4,
    "train.lr": 0.1,
    "run.rounds": 1,
    "engine.kind": "local",
    "run.checkpoint_every": 0,
}


def test_buffers_are_averaged_with_the_clients_weights(tmp_path):
    sizes = [12, 4]
    train, test = two_clients(sizes)
    module = made(Normed)
    run = simulate({**OWN, "run.output": str(tmp_path)}, data=train, test=test, model=module)
    final = run.model().state_dict()
    finals = []
    for i, start in enumerate((0, 12)):
        samples = Samples(torch.from_numpy(train[0]), torch.from_numpy(train[1]))
        stack = Stack([i], [np.arange(start, start + sizes[i])], [sizes[i] // 4], [1.0], [0])
        training = LocalTraining(0, batch_size=4, local_steps=None, local_epochs=1)
        network = LoopNetwork(copy.deepcopy(module))
        shared = {"x": network.initial}
        client = ClientPhase(network, samples, training, stack, round=1, lr=0.1, clients=2, shared=shared)
        finals.append(network.layout.named(trained(find_algorithm("fedavg")(), client)["y"][0]))
    for name in ("norm.running_mean", "norm.running_var", "first.weight"):
        assert not torch.allclose(finals[0][name], finals[1][name])
        torch.testing.assert_close(final[name], 0.75 * finals[0][name] + 0.25 * finals[1][name], **CLOSE)
    # whole numbers are the first client's; what nobody changes stays as it was
    assert final["norm.num_batches_tracked"] == 3
    assert finals[1]["norm.num_batches_tracked"] == 1
    for name in ("places", "keep", "mask"):
        assert torch.equal(final[name], module.state_dict()[name])
        assert final[name].dtype == module.state_dict()[name].dtype


@pytest.mark.parametrize("algorithm", ["fedavg", "fednag", "pfedmo"])
def test_models_with_buffers_run_whichever_way_they_are_cut(algorithm, tmp_path):
    config = {**SETTINGS, "algorithm.name": algorithm}
    del config["model.name"], config["model.hidden"]
    runs = [
        simulate(
            {**config, "engine.chunk": size, "run.output": str(tmp_path / str(size))}, data=small_source(), model=Normed
        )
        for size in (1, 4)
    ]
    assert runs[0].summary["status"] == "completed"
    assert_same(*runs)
    assert torch.equal(runs[0].model().mask, torch.tensor([0.0, -torch.inf]))


# ---------------------------------------------------------------- randomness inside of models


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


# ---------------------------------------------------------------- precision, augmentation


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "moon", "pfedmo"])
def test_large_models_are_not_copied_and_give_the_same_bits(algorithm, tmp_path, monkeypatch):
    keys = {**SETTINGS, "algorithm.name": algorithm, "model.proj_dim": 16}
    copied = simulate({**keys, "run.output": str(tmp_path / "copied")}, data=small_source())
    monkeypatch.setattr("fedray.core.network.COPIED", 0)
    assert_same(copied, simulate({**keys, "run.output": str(tmp_path / "not")}, data=small_source()))


@pytest.mark.parametrize(
    ("model", "batch", "cohort", "chunk", "expected"),
    [
        ("logistic", 10, 200, "auto", (True, 64)),
        # two stacks at least, so that two actors have work
        ("logistic", 10, 100, "auto", (True, 64)),
        ("logistic", 64, 64, "auto", (True, 32)),
        ("logistic", 10, 63, "auto", (True, 32)),
        ("logistic", 10, 9, "auto", (True, 8)),
        ("logistic", 10, 8, "auto", (False, None)),
        ("logistic", 10, 100, 4, (False, 4)),
        ("mlp", 64, 100, "auto", (True, 64)),
        ("mlp", 64, 40, "auto", (False, None)),
        ("mlp", 64, 40, 32, (False, 32)),
        ("mlp", 10, 40, 32, (True, 32)),
        ("lenet5", 10, 100, "auto", (True, 64)),
        ("lenet5", 20, 100, "auto", (False, None)),
    ],
)
def test_what_a_cpu_trains_in_stacks(model, batch, cohort, chunk, expected):
    """By model, batch and cohort alone, as measured: where a step is dispatch rather than arithmetic."""
    keys = {"algorithm.name": "fedavg", "model.name": model, "train.batch_size": batch, "data.clients": 200}
    keys |= {"train.cohort_size": cohort, "engine.chunk": chunk, "engine.kind": "local", "engine.device": "cpu"}
    experiment, _ = resolve(load(keys))
    assert (experiment.vectorize, experiment.chunk) == expected


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


def cropped(image: np.ndarray, top: int, left: int, mirrored: bool) -> np.ndarray:
    """A window of the image's own size out of the image with 4 zeros around, at (top, left), then mirrored."""
    channels, height, width = image.shape
    result = np.zeros_like(image)
    for c in range(channels):
        for i in range(height):
            for k in range(width):
                line, column = i + top - 4, (width - 1 - k if mirrored else k) + left - 4
                if 0 <= line < height and 0 <= column < width:
                    result[c, i, k] = image[c, line, column]
    return result


@pytest.mark.parametrize("kind", [LoopNetwork, StackNetwork])
def test_crop_and_flip_is_what_a_plain_loop_gives(kind):
    """Ragged epochs over clients of unequal size: each client's draws are its own, whoever shares its chunk."""
    shape, sizes = (2, 12, 14), [7, 3, 1]
    samples = data(shape, 11)
    network = kind(made(lambda: Logistic(shape, 4)))
    training = LocalTraining(5, batch_size=4, local_steps=None, local_epochs=2, augment=True)
    plain = LocalTraining(5, batch_size=4, local_steps=None, local_epochs=2)
    together = list(client_phase(network, samples, sizes, training).data.batches())
    untouched = list(client_phase(network, samples, sizes, plain).data.batches())
    assert len(together) == 4
    drawn = set()
    for row in range(3):
        steps = (4, 2, 2)[row]
        alone = list(client_phase(network, samples, sizes, training, rows=[row]).data.batches())
        for j in range(steps):
            count = 4 if together[j].counts is None else together[j].counts[row]
            assert together[j].x.shape == untouched[j].x.shape
            rng = stream(5, Purpose.AUGMENTATION, 3, 10 + row, j)
            top, left = rng.integers(0, 9, count), rng.integers(0, 9, count)
            mirrored = rng.random(count) < 0.5
            for s in range(count):
                expected = cropped(untouched[j].x[row, s].numpy(), top[s], left[s], mirrored[s])
                np.testing.assert_array_equal(together[j].x[row, s].numpy(), expected)
                np.testing.assert_array_equal(alone[j].x[0, s].numpy(), expected)
                drawn.add((top[s], left[s], mirrored[s]))
            assert torch.equal(together[j].y, untouched[j].y)
    assert len(drawn) > 15


def test_augmentation_is_for_training_alone():
    shape = (1, 12, 12)
    samples = data(shape, 9)
    network = LoopNetwork(made(lambda: Logistic(shape, 4)))
    with_it, without = (
        client_phase(network, samples, [9], LocalTraining(0, batch_size=4, local_steps=2, augment=augment))
        for augment in (True, False)
    )
    at = with_it.start("x")
    assert torch.equal(with_it.objective.full_gradient(at), without.objective.full_gradient(at))
    assert not torch.equal(next(with_it.data.batches()).x, next(without.data.batches()).x)
