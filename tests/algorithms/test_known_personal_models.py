"""Personal models that are known without the rule's reference: local training, FedAvg, FedBN in torch's own modules,
and pFedMe's of quadratics."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import Normed, run
from torch import Tensor, nn

from fedray import Simulation
from fedray.testing.contracts import small_source

FULL = {
    "train__batch_size": "full", "train__local_epochs": None, "train__local_steps": 3, "train__cohort_size": 9,
    "run__rounds": 4, "run__personal_models_of": "all",
}  # fmt: skip
"""All clients take part, with all their samples in each step, so that nothing depends on who draws which mini-batch."""


def personal_models(folder: Path, algorithm: str, **hyper: Any) -> tuple[list[Tensor], Tensor]:
    """Returns the parameters of the clients' personal models, and those of the global model."""
    made = run(folder, algorithm=algorithm, **FULL, **{f"algorithm__{key}": value for key, value in hyper.items()})
    own = [load_file(made.folder / "personal" / f"client-{client}.safetensors") for client in range(9)]
    names = list(own[0])
    last = load_file(made.folder / "model.safetensors")
    return [torch.cat([each[name].ravel() for name in names]) for each in own], torch.cat(
        [last[name].ravel() for name in names]
    )


@pytest.mark.parametrize(("algorithm", "hyper"), [("ditto", {"lam": 0.0}), ("apfl", {"alpha": 1.0, "adaptive": False})])
def test_local_training(algorithm: str, hyper: dict[str, Any], tmp_path: Path) -> None:
    """Without a pull to the global model, and with nothing of it in the mixture, each client trains alone."""
    alone, _ = personal_models(tmp_path / "alone", "fedper", private=["*"])
    found, _ = personal_models(tmp_path / "found", algorithm, **hyper)
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert min(float((one - other).abs().max()) for one, other in pairwise(found)) > 0.01


def test_a_mixture_of_the_global_model_alone_is_the_global_model(tmp_path: Path) -> None:
    found, last = personal_models(tmp_path, "apfl", alpha=0.0, adaptive=False)
    for one in found:
        torch.testing.assert_close(one, last, rtol=1e-5, atol=1e-6)


def test_fedbn_without_normalisation_is_fedavg(tmp_path: Path) -> None:
    fedbn, fedavg = (run(tmp_path / name, algorithm=name) for name in ("fedbn", "fedavg"))
    assert fedbn.summary["model_sha256"] == fedavg.summary["model_sha256"]


def test_fedbn_in_modules_of_torch(tmp_path: Path) -> None:
    """Each client is a module of its own in float64. After a round the linear layers are the mean over the clients,
    weighted by their samples, and the normalisation layers with their statistics stay where they are."""
    source, ends = small_source(), [0, 30, 90, 200, 360]
    clients = [(source.x_train[a:b], source.y_train[a:b]) for a, b in pairwise(ends)]
    settings = {
        "algorithm.name": "fedbn", "train.batch_size": "full", "train.local_steps": 3, "train.lr": 0.1,
        "train.cohort_size": 4, "run.rounds": 4, "run.personal_models_of": "all", "engine.kind": "local",
        "run.output": str(tmp_path),
    }  # fmt: skip
    with Simulation(settings, data=clients, test=(source.x_test, source.y_test), model=Normed()) as sim:
        modules = [copy.deepcopy(sim.model()).double().train() for _ in clients]
        for _ in sim:
            for module, (x, y) in zip(modules, clients, strict=True):
                descend(module, torch.tensor(x).double(), torch.tensor(y))
            average(modules, [len(y) for _, y in clients])
    for client, module in enumerate(modules):
        found = load_file(sim.result.folder / "personal" / f"client-{client}.safetensors")
        for name, value in module.state_dict().items():
            torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-4, atol=1e-5)


class Linear(nn.Linear):
    """A model of which the squared error is a quadratic."""

    def __init__(self) -> None:
        super().__init__(3, 1, bias=False)


def test_pfedme_on_quadratics(tmp_path: Path) -> None:
    """With many inner steps a client's theta is the proximal point of its loss, which is known: (H + lambda)^-1
    (b + lambda x) for the gradient H theta - b. The server goes along the gradient of the Moreau envelopes."""
    rng, lam, lr, beta, sizes = np.random.default_rng(5), 2.0, 0.1, 0.8, (10, 20, 30)
    clients = [(rng.normal(size=(n, 3)).astype(np.float32), rng.normal(size=n).astype(np.float32)) for n in sizes]
    settings = {
        "algorithm.name": "pfedme", "algorithm.lam": lam, "algorithm.inner_steps": 200, "algorithm.personal_lr": 0.1,
        "algorithm.beta": beta, "train.batch_size": "full", "train.local_steps": 1, "train.lr": lr, "run.rounds": 3,
        "run.personal_models_of": "all", "engine.kind": "local", "run.output": str(tmp_path),
    }  # fmt: skip
    thetas = {}
    with Simulation(settings, data=clients, test=clients[0], model=Linear()) as sim:
        x = sim.model().weight.detach().double().numpy()[0].copy()
        for _ in sim:
            for client, (inputs, y) in enumerate(clients):
                h, b = (2 * inputs.T.astype(np.float64) @ each / len(y) for each in (inputs, y))
                thetas[client] = np.linalg.solve(h + lam * np.eye(3), b + lam * x)
            mean = sum(n * (x - lr * lam * (x - thetas[client])) for client, n in enumerate(sizes)) / sum(sizes)
            x = (1 - beta) * x + beta * mean
            assert sim.model().weight.detach().numpy()[0] == pytest.approx(x, abs=1e-5)
    for client, theta in thetas.items():
        found = load_file(sim.result.folder / "personal" / f"client-{client}.safetensors")
        assert found["weight"][0].numpy() == pytest.approx(theta, abs=1e-5)
        assert abs(theta - x).max() > 0.05


def descend(module: nn.Module, x: Tensor, y: Tensor) -> None:
    """Three steps of SGD."""
    for _ in range(3):
        module.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        for parameter in module.parameters():
            parameter.data -= 0.1 * parameter.grad


def average(modules: list[nn.Module], sizes: list[int]) -> None:
    """Puts the weighted mean in the place of the modules' linear layers."""
    for name in ("first.weight", "first.bias", "last.weight", "last.bias"):
        each = [module.get_parameter(name) for module in modules]
        mean = sum(size * parameter.data for size, parameter in zip(sizes, each, strict=True)) / sum(sizes)
        for parameter in each:
            parameter.data.copy_(mean)
