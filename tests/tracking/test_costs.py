"""Parameters, multiply-adds, FLOPs and bytes, counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedray import simulate
from fedray.core.local_training import LocalTraining
from fedray.models.inspection import inspect_model
from fedray.models.small import MLP, FedTripCNN, LeNet5, Logistic
from fedray.tracking.costs import Load, load_of, mean_load
from fedray.tracking.result import RunResult

FEATURES, CLASSES = 12, 4
PARAMETERS = CLASSES * (FEATURES + 1)
FORWARD = 2 * CLASSES * FEATURES
"""FLOPs of one sample: a multiplication and an addition for each weight."""


def facts(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, float]:
    found = inspect_model(module, torch.zeros(2, *shape), "it")
    return found.parameters, found.flops


def convolution(inputs: int, outputs: int, kernel: int, height: int, width: int) -> tuple[int, int]:
    """(parameters, multiply-adds) of a convolution whose output is height x width."""
    weights = inputs * outputs * kernel * kernel
    return weights + outputs, weights * height * width


def dense(inputs: int, outputs: int) -> tuple[int, int]:
    return inputs * outputs + outputs, inputs * outputs


def test_lenet5():
    """28 x 28, padded by 2: conv -> 28, pool -> 14, conv 5 -> 10, pool -> 5."""
    layers = [convolution(1, 6, 5, 28, 28), convolution(6, 16, 5, 10, 10)]
    layers += [dense(16 * 5 * 5, 120), dense(120, 84), dense(84, 10)]
    parameters, products = (sum(column) for column in zip(*layers, strict=True))
    assert (parameters, products) == (61_706, 416_520)
    assert facts(LeNet5((1, 28, 28), 10), (1, 28, 28)) == (parameters, 2 * products)


def test_fedtrips_cnn_has_as_many():
    layers = [convolution(1, 6, 5, 28, 28), convolution(6, 16, 5, 10, 10)]
    layers += [convolution(16, 120, 5, 1, 1), dense(120, 84), dense(84, 10)]
    parameters, products = (sum(column) for column in zip(*layers, strict=True))
    assert parameters == 61_706
    assert facts(FedTripCNN((1, 28, 28), 10), (1, 28, 28)) == (parameters, 2 * products)


def test_lenet5_on_colour_images():
    """32 x 32: conv -> 32, pool -> 16, conv 5 -> 12, pool -> 6."""
    layers = [convolution(3, 6, 5, 32, 32), convolution(6, 16, 5, 12, 12)]
    layers += [dense(16 * 6 * 6, 120), dense(120, 84), dense(84, 10)]
    parameters, products = (sum(column) for column in zip(*layers, strict=True))
    assert facts(LeNet5((3, 32, 32), 10), (3, 32, 32)) == (parameters, 2 * products)


def test_mlp_and_logistic():
    assert facts(MLP((1, 28, 28), 10), (1, 28, 28)) == (79_510, 2 * (784 * 100 + 100 * 10))
    assert facts(Logistic((1, 28, 28), 10), (1, 28, 28)) == (7_850, 2 * 7_840)


SIZES = [10, 6, 3]
PUBLIC = 30


def run(folder: Any, algorithm: str, call: Any = None, **keys: Any) -> RunResult:
    """Three clients of 10, 6 and 3 samples, two rounds of three steps of batches of 4; logistic regression."""
    rng = np.random.default_rng(0)

    def draw(samples: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.concatenate([np.arange(CLASSES), rng.integers(0, CLASSES, samples)])[:samples]
        return rng.normal(size=(samples, FEATURES)).astype(np.float32), y

    names = ("x_train", "y_train", "x_test", "y_test", "x_public", "y_public")
    arrays = dict(zip(names, (*draw(sum(SIZES)), *draw(8), *draw(PUBLIC)), strict=True))
    np.savez(folder / "data.npz", client_train=np.repeat(np.arange(3), SIZES), **arrays)
    config: dict[str, Any] = {
        "algorithm.name": algorithm,
        "data.source": "npz",
        "data.root": str(folder / "data.npz"),
        "data.partition.kind": "natural",
        "model.name": "logistic",
        "train.local_steps": 3,
        "train.batch_size": 4,
        "run.rounds": 2,
        "run.output": str(folder),
        "engine.kind": "local",
    }
    config |= {key.replace("__", "."): value for key, value in keys.items()}
    return simulate({key: value for key, value in config.items() if value is not None}, **(call or {}))


def cumulative(per_round: float) -> list[float]:
    return [per_round, 2 * per_round]


TRAINED = 3 * (4 + 4 + 3)
"""Samples of a round: three steps of min(4, n_i)."""


@pytest.mark.parametrize(("algorithm", "vectors"), [("fedavg", 1), ("fedprox", 1), ("fednag", 2), ("pfedmo", 2)])
def test_bytes(algorithm, vectors, tmp_path):
    """Each of three clients gets and sends so many vectors of four-byte numbers."""
    metrics = run(tmp_path, algorithm).metrics
    expected = cumulative(3 * vectors * 4 * PARAMETERS)
    assert metrics["bytes_down"].tolist() == expected
    assert metrics["bytes_up"].tolist() == expected


class Normed(nn.Module):
    """Of its buffers the running means and variances travel with it; the number of batches is no part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Linear(7, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize(("algorithm", "vectors"), [("fedavg", 0), ("fednag", 1), ("pfedmo", 1)])
def test_float_buffers_travel_with_models_but_not_with_state_vectors(algorithm, vectors, tmp_path):
    parameters = (FEATURES + 1) * 7 + 2 * 7 + 8 * CLASSES
    metrics = run(tmp_path, algorithm, call={"model": Normed}, model__name=None).metrics
    assert metrics["bytes_up"].tolist() == cumulative(3 * 4 * (parameters + 2 * 7 + vectors * parameters))


@pytest.mark.parametrize("algorithm", ["fedavg", "fednag"])
def test_flops(algorithm, tmp_path):
    """Forward and backward are three forwards."""
    assert run(tmp_path, algorithm).metrics["flops"].tolist() == cumulative(3 * FORWARD * TRAINED)


@pytest.mark.parametrize(
    ("keys", "samples"),
    [
        ({"train__local_steps": None, "train__local_epochs": 2}, 2 * sum(SIZES)),
        ({"train__batch_size": "full"}, 3 * sum(SIZES)),
        ({"train__batch_size": 64}, 3 * sum(SIZES)),
        ({"train__batch_size": 1}, 3 * 3),
    ],
    ids=["epochs", "full", "large", "single"],
)
def test_flops_of_other_batches(keys, samples, tmp_path):
    assert run(tmp_path, "fedavg", **keys).metrics["flops"].tolist() == cumulative(3 * FORWARD * samples)


def test_costs_of_a_partial_cohort(tmp_path):
    result = run(tmp_path, "fedavg", train__cohort_size=2, run__rounds=5)
    samples = {client: 3 * min(4, size) for client, size in enumerate(SIZES)}
    rows = result.clients.groupby("round")["client"]
    expected = np.cumsum([3 * FORWARD * sum(samples[c] for c in cohort) for _, cohort in rows])
    assert len(set(np.diff(expected))) > 1
    assert result.metrics["flops"].tolist() == expected.tolist()
    assert result.metrics["bytes_up"].tolist() == [(r + 1) * 2 * 4 * PARAMETERS for r in range(5)]


def test_fedproxs_extra(tmp_path):
    """mu (y - x) added to the gradient: two operations for each parameter, in each of nine steps."""
    expected = cumulative(3 * FORWARD * TRAINED + 9 * 2 * PARAMETERS)
    assert run(tmp_path, "fedprox").metrics["flops"].tolist() == expected


@pytest.mark.parametrize(
    ("keys", "representation", "probes"),
    [
        ({}, 3 * 4, PUBLIC),
        ({"algorithm__probe_batch": 7}, 3 * 4, 7),
        ({"algorithm__probe_source": "test"}, 3 * 4, 8),
        ({"algorithm__rep_steps": 5}, 5 * 4, PUBLIC),
        ({"data__public_samples": 20}, 3 * 4, 20),
    ],
    ids=["default", "probe", "test set", "steps", "smaller"],
)
def test_pfedmos_extras(keys, representation, probes, tmp_path):
    """The representation model's own steps, and the probe batch through it and through each of three clients."""
    expected = cumulative(FORWARD * (3 * TRAINED + 3 * representation + 4 * probes))
    assert run(tmp_path, "pfedmo", **keys).metrics["flops"].tolist() == expected


def test_pfedmos_extras_with_batches_larger_than_the_public_set(tmp_path):
    expected = cumulative(FORWARD * (3 * 3 * sum(SIZES) + 3 * 3 * PUBLIC + 4 * PUBLIC))
    assert run(tmp_path, "pfedmo", train__batch_size=64).metrics["flops"].tolist() == expected


def test_pfedmos_extras_with_epochs(tmp_path):
    """Two epochs of batches of 4 are 6, 4 and 2 steps: the representation model makes their mean, 4 full batches."""
    metrics = run(tmp_path, "pfedmo", train__local_steps=None, train__local_epochs=2).metrics
    expected = cumulative(FORWARD * (3 * 2 * sum(SIZES) + 3 * 4 * 4 + 4 * PUBLIC))
    assert metrics["flops"].tolist() == expected


def test_further_steps_of_unequal_clients(tmp_path):
    """FedRep's three further steps of a head have batches of 4, 4 and 3 samples, however many steps an epoch has."""
    keys = {"train__local_steps": None, "train__local_epochs": 2, "algorithm__head_steps": 3}
    metrics = run(tmp_path, "fedrep", **keys).metrics
    assert metrics["flops"].tolist() == cumulative(FORWARD * (3 * 2 * sum(SIZES) + 3 * 3 * (4 + 4 + 3)))


def test_loads():
    """Batches of 4 from 10, 6 and 3 samples make 3, 2 and 1 steps an epoch; a client without samples does not count."""
    epochs = LocalTraining(seed=0, batch_size=4, local_steps=None, local_epochs=2)
    assert [load_of(n, epochs) for n in SIZES] == [Load(10, 6, 20, 4), Load(6, 4, 12, 4), Load(3, 2, 6, 3)]
    assert mean_load([*SIZES, 0], epochs) == Load(19 / 3, 4, 38 / 3, 11 / 3)
    steps = LocalTraining(seed=0, batch_size=4, local_steps=5)
    assert mean_load(SIZES, steps) == Load(19 / 3, 5, 5 * (4 + 4 + 3) / 3, 11 / 3)
    assert load_of(10, LocalTraining(seed=0, batch_size=None, local_steps=5)) == Load(10, 5, 50, 10)
