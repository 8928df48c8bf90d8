"""A zoo of modules that are odd in one way each. Each is trained as a plain loop of PyTorch trains it, whichever way
fedray computes, or is refused in one line."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import odd_buffers  # noqa: F401
import odd_code  # noqa: F401
import odd_functions  # noqa: F401
import odd_layers  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from odd_modules import IMAGE, LENGTH, WIDTH, WORDS, ZOO, made
from pairs import in_turn
from small_runs import needs_compiler
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedray import UserError, evaluate, simulate
from fedray.core.batches import Batch, schedule
from fedray.core.copying import copied
from fedray.core.norms import unit_vectors
from fedray.core.places import Places
from fedray.core.seeds import Purpose, every_rng
from fedray.core.task import task_of
from fedray.gradients import recording
from fedray.gradients.loop import LoopNetwork
from fedray.models.behaviour import behaviour_of
from fedray.models.inspection import prepare
from fedray.testing.contracts import SETTINGS as OF_CONTRACTS
from fedray.testing.contracts import small_source
from fedray.testing.pickling import pickling_workers
from fedray.tracking.result import RunResult

SIZES, BATCH, ROUNDS, TESTED = (9, 6, 4), 4, 2, 20
"""The first client's last mini-batch is a single sample, and the second's is of two."""

LR, MOMENTUM, DECAY = 0.1, 0.5, 0.01

SETTINGS: dict[str, Any] = {
    "algorithm.name": "fedavg", "data.partition.kind": "natural", "train.local_epochs": 1, "train.local_steps": None,
    "train.batch_size": BATCH, "train.lr": LR, "train.momentum": MOMENTUM, "train.weight_decay": DECAY,
    "run.rounds": ROUNDS, "engine.kind": "local", "engine.replay": False, "engine.compile": False,
    "engine.vectorize": False, "run.checkpoint_every": 1,
}  # fmt: skip

RIGHT = [name for name, each in ZOO.items() if each.refused is None]


def samples(inputs: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, count)
    if inputs == "tokens":
        return rng.integers(0, WORDS, (count, LENGTH)), y
    shape = (WIDTH,) if inputs == "flat" else IMAGE
    return (rng.normal(size=(count, *shape)) + 0.3 * y.reshape(-1, *[1] * len(shape))).astype(np.float32), y


def run(folder: Path, name: str, **changed: Any) -> RunResult:
    """Returns the run of a module of the zoo, with some keys changed."""
    keys = {key.replace("__", "."): value for key, value in changed.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return simulate({**SETTINGS, "run.output": str(folder), **keys}, **sets(name), model=made(name))


def sets(name: str) -> dict[str, Any]:
    """Returns the training and the test set of a module of the zoo, as arguments of simulate."""
    x, y = samples(ZOO[name].inputs, sum(SIZES), 1)
    return {
        "data": (x, y, np.repeat(np.arange(len(SIZES)), SIZES)), "test": samples(ZOO[name].inputs, TESTED, 2)
    }  # fmt: skip


class Plain:
    """Federated averaging as a loop of plain PyTorch, with the order of samples and the random numbers of fedray."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.module = module.float() if next(module.parameters()).dtype is torch.float64 else module
        x, y = samples(ZOO[name].inputs, sum(SIZES), 1)
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)
        for layer in module.modules():
            if isinstance(layer, _BatchNorm):
                layer.register_forward_pre_hook(self.rest_at_a_single_value)

    @staticmethod
    def rest_at_a_single_value(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if layer.training and inputs[0].numel() == inputs[0].shape[1]:
            layer.eval()

    def run(self) -> None:
        for number in range(1, ROUNDS + 1):
            sent = self.state()
            found = [self.client(client, number, sent) for client in range(len(SIZES))]
            self.load({name: self.mean(name, [each[name] for each in found]) for name in sent})

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in Places(self.module).tensors.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        places = Places(self.module)
        for name, tensor in places.tensors.items():
            if name in state:
                tensor.data = state[name].clone()

    def client(self, client: int, number: int, sent: dict[str, Tensor]) -> dict[str, Tensor]:
        self.load(sent)
        own = np.flatnonzero(np.repeat(np.arange(len(SIZES)), SIZES) == client)
        optimizer = torch.optim.SGD([p for p in self.module.parameters() if p.requires_grad], LR, MOMENTUM, 0, DECAY)
        batches = schedule(0, Purpose.BATCHES, number, client, SIZES[client], BATCH, None, 1)
        for step, (order, count) in enumerate(zip(batches.order, batches.counts, strict=True)):
            at = own[order[:count]]
            self.module.train()
            optimizer.zero_grad()
            with every_rng(0, Purpose.DROPOUT, number, client, step):
                F.cross_entropy(self.module(self.x[at]), self.y[at]).backward()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # of a parameter without a gradient, fedray knows that it is zero
                    dense = None if parameter.grad is None else parameter.grad.to_dense()
                    parameter.grad = torch.zeros_like(parameter) if dense is None else dense
            optimizer.step()
        return self.state()

    def mean(self, name: str, values: Sequence[Tensor]) -> Tensor:
        if not (values[0].is_floating_point() or values[0].is_complex()):
            return values[0]
        if all(torch.equal(value.nan_to_num(), values[0].nan_to_num()) for value in values):
            return values[0]
        wide = torch.complex128 if values[0].is_complex() else torch.float64
        total = sum(value.to(wide) * (size / sum(SIZES)) for value, size in zip(values, SIZES, strict=True))
        assert isinstance(total, Tensor)
        total = total.to(values[0].dtype)
        return F.normalize(total, dim=0) if name in unit_vectors(self.module) else total

    def evaluated(self, name: str) -> tuple[float, float]:
        """Returns the loss and the accuracy on the test set. The model stays as it is."""
        x, y = (torch.from_numpy(each) for each in samples(ZOO[name].inputs, TESTED, 2))
        module = copied(self.module)
        module.eval()
        with torch.no_grad():
            outputs = module(x)
        return float(F.cross_entropy(outputs, y)), float((outputs.argmax(1) == y).double().mean())


@pytest.fixture(scope="module")
def plain() -> Any:
    """Returns the final state of the plain loop, its loss and its accuracy, by the name of a module."""

    @cache
    def of(name: str) -> Any:
        loop = Plain(name, initial(name))
        loop.run()
        return (loop.state(), *loop.evaluated(name))

    return of


def initial(name: str) -> nn.Module:
    module = made(name)
    if name == "lazy":
        # its weights are drawn when the first samples are seen
        x, _ = samples("flat", sum(SIZES), 1)
        module.eval()
        with every_rng(0, Purpose.INIT, 1), torch.no_grad():
            module(torch.from_numpy(x[:2]))
    return module


def assert_like_plain(result: RunResult, plain: Any, coarse: bool = False) -> None:
    state, loss, accuracy = plain
    module = result.model()
    found = Places(module).tensors
    close = {"rtol": 1e-2, "atol": 2e-3} if coarse else {"rtol": 2e-4, "atol": 2e-5}
    for name, tensor in state.items():
        if name not in found:
            # made in its first pass
            continue
        torch.testing.assert_close(
            found[name].to(tensor.dtype), tensor, **close, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    row = result.metrics.iloc[-1]
    assert row["test_loss"] == pytest.approx(loss, rel=1e-3)
    assert row["test_accuracy"] == pytest.approx(accuracy)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the run with which the other ways to make it are compared, by the name of a module."""
    return cache(lambda name: run(tmp_path_factory.mktemp("whole"), name))


@pytest.mark.parametrize("name", RIGHT)
def test_a_module_is_trained_as_a_plain_loop_trains_it(name, plain, whole):
    assert_like_plain(whole(name), plain(name), ZOO[name].coarse)


@pytest.mark.parametrize("name", in_turn(RIGHT, 0, 3))
def test_no_bit_depends_on_how_gradients_are_taken_or_on_the_workers(tmp_path, name, whole, monkeypatch):
    sha = whole(name).summary["model_sha256"]
    with pickling_workers(2):
        assert run(tmp_path / "workers", name).summary["model_sha256"] == sha
    monkeypatch.setattr(recording, "FIRST", 1)
    assert run(tmp_path / "replayed", name, engine__replay=True).summary["model_sha256"] == sha
    assert run(tmp_path / "auto", name, engine__replay="auto").summary["model_sha256"] == sha


@pytest.mark.parametrize("name", in_turn(RIGHT, 1, 3))
def test_a_module_is_stacked_rightly_or_not_at_all(tmp_path, name, plain):
    try:
        result = run(tmp_path, name, engine__vectorize=True)
    except UserError as error:
        line = str(error)
    else:
        return assert_like_plain(result, plain(name), ZOO[name].coarse)
    assert "engine.vectorize=true: this model can't be batched over clients" in line
    assert "\n" not in line


@pytest.mark.parametrize("name", in_turn(RIGHT, 2, 3))
def test_a_saved_model_is_the_one_that_was_evaluated_and_a_resumed_run_ends_as_others(tmp_path, name, whole):
    whole = whole(name)
    begun = run(tmp_path / "begun", name, run__rounds=1, run__name="it")
    assert begun.summary["rounds"] == 1
    assert run(tmp_path / "begun", name, run__name="it").summary["model_sha256"] == whole.summary["model_sha256"]
    x, y = (torch.from_numpy(each) for each in samples(ZOO[name].inputs, TESTED, 2))
    with torch.no_grad():
        module = whole.model()
        outputs = module(x.double() if next(module.parameters()).dtype is torch.float64 else x)
    row = whole.metrics.iloc[-1]
    assert float(F.cross_entropy(outputs, y)) == pytest.approx(row["test_loss"], rel=1e-4)
    again = evaluate(whole.folder, **sets(name), model=made(name))
    assert again.metrics["loss"] == pytest.approx(row["test_loss"], rel=1e-6)
    assert again.model_sha256 == whole.summary["model_sha256"]
    # as initial weights, in a file that also torch can read
    loaded = run(
        tmp_path / "loaded",
        name,
        model__weights=str(whole.folder / "model.safetensors"),
        run__rounds=1,
        train__lr=1e-30,
    )
    assert loaded.metrics["test_loss"].iloc[-1] == pytest.approx(row["test_loss"], rel=0.2)


@pytest.mark.parametrize("name", [name for name in ZOO if name not in RIGHT])
def test_what_cannot_be_trained_is_one_line(tmp_path, name):
    refused = ZOO[name].refused
    assert refused is not None
    with pytest.raises(UserError) as caught:
        run(tmp_path, name)
    assert refused in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", RIGHT)
def test_a_gradient_that_is_taken_later_is_that_of_its_pass(name):
    """Other models are run through the module in between, as FedSiam-DA does."""

    def rng(row: int) -> AbstractContextManager[None]:
        return every_rng(0, Purpose.DROPOUT, row)

    module = made(name)
    x, y = (torch.from_numpy(each) for each in samples(ZOO[name].inputs, 12, 1))
    if name == "lazy":
        module(x[:2])
    prepare(module, name)
    found = behaviour_of(module, x[:2])
    network = LoopNetwork(
        module, task_of("classification", 1, -100), draws=True, changing=found.changing, writes=found.writes,
        overwrites=found.overwrites,
    )  # fmt: skip
    batch = Batch(x.view(2, 6, *x.shape[1:]), y.view(2, 6), 0)
    at = network.loaded().rows(2).clone()
    at.parameters[1] += 0.01
    right = network.gradients(at.clone(), batch, rng=rng).value
    if name == "InAListToo":
        with pytest.raises(UserError, match=r"first\.weight from an attribute that holds it beside its layer's"):
            network.training_pass(at, batch, rng=rng)
        return
    begun = network.training_pass(at.clone(), batch, rng=rng)
    network.forward(at.with_parameters(at.parameters * 1.5), batch.x, rng=rng)
    other = network.forward(at.with_parameters(at.parameters * 1.2), batch.x, rng=rng).logits
    found_in_loss = []

    def loss(outputs: Any, losses: Tensor) -> Tensor:
        found_in_loss.append(network.forward(at.with_parameters(at.parameters * 1.2), batch.x, rng=rng).logits)
        return losses

    later = begun.gradient(loss)
    assert float((later - right).norm()) <= 1e-5 * float(right.norm())
    for each in found_in_loss:
        torch.testing.assert_close(each, other)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_module_is_compiled_rightly_or_not_at_all(tmp_path, name, plain):
    assert_like_plain(run(tmp_path, name, engine__compile=True), plain(name), ZOO[name].coarse)


class Overwriting(nn.Module):
    """Writes into its inputs, which some algorithms use for a second gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.out(self.body(x.mul_(2)).relu())


class Careful(Overwriting):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body((x - 0.5) * 2).relu())


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedsam", "mime", "perfedavg"])
def test_inputs_are_the_same_in_every_pass(algorithm, vectorize, tmp_path):
    keys = {key: value for key, value in OF_CONTRACTS.items() if not key.startswith("model.")}
    keys |= {"algorithm.name": algorithm, "engine.vectorize": vectorize, "run.rounds": 2}

    def model(module: type[nn.Module]) -> str:
        place = {"run.output": str(tmp_path / module.__name__)}
        return str(simulate(keys | place, data=small_source(), model=module).summary["model_sha256"])

    assert model(Overwriting) == model(Careful)
