"""The clients' optimizers against those of torch.optim: SGD with Nesterov's momentum, Adam, AdamW; and what decays."""

from __future__ import annotations

import copy
from typing import Any

import client_stacks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from fedray import ClientError, UserError, simulate
from fedray.algorithms import Result, Upload, find_algorithm, known_algorithms
from fedray.algorithms.fedavg import FedAvg
from fedray.client.optimizer import Carry, LocalOptimizer, Memory
from fedray.config import load
from fedray.core.local_training import LocalTraining
from fedray.core.vectors import Layout, Model
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.network import Network
from fedray.gradients.stack import StackNetwork
from fedray.testing import AlgorithmContract

rng = np.random.default_rng(2)
X, Y = rng.normal(size=(40, 6)).astype(np.float32), np.arange(40) % 3


class Normed(nn.Module):
    """A model with a normalisation layer of each kind, whose weights have other names than usual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.group = nn.Linear(6, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8)
        self.batch, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.batch(self.group(self.layer(self.first(x))))))


def settings(folder: Any, **keys: Any) -> dict[str, Any]:
    return {
        "run.output": str(folder), "run.rounds": 1, "algorithm.name": "fedavg", "train.local_steps": 5, "train.lr": 0.2,
        "train.batch_size": "full", "engine.kind": "local", "data.clients": 1, "data.partition.kind": "iid", **keys,
    }  # fmt: skip


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Returns the parameters after five steps of torch's optimizer on the whole data set."""
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.from_numpy(X)), torch.from_numpy(Y)).backward()
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def same(
    folder: Any, keys: dict[str, Any], model: nn.Module, expected: dict[str, np.ndarray], atol: float = 2e-6
) -> None:
    found = simulate(settings(folder, **keys), data=(X, Y), test=(X, Y), model=model).model()
    for name, parameter in found.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], atol=atol, err_msg=name)


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_nesterov(vectorize, nesterov, tmp_path):
    torch.manual_seed(3)
    model, other = nn.Linear(6, 3), nn.Linear(6, 3)
    other.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.8, weight_decay=0.1, nesterov=nesterov)
    keys = {"train.momentum": 0.8, "train.weight_decay": 0.1, "train.nesterov": nesterov}
    same(tmp_path, {**keys, "engine.vectorize": vectorize}, model, trained(other, optimizer))


@pytest.mark.parametrize("all_of_them", [False, True])
def test_weight_decay_of_some_parameters(all_of_them, tmp_path):
    torch.manual_seed(3)
    model, other = Normed(), Normed()
    other.load_state_dict(model.state_dict())
    named = dict(other.named_parameters())
    weights = ("first.weight", "last.weight")
    groups = [
        {"params": [named[name] for name in weights], "weight_decay": 0.3},
        {"params": [p for name, p in named.items() if name not in weights], "weight_decay": 0.3 * all_of_them},
    ]
    keys = {"train.weight_decay": 0.3, "train.decay_norms_and_biases": all_of_them}
    same(tmp_path, keys, model, trained(other, torch.optim.SGD(groups, lr=0.2)))


def test_which_parameters_decay():
    network = Network(nn.Sequential(nn.Embedding(4, 3), nn.LSTM(3, 2), nn.RMSNorm(2), nn.Linear(2, 2)))
    decayed = {slot.name for slot in network.layout.slots if network.decayed[slot.start] == 1}
    assert decayed == {"0.weight", "1.weight_ih_l0", "1.weight_hh_l0", "3.weight"}
    assert network.decayed.sum() == 12 + 8 * 3 + 8 * 2 + 4


def test_nesterov_needs_momentum():
    with pytest.raises(UserError, match=r"train.nesterov=true needs train.momentum above 0"):
        load({"train.nesterov": True})


ADAMS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
OPTIONS: list[dict[str, float]] = [{}, {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}]


@pytest.mark.parametrize("name", ADAMS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("decay", [0, 0.1])
def test_adam_is_torchs_to_the_last_bits(name, options, decay):
    """On the same gradients, of two clients, in double precision."""
    betas = options.get("beta1", 0.9), options.get("beta2", 0.999)
    module = nn.Linear(6, 3, bias=False).double()
    rows = Layout(module).pack(module).row.double().repeat(2, 1)
    theirs = torch.nn.Parameter(rows.clone())
    torchs = ADAMS[name]([theirs], lr=0.3, betas=betas, eps=options.get("epsilon", 1e-8), weight_decay=decay)
    training = LocalTraining(seed=0, optimizer=name, weight_decay=decay, **options)
    carry, optimizer = Carry({"y": Model(rows, rows.shape[1])}), LocalOptimizer(training, 0.3)
    for _ in range(20):
        gradient = torch.from_numpy(rng.normal(size=rows.shape) * 10.0 ** rng.integers(-6, 3, size=rows.shape))
        carry = optimizer.descend(carry, "y", gradient)
        theirs.grad = gradient
        torchs.step()
    torch.testing.assert_close(carry["y"].row, theirs.detach(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("name", ADAMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_adam_on_one_client(name, options, vectorize, tmp_path):
    """Two rounds, each with a new memory, as the server has no memory of the first."""
    torch.manual_seed(3)
    model, other = nn.Linear(6, 3), nn.Linear(6, 3)
    other.load_state_dict(model.state_dict())
    betas = options.get("beta1", 0.9), options.get("beta2", 0.999)
    keys = {f"train.{key}": value for key, value in options.items()}
    keys |= {"train.optimizer": name, "train.weight_decay": 0.1, "run.rounds": 2, "engine.vectorize": vectorize}
    for _ in range(2):
        torchs = ADAMS[name](
            other.parameters(), lr=0.2, betas=betas, eps=options.get("epsilon", 1e-8), weight_decay=0.1
        )
        expected = trained(other, torchs)
    # where a gradient is small, the root that it is divided by amplifies its rounding
    same(tmp_path, keys, model, expected, atol=5e-5)


def test_adam_of_clients_with_unequal_numbers_of_steps(tmp_path):
    """Clients with 30 and 10 samples make 6 and 2 steps of 5. In a stack the second waits for the first."""
    config = settings(
        tmp_path, **{
            "train.optimizer": "adam", "train.local_steps": None, "train.local_epochs": 1, "train.batch_size": 5,
            "data.clients": 2, "data.partition": {"kind": "quantity_skew", "sizes": [30, 10]},
        },
    )  # fmt: skip
    model = nn.Linear(6, 3)
    runs = [
        simulate({**config, "engine.vectorize": stacked, "run.name": str(stacked)}, data=(X, Y), test=(X, Y),
                 model=model).model()
        for stacked in (False, True)
    ]  # fmt: skip
    for one, other in zip(*(run.parameters() for run in runs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


class Ditto(FedAvg):
    """Ditto's personal model v, which each client trains beside y: two descents in one step."""

    client_models = ("v",)
    PULL = 0.5

    def begin(self, client):
        return Carry({"y": client.start("x"), "v": client.start("x")})

    def step(self, client, carry, batch):
        y, v = carry["y"], carry["v"]
        carry = client.optimizer.descend(carry, "y", client.objective.gradient(y, batch))
        pull = self.PULL * (v - client.shared["x"])
        return client.optimizer.descend(carry, "v", client.objective.gradient(v, batch) + pull)

    def end(self, client, carry):
        return Result({"y": Upload.weighted_mean(carry["y"])}, state={"v": carry["v"]})


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True}, "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw"},
}  # fmt: skip


def torchs(name: str, model: nn.Module, lr: float, decay: float) -> torch.optim.Optimizer:
    if name in ADAMS:
        return ADAMS[name](model.parameters(), lr=lr, weight_decay=decay)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay, nesterov=name == "nesterov")


def ditto_by_torch(name: str, model: nn.Module, batches: list[Any], lr: float, decay: float, clip: float) -> Any:
    """Returns y and v of one client after a round, each trained by an optimizer of torch's of its own."""
    x, y, v = model, copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [torchs(name, each, lr, decay) for each in (y, v)]
    for inputs, targets in batches:
        for each, optimizer in zip((y, v), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(each(inputs), targets).backward()
            if each is v:
                for parameter, start in zip(v.parameters(), x.parameters(), strict=True):
                    parameter.grad += Ditto.PULL * (parameter.detach() - start.detach())
            torch.nn.utils.clip_grad_norm_(each.parameters(), clip)
            optimizer.step()
    return y, v


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_models_of_a_step_have_a_memory_each(name, clients):
    """One client, and two in a stack with 3 and 6 steps, of which the first waits for the second."""
    lr, decay, clip = 0.05, 0.02, 0.5
    torch.manual_seed(3)
    model = nn.Linear(6, 3)
    network = (LoopNetwork if clients == 1 else StackNetwork)(copy.deepcopy(model))
    sizes = [15, 30][:clients]
    training = LocalTraining(
        seed=0, batch_size=5, local_steps=None, local_epochs=1, weight_decay=decay, grad_clip=clip, **OPTIMIZERS[name]
    )
    samples = client_stacks.data((6,), 45, classes=3)
    client = client_stacks.client_phase(network, samples, sizes, training, lr=lr, start=network.layout.pack(model))
    batches = list(client.data.batches())
    carry = client_stacks.trained(Ditto(), client)
    for row, steps in enumerate(size // 5 for size in sizes):
        own = [(batch.x[row], batch.y[row]) for batch in batches[:steps]]
        for key, expected in zip("yv", ditto_by_torch(name, model, own, lr, decay, clip), strict=True):
            found = network.layout.named(carry[key][row])
            for part, value in expected.named_parameters():
                torch.testing.assert_close(found[part], value.detach(), rtol=1e-4, atol=2e-5, msg=f"{key}.{part}")


class Forgetful(FedAvg):
    """Makes a new carry in each step, in which the momentum is lost."""

    def step(self, client, carry, batch):
        return Carry({"y": super().step(client, carry, batch)["y"]})


def test_the_contract_tests_notice_a_momentum_that_is_lost_or_shared(tmp_path, monkeypatch):
    contract = AlgorithmContract()
    contract.algorithm = f"{__file__}:Forgetful"
    with pytest.raises(ClientError, match="a step of the model 'y' is not that of SGD with the gradients"):
        contract.test_steps_of_the_optimizer(tmp_path / "forgetful")
    contract.algorithm = f"{__file__}:Ditto"
    contract.test_steps_of_the_optimizer(tmp_path / "ditto")
    shared = lambda carry, name: next(iter(carry.memories.values()), Memory())  # noqa: E731
    monkeypatch.setattr(Carry, "memory", shared)
    monkeypatch.setattr(
        Carry, "remember", lambda carry, name, *memory: Carry(carry._values, memories={"y": Memory(*memory)})
    )
    with pytest.raises(ClientError, match=r"a step of the model '[yv]' is not that of SGD with the gradients"):
        contract.test_steps_of_the_optimizer(tmp_path / "shared")


GRADIENT_RULES = {
    "fedavg", "fedprox", "fedavgm", "slowmo", "fedmom", "fedadam", "fedyogi", "fedadagrad", "moon", "fedtrip", "feddyn",
    "adabest", "fedacg", "fedexp", "fedsam", "fedper", "fedbn",
    "fedrep", "lg_fedavg", "fedbabu", "ditto", "apfl", "perfedavg", "pfedme", "ifca", "fedproto",
}  # fmt: skip
"""The algorithms whose local rule is a gradient step of some loss, by their papers' formulas."""


@pytest.mark.parametrize("name", sorted(known_algorithms()))
def test_which_algorithms_take_adam(name, tmp_path):
    assert find_algorithm(name)().any_optimizer == (name in GRADIENT_RULES)
    config = settings(
        tmp_path, **{"algorithm.name": name, "train.optimizer": "adam", "train.lr": 0.01, "train.local_steps": 4}
    )
    call = lambda: simulate({**config, "data.clients": 2}, data=(X, Y), test=(X, Y), model=Normed())  # noqa: E731
    if name in GRADIENT_RULES:
        assert np.isfinite(call().metrics["train_loss"]).all()
        return
    with pytest.raises(UserError, match=rf"train.optimizer=adam: the rules of algorithm.name={name} count on"):
        call()


def test_kept_momentum_is_that_of_sgd(tmp_path):
    keys = {"algorithm.name": "slowmo", "algorithm.buffer": "maintain", "train.optimizer": "adamw"}
    with pytest.raises(UserError, match=r"train.optimizer=adamw: the rules of algorithm.name=slowmo count on the step"):
        simulate(settings(tmp_path, **keys), data=(X, Y), test=(X, Y), model=nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"beta1": 0.5}, "train.beta1 is not for train.optimizer=sgd"),
        ({"optimizer": "adam", "momentum": 0.5}, "train.momentum is not for train.optimizer=adam"),
        ({"beta1": 0, "beta2": 0.5}, "train.beta1 is not for train.optimizer=sgd"),
        ({"optimizer": "adam", "epsilon": 1e-60}, "train.epsilon must be at least 1e-30, not 1e-60"),
        ({"optimizer": "adm"}, "train.optimizer must be 'sgd', 'adam' or 'adamw', not 'adm'"),
        ({"optimizer": "adam", "beta2": 1}, "train.beta2 must be below 1, not 1"),
    ],
)
def test_options_of_another_optimizer(keys, message):
    with pytest.raises(UserError, match=message):
        load({f"train.{key}": value for key, value in keys.items()})


def test_the_options_in_config_yaml(tmp_path):
    run = simulate(settings(tmp_path, **{"train.optimizer": "adam", "train.beta1": 0.8}), data=(X, Y), test=(X, Y),
                   model=nn.Linear(6, 3))  # fmt: skip
    written = yaml.safe_load((run.folder / "config.yaml").read_text())["train"]
    assert {key: written[key] for key in ("optimizer", "beta1", "beta2", "epsilon")} == {
        "optimizer": "adam", "beta1": 0.8, "beta2": 0.999, "epsilon": 1e-8
    }  # fmt: skip
