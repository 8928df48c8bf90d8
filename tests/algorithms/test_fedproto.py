"""FedProto: against its reference in double precision, what it reduces to, and what it does with classes alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference_runs import CLASSES, EVERYTHING, FEATURES, PARTICIPATION, cohorts_of, distance, expect
from reference_runs import run as reference_run
from references_representation import fedproto, vector
from safetensors.numpy import save_file
from small_runs import run

from fedray import UserError
from fedray.algorithms.fedproto import FedProto
from fedray.gradients.passes import Outputs

WIDTH = 8


@pytest.fixture
def start(tmp_path):
    rng = np.random.default_rng(5)
    named = {
        "encoder.weight": ("layers.1.weight", (WIDTH, FEATURES)), "encoder.bias": ("layers.1.bias", (WIDTH,)),
        "classifier.weight": ("layers.3.classifier.weight", (CLASSES, WIDTH)),
        "classifier.bias": ("layers.3.classifier.bias", (CLASSES,)),
    }  # fmt: skip
    drawn = {name: (rng.normal(size=shape) / np.sqrt(WIDTH)).astype(np.float32) for name, (_, shape) in named.items()}
    save_file({ours: drawn[name] for name, (ours, _) in named.items()}, tmp_path / "start.safetensors")
    return {name: torch.tensor(value).double() for name, value in drawn.items()}, tmp_path / "start.safetensors"


@pytest.mark.parametrize("participation", ["full", "uniform"])
@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vmap"])
def test_against_reference(data, start, tmp_path, participation, vectorize):
    train = replace(EVERYTHING, momentum=0.5)
    model, path = start
    keys = PARTICIPATION[participation] | {"model.name": "mlp", "model.hidden": [WIDTH], "model.init": None}
    keys |= {"model.weights": str(path), "run.rounds": 6, "run.personal_models_of": "all", "algorithm.lam": 0.7}
    made = reference_run(data, tmp_path, "fedproto", train, **keys, **{"engine.vectorize": vectorize})
    rounds = fedproto(data.problem, cohorts_of(made), train, model, lam=0.7)
    expect(made.metrics["train_loss"], [np.mean(list(each.loss.values())) for each in rounds])
    for client, theirs in rounds[-1].models.items():
        state = made.client_model(client).state_dict()
        ours = {
            "encoder.weight": state["layers.1.weight"], "encoder.bias": state["layers.1.bias"],
            "classifier.weight": state["layers.3.classifier.weight"],
            "classifier.bias": state["layers.3.classifier.bias"],
        }  # fmt: skip
        assert distance(vector(ours).double().numpy(), vector(theirs).numpy()) < 1e-5


def test_without_pull_it_is_local_training(tmp_path):
    keys = {"run__finetune_steps": None, "train__cohort_size": None, "run__rounds": 4, "model__head": "linear"}
    alone = run(tmp_path / "alone", algorithm="fedper", algorithm__private=["*"], **keys)
    proto = run(tmp_path / "proto", algorithm="fedproto", algorithm__lam=0.0, **keys)
    pulled = run(tmp_path / "pulled", algorithm="fedproto", **keys)
    assert proto.metrics.train_loss.tolist() == pytest.approx(alone.metrics.train_loss.tolist(), rel=1e-6)
    assert proto.metrics.personalized_accuracy.tolist() == alone.metrics.personalized_accuracy.tolist()
    assert pulled.metrics.train_loss.tolist()[1:] != proto.metrics.train_loss.tolist()[1:]


def test_a_class_without_prototype_pulls_nowhere():
    features, own = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[0.5, 0.0, 1.0], [9.0, 9.0, 0.0]])
    made = FedProto(FedProto.Hyper(lam=0.7))
    found = made.loss(Outputs(torch.zeros(2, 4), features), torch.tensor([0.1, 0.2]), own)
    assert found.tolist() == pytest.approx([0.1 + 0.7 * (0.5**2 + 2**2), 0.2])


def test_only_prototypes_travel(tmp_path):
    made = run(tmp_path, algorithm="fedproto", model__hidden=[8], run__rounds=1)
    # of 4 classes 8 features and a number, to and from 5 clients
    assert made.metrics.bytes_up.tolist() == made.metrics.bytes_down.tolist() == [5 * 4 * 4 * 9]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train__upload": [{"clip": 1.0}]}, "send numbers besides models and vectors"),
        ({"train__server_lr": 0.5}, "server_lr"),
        ({"model__head": "none"}, "needs a head with features, such as linear"),
    ],
)
def test_what_is_refused(keys, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(tmp_path, algorithm="fedproto", **keys)
