"""A replayed gradient has the bits of one that is computed in the ordinary way, or nothing is replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import odd_code  # noqa: F401
import odd_layers  # noqa: F401
import odd_modules
import pytest
import torch
from client_stacks import data
from small_modules import MODELS, Normed, Partial, made
from torch import Tensor, nn

from fedray import UserError, simulate
from fedray.core.batches import Batch
from fedray.core.task import Task
from fedray.gradients import direct_linear, recording
from fedray.gradients.direct_linear import DirectLinear
from fedray.gradients.known_code import unknown_code
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.network import Network
from fedray.gradients.passes import UnfitTarget
from fedray.gradients.stack import StackNetwork
from fedray.models.small import LeNet5

STEPS = 12
MORE = MODELS | {"normed": (Normed, (12,)), "partial": (Partial, (12,))}


@pytest.fixture(autouse=True)
def early(monkeypatch):
    """Gradients are recorded at the third mini-batch, and replayed without comparison from the sixth on."""
    monkeypatch.setattr(recording, "FIRST", 2)


def calls_of(module: nn.Module) -> list[int]:
    """Returns a list that grows by one with each forward pass of ``module``."""
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def trained(network: Network, shape: tuple[int, ...], steps: int = STEPS, clients: int = 2) -> list[Tensor]:
    """Returns all that is computed in ``steps`` steps of gradient descent of some clients, whose batches are full and
    ragged in turn: gradients, losses, metrics and models."""
    at = network.loaded().rows(clients).clone()
    found = []
    for step in range(steps):
        samples = data(shape, 6 * clients, seed=step)
        counts = [6, 4, 1][:clients] if step % 4 == 3 else None
        x, y = samples.x.view(clients, 6, *shape), samples.y.view(clients, 6)
        gradient = network.gradients(at, Batch(x, y, 0, counts))
        at.parameters.sub_(gradient.value, alpha=0.1)
        assert gradient.followed is not None
        found += [gradient.value.clone(), gradient.task_loss, gradient.followed[0], at.row.clone()]
    return found


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def is_replayed(network: Network) -> bool:
    assert network.recorded is not None
    return any(found.replay is not None for found in network.recorded._shapes.values())


def both(make: Callable[[], nn.Module], kind: Any = LoopNetwork) -> tuple[Network, Network]:
    """Returns a network whose gradients may be replayed, and an equal one where they are not."""
    return replaying(make, kind), kind(made(make))


def replaying(make: Callable[[], nn.Module], kind: Any = LoopNetwork) -> Network:
    network: Network = kind(made(make))
    network.replay()
    return network


@pytest.mark.parametrize(
    ("kind", "name"), [(LoopNetwork, name) for name in MORE] + [(StackNetwork, name) for name in MODELS]
)
def test_replayed_gradients_have_the_bits_of_others(kind, name):
    make, shape = MORE[name]
    replayed, eager = both(make, kind)
    calls = calls_of(replayed.module)
    assert equal(trained(replayed, shape), trained(eager, shape))
    assert is_replayed(replayed)
    before = len(calls)
    trained(replayed, shape, 3)
    assert len(calls) <= before + 1, "the module has something to do for a comparison only"


@pytest.mark.skipif(direct_linear.saved_tensors_have_hooks(), reason="this torch can't tell whether there are hooks")
@pytest.mark.parametrize("name", MORE)
def test_large_linear_layers_write_their_gradients_in_a_replay_too(name, monkeypatch):
    monkeypatch.setattr(direct_linear, "LEAST", 20)
    written = []
    write = DirectLinear.write
    monkeypatch.setattr(DirectLinear, "write", lambda *args: (written.append(1), write(*args)))
    make, shape = MORE[name]
    replayed, eager = both(make)
    assert equal(trained(replayed, shape), trained(eager, shape))
    assert is_replayed(replayed)
    assert written


def test_no_bit_depends_on_when_it_is_recorded(monkeypatch):
    found = []
    for first in (0, 1, 5):
        monkeypatch.setattr(recording, "FIRST", first)
        found.append(trained(replaying(Normed), (12,)))
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


class Branching(nn.Module):
    """Looks at the values of its inputs, as a clipping by hand does."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        z = self.last(x)
        return z / 2 if z.norm() > 8 else z


class Hiding(nn.Module):
    """Uses its weight through a reference that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 10)
        self.hidden = [self.last.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) + x @ self.hidden[0].T


class HidingStatistics(Normed):
    """Uses its buffer through a reference that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [self.norm.running_mean]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.hidden[0].mean()


class Counting(nn.Module):
    """Writes into a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.count = nn.Linear(12, 10), torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.last(x) / self.count


class Noisy(nn.Module):
    """Draws random numbers, which belong to the step."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + torch.zeros_like(x).bernoulli(0.5))


class CumulativeNorm(nn.Sequential):
    """Its BatchNorm averages over all batches, so that it looks at their number."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(12, momentum=None), nn.Linear(12, 10))


class WritingInputs(nn.Module):
    """Normalises its inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5).div_(0.5)
        return self.last(x)


class Clamping(nn.Module):
    """Changes its weight in place."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.1, 0.1)
        return self.last(x)


class Reshaping(nn.Module):
    """Changes the shape of a tensor that others use too."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.detach().unsqueeze_(1)).squeeze(1)


class OwnWay(nn.Conv2d):
    """Leaves ``forward`` as it is, but not what it calls."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


class Composed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 4))


@pytest.mark.parametrize(
    ("make", "unknown"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4)), None),
        (lambda: LeNet5((1, 28, 28), 10), None),
        (Composed, None),
        (Partial, "Partial has user-defined code"),
        (lambda: OwnWay(1, 2, 3), "OwnWay has user-defined code"),
        (lambda: nn.Sequential(Counting()), "Counting has user-defined code"),
        (lambda: odd_modules.made("method_replaced"), "the forward of a layer Linear is not torch's"),
        (
            lambda: odd_modules.made("function_in_a_layer"),
            "the activation of a layer TransformerEncoderLayer is not torch's",
        ),
        (lambda: odd_modules.made("traced"), "Sequential has user-defined code"),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, activation=torch.relu), None),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(12, 4)), None),
    ],
)
def test_by_default_known_code_alone_is_replayed(make, unknown):
    assert unknown_code(make(), Task()) == unknown
    own_loss = Task(loss=lambda outputs, targets: outputs.sum(1))
    assert unknown_code(make(), own_loss) == (unknown or "the loss is user-defined")
    hooked = make()
    [*hooked.parameters()][-1].register_hook(lambda gradient: gradient.clamp(-1, 1))
    assert unknown_code(hooked, Task()) is not None


@pytest.mark.parametrize(
    "make", [Branching, Hiding, HidingStatistics, Counting, CumulativeNorm, WritingInputs, Clamping, Reshaping]
)
def test_what_cannot_be_replayed_is_computed_in_the_ordinary_way(make):
    replayed, eager = both(make)
    assert equal(trained(replayed, (12,), clients=1), trained(eager, (12,), clients=1))
    assert not is_replayed(replayed)


def test_other_random_numbers_are_drawn_in_each_step():
    network = replaying(Noisy)
    at, samples = network.loaded().rows(1), data((12,), 6)
    with torch.random.fork_rng():
        found = [network.gradients(at, Batch(samples.x[None], samples.y[None], 0)).value for _ in range(STEPS)]
    assert not is_replayed(network)
    assert len({tuple(each.flatten().tolist()) for each in found}) == STEPS


class Scheduled(nn.Module):
    """Changes what it computes after some forward passes, without torch's knowledge."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.last, self.passes, self.until = nn.Linear(12, 4), 0, until

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.last(x) * (1 if self.passes <= self.until else 0.5)


def values(network: Network) -> list[Tensor]:
    """Returns the gradients of full batches of one client at one model."""
    at = network.loaded().rows(1)
    batches = (data((12,), 6, seed=step) for step in range(STEPS))
    return [network.gradients(at, Batch(each.x[None], each.y[None], 0)).value for each in batches]


def test_a_module_that_changes_while_the_recording_is_on_trial_is_not_replayed():
    # the recording itself is one more forward pass than the steps need
    replayed, eager = replaying(lambda: Scheduled(5)), LoopNetwork(made(lambda: Scheduled(4)))
    assert equal(values(replayed), values(eager))
    assert not is_replayed(replayed)


@pytest.mark.cpu
def test_a_module_that_changes_later_is_an_error_in_one_line(tmp_path):
    with pytest.raises(UserError, match="does not compute the same"):
        values(replaying(lambda: Scheduled(6)))
    samples = data((12,), 40)
    train = samples.x.numpy(), samples.y.numpy(), np.zeros(40, int)
    settings = {"data.partition.kind": "natural", "train.local_steps": 200, "train.batch_size": 6, "run.rounds": 1}
    settings |= {"algorithm.name": "fedavg", "engine.kind": "local", "engine.vectorize": False}
    settings |= {"engine.replay": True}
    # the passes with which it is tried before the first round do not find it
    model = made(lambda: Scheduled(10))
    with pytest.raises(UserError) as caught:
        simulate(settings | {"run.output": str(tmp_path)}, data=train, test=train[:2], model=model)
    assert recording.CHANGED in str(caught.value)
    assert "\n" not in str(caught.value)
    settings |= {"engine.replay": "auto", "run.output": str(tmp_path / "eager")}
    model = made(lambda: Scheduled(10))
    assert simulate(settings, data=train, test=train[:2], model=model).summary["status"] == "completed"


def test_a_target_that_does_not_fit_is_named_as_without_a_replay():
    network = replaying(MODELS["logistic"][0])
    trained(network, (12,))
    assert is_replayed(network)
    samples = data((12,), 12)
    y = samples.y.clone()
    y[9] = 99
    with pytest.raises(UnfitTarget) as caught:
        network.gradients(network.loaded().rows(2), Batch(samples.x.view(2, 6, 12), y.view(2, 6), 0))
    assert (caught.value.row, caught.value.place) == (1, 3)
    assert "does not take its target 99" in str(caught.value)


def test_shapes_beyond_the_largest_number_stay_eager(monkeypatch):
    monkeypatch.setattr(recording, "MOST", 1)
    network, eager = both(MODELS["mlp"][0])
    assert equal(trained(network, (12,)), trained(eager, (12,)))
    assert network.recorded is not None
    assert [found.hopeless for found in network.recorded._shapes.values()] == [False, True]


def test_a_rules_own_loss_is_never_replayed():
    network = replaying(MODELS["mlp"][0])
    at, samples = network.loaded().rows(1), data((12,), 6)
    batch = Batch(samples.x[None], samples.y[None], 0)
    for _ in range(STEPS):
        network.gradients(at, batch, lambda outputs, task: task)
    assert not is_replayed(network)


def test_attention_without_dropout_draws_nothing():
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")
    recording.record(lambda q: (attention(q, q, q, 0.0)[0],), [q])
    with pytest.raises(recording.Unrecordable):
        recording.record(lambda q: (attention(q, q, q, 0.1)[0],), [q])
