"""What user-defined code draws at random is seeded, or the user is told that it is not."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedray import FedrayWarning, simulate
from fedray.algorithms import Carry, Result, Upload
from fedray.algorithms.fedavg import FedAvg
from fedray.testing.contracts import SETTINGS, small_source

CONFIG = {**SETTINGS, "run.rounds": 3, "engine.kind": "local"}
CONFIG = {k: v for k, v in CONFIG.items() if k not in ("algorithm.name", "model.name", "model.hidden")}

AT_SERVER = {"torch": lambda: float(torch.rand(())), "NumPy": np.random.rand, "Python": random.random}


class AtServer(FedAvg):
    """FedAvg whose server moves by a random part of the way."""

    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        server["x"] = server["x"].lerp(sums["y"], float(np.mean([draw() for draw in AT_SERVER.values()])))


class AtClients(FedAvg):
    """FedAvg whose clients send noise too, from a generator of their own, or from the global one."""

    is_global = False

    def end(self, client: Any, carry: Carry) -> Result:
        def noise(row: int) -> Tensor:
            generator = None if self.is_global else client.generator(row)
            return torch.randn(carry["y"].parameters.shape[-1], generator=generator)

        y = carry["y"] + 0.01 * torch.stack([noise(row) for row in range(client.size)])
        return Result(uploads={"y": Upload.weighted_mean(y)})


class Global(AtClients):
    is_global = True


class Late(nn.Module):
    """A linear model that draws from the generator ``source`` for mini-batches of more than two samples, which the
    trial passes do not have."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.layer, self.source = nn.Linear(12, 4), source

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x.flatten(1))
        # on values, so that clients are not trained in stacks
        return z + (AT_SERVER[self.source]() if len(x) > 2 and float(x.sum()) < 1e9 else 0.0)


def sha(folder: Path, algorithm: type[FedAvg] = FedAvg, seed: int = 0, **settings: Any) -> str:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    model = settings.pop("model", lambda: nn.Linear(12, 4))
    config = {**CONFIG, **{name.replace("__", "."): value for name, value in settings.items()}}
    result = simulate({**config, "run.output": str(folder)}, data=small_source(), algorithm=algorithm, model=model)
    return str(result.summary["model_sha256"])


@pytest.mark.filterwarnings("error::fedray.FedrayWarning")
def test_what_rules_of_the_server_draw_is_seeded_by_the_run(tmp_path):
    found = [sha(tmp_path / str(n), AtServer, seed=n, run__seed=seed) for n, seed in enumerate((0, 0, 1))]
    assert found[0] == found[1] != found[2]


@pytest.mark.filterwarnings("error::fedray.FedrayWarning")
def test_what_clients_draw_from_their_generators_does_not_depend_on_the_stack(tmp_path):
    sizes = {"stack": "auto", "pairs": 2, "alone": 1}
    found = {
        sha(tmp_path / name, AtClients, seed=n, engine__chunk=size) for n, (name, size) in enumerate(sizes.items())
    }
    assert len(found) == 1
    assert sha(tmp_path / "fedavg") not in found


def test_a_client_has_other_numbers_for_each_draw_round_and_seed(tmp_path):
    numbers: list[list[float]] = []

    class Drawing(FedAvg):
        def end(self, client: Any, carry: Carry) -> Result:
            for row in range(client.size):
                numbers.append([float(torch.rand((), generator=client.generator(row, draw))) for draw in (0, 1)])
            return super().end(client, carry)

    for seed in (0, 1):
        sha(tmp_path / str(seed), Drawing, run__seed=seed)
    flat = [each for pair in numbers for each in pair]
    assert len(flat) > 10
    assert len(set(flat)) == len(flat)


def test_draws_of_clients_from_a_global_generator_are_told(tmp_path):
    with pytest.warns(
        FedrayWarning, match="drawn random numbers from the global generator of torch, which.*client.gen"
    ):
        sha(tmp_path, Global)


@pytest.mark.filterwarnings("error::fedray.FedrayWarning:fedray")
def test_torchs_numbers_of_a_module_that_draws_late_are_seeded(tmp_path):
    found = [sha(tmp_path / str(seed), seed=seed, model=lambda: Late("torch")) for seed in (0, 1)]
    assert found[0] == found[1]


@pytest.mark.parametrize(("source", "word"), [("NumPy", "numpy"), ("Python", "python")])
def test_other_late_numbers_of_a_module_are_told(tmp_path, source, word):
    with pytest.warns(FedrayWarning, match=f"random numbers from the global generator of {word}, which"):
        sha(tmp_path, model=lambda: Late(source))


class Read(Dataset[Any]):
    """A data set whose items are read when they are used."""

    def __init__(self) -> None:
        source = small_source()
        self.x, self.targets = source.x_train, source.y_train

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], int(self.targets[i])


class TrainingToo(FedAvg):
    """FedAvg whose server trains its model in its own rule, on public samples."""

    needs_public = True

    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        server["x"] = sums["y"]
        client = server.as_client(server, 2)
        carry = self.local_steps(client, Carry({"y": client.start("x")}))
        server["x"] = carry["y"][0]


def test_a_rule_of_the_server_may_read_samples(tmp_path):
    """Seeded items are not waited for by the thread that reads ahead."""
    keys = {
        **CONFIG,
        "model.name": "logistic",
        "run.output": str(tmp_path),
        "data.access": "lazy",
        "data.public_samples": 40,
    }
    source = small_source()

    def call() -> None:
        ended.append(simulate(keys, data=Read(), test=(source.x_test, source.y_test), algorithm=TrainingToo))

    ended: list[Any] = []
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert [result.summary["status"] for result in ended] == ["completed"]
