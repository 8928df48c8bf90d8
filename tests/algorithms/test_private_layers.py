"""Layers that stay at the clients: FedPer's rule, what travels, what is kept, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from reference_runs import EVERYTHING, PARTICIPATION, cohorts_of, distance, expect, flat, make_start
from reference_runs import run as reference_run
from references import accuracy
from references_rules import fedper
from safetensors.numpy import load_file
from small_runs import run
from torch import nn

from fedray import UserError, simulate
from fedray.algorithms import base
from fedray.algorithms.fedavg import FedAvg
from fedray.cli.main import main
from fedray.core.private import private_columns
from fedray.core.vectors import Layout
from fedray.gradients import recording
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.util.files import sha256_of_file

PATTERNS = {"biases": ["*bias"], "everything": ["*"], "weights": ["*weight"]}


def places(name, width, classes):
    biases = np.arange(width - classes, width)
    return {"biases": biases, "everything": np.arange(width), "weights": np.arange(width - classes)}[name]


@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vmap"])
@pytest.mark.parametrize("participation", PARTICIPATION)
@pytest.mark.parametrize("name", PATTERNS)
def test_against_reference(data, tmp_path, name, participation, vectorize):
    """With momentum, decay and clipping, which private layers take part in as any others."""
    train = replace(EVERYTHING, momentum=0.5, server_lr=0.6)
    start, path = make_start(data, tmp_path)
    keys = PARTICIPATION[participation] | {"algorithm.private": PATTERNS[name], "model.weights": str(path)}
    keys |= {"engine.vectorize": vectorize, "engine.chunk": 2} if vectorize else {"engine.vectorize": False}
    made = reference_run(data, tmp_path, "fedper", train, **keys)
    cohorts = cohorts_of(made)
    private = places(name, len(start), data.problem.classes)
    rounds = fedper(data.problem, cohorts, train, start, private=private)
    final = flat(list(load_file(made.folder / "model.safetensors").values()))
    assert distance(final, rounds[-1].model) < 1e-5
    assert final[private] == pytest.approx(start[private], abs=0)

    def own(i):
        return data.x_test[data.client_test == i], data.y_test[data.client_test == i]

    scores = [np.mean([accuracy(model, *own(i)) for i, model in each.personal.items()]) for each in rounds]
    expect(made.metrics["personalized_accuracy"], scores)
    expect(made.metrics["train_loss"], [np.mean(list(each.loss.values())) for each in rounds])


@pytest.mark.parametrize("name", ["fedper", "fedbn", "fedrep"])
def test_replayed_gradients_change_no_bit(name, tmp_path, monkeypatch):
    """Neither of the shared layers nor of clients' own, FedBN's statistics among them."""
    monkeypatch.setattr(recording, "FIRST", 2)
    replays = []
    replay = recording.replay
    monkeypatch.setattr(recording, "replay", lambda *args: (replays.append(1), replay(*args))[1])
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    keys = {"model__name": None, "model__hidden": None, "run__personal_models_of": "all", "call": {"model": model}}
    found, counts = [], []
    for way in (False, True):
        made = run(tmp_path / str(way), name, engine__replay=way, **keys)
        own = {path.name: sha256_of_file(path) for path in (made.folder / "personal").glob("*.safetensors")}
        found.append((made.summary["model_sha256"], own))
        counts.append(len(replays))
    assert found[0] == found[1]
    assert len(found[0][1]) == 9
    assert counts[0] == 0 < counts[1]


def test_private_layers_of_another_algorithm_are_fedpers(tmp_path):
    fedper = run(tmp_path / "fedper", algorithm="fedper")
    assert_same(fedper, run(tmp_path / "fedavg", model__private=["head"]))
    with_prox = run(tmp_path / "prox", algorithm="fedprox", algorithm__mu=0.0, model__private=["head"])
    assert with_prox.summary["model_sha256"] == fedper.summary["model_sha256"]


@pytest.mark.parametrize("name", ["fedper", "fedbn"])
def test_survive_a_pause_and_other_workers(name, tmp_path):
    keys = {"algorithm": name, "run__rounds": 6, "run__checkpoint_every": 1, "algorithm__private": ["layers.1"]}
    whole = run(tmp_path / "whole", **keys)
    run(tmp_path / "parts", **keys | {"run__rounds": 3})
    assert_same(whole, run(tmp_path / "parts", **keys))
    assert_same(whole, run(tmp_path / "pickled", engine__kind="fedray.testing.pickling:PicklingPool", **keys))


def test_only_what_is_shared_is_sent_and_counted(tmp_path):
    plain, private = run(tmp_path / "plain"), run(tmp_path / "private", model__private=["head"])
    head = sum(each.numel() for each in list(private.model().parameters())[-2:])
    first = plain.metrics.bytes_up[0] - private.metrics.bytes_up[0]
    assert first == 4 * head * plain.metrics.cohort_size[0]
    assert plain.metrics.flops.tolist() == private.metrics.flops.tolist()


@pytest.mark.parametrize("name", ["fedper", "fedbn"])
def test_diagnostics_change_no_bit(name, tmp_path):
    keys = {"algorithm": name, "algorithm__private": ["layers.1"], "run__rounds": 8}
    plain, measured = run(tmp_path / "plain", **keys), run(tmp_path / "measured", **keys, run__diagnostics=True)
    for column in ("test_loss", "personalized_accuracy", "train_loss"):
        assert plain.metrics[column].tolist() == measured.metrics[column].tolist()
    assert plain.summary["model_sha256"] == measured.summary["model_sha256"]
    # the updates of what is shared alone: their mean is the server's step
    p = measured.clients.samples / measured.clients.groupby("round").samples.transform("sum")
    step = (p * measured.clients.drift * measured.clients.alignment).groupby(measured.clients["round"]).sum()
    assert step.tolist() == pytest.approx(measured.metrics.update_norm.tolist(), rel=1e-4)


def test_fine_tuning_begins_with_what_a_client_has(tmp_path):
    keys = {"algorithm": "fedper", "algorithm__private": ["layers.1"], "run__rounds": 8, "run__finetune_steps": 1}
    made = run(tmp_path, **keys, run__eval_clients="all")
    # one step from the personal model is nearer to it than to the global one
    both = made.evaluation.dropna(subset=["personal_accuracy", "finetuned_accuracy"])
    gaps = {name: (both.finetuned_accuracy - both[f"{name}_accuracy"]).abs().mean() for name in ("personal", "global")}
    assert gaps["personal"] < gaps["global"]


def test_costs_of_all_algorithms_count_what_each_sends(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["data.source=sample", "data.clients=4", "model.name=logistic", "algorithm.name=fedavg"]
    for more in ([], ["model.private=[head]"]):
        assert main(["costs", *words, *more, "--csv", "costs.csv"]) == 0
        table = pd.read_csv("costs.csv").set_index("algorithm")
        assert table.loc["fedper", "bytes up"] == 0 < table.loc["fedbn", "bytes up"] == table.loc["fedprox", "bytes up"]
        assert table.loc["fedavg", "bytes up"] == (0 if more else table.loc["fedprox", "bytes up"])


def test_a_sweep_does_not_compare_by_the_global_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["fedper", "tune.trials=1", "data.source=sample", "model.name=logistic", "data.augment=none"]
    assert main(["tune", *words, "tune.objective={validation_accuracy: max}"]) == 2
    assert "whose private layers are the initial ones" in capsys.readouterr().err


class Mixed(nn.Module):
    """A model with each kind of tensor: parameters, statistics, and whole numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(12, 7), nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["head"], {"last.weight", "last.bias"}),
        (
            ["norm"],
            {f"norm.{each}" for each in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")},
        ),
        (["first", "norm.running_*"], {"first.weight", "first.bias", "norm.running_mean", "norm.running_var"}),
    ],
)
def test_which_numbers_of_a_row_are_private(patterns, names):
    module = Mixed()
    layout = Layout(module)
    row = layout.pack(module).row
    columns = private_columns(module, layout, patterns)
    assert columns.tolist() == sorted(set(columns.tolist()))
    changed = row.clone()
    changed[columns] = changed[columns] + 1
    before, after = layout.named(layout.model(row)), layout.named(layout.model(changed))
    assert {name for name in before if not torch.equal(before[name], after[name])} == names
    base = private_columns(module, layout, ["base"])
    head = private_columns(module, layout, ["head"])
    assert not set(base.tolist()) & set(head.tolist())
    everything = private_columns(module, layout, ["*"])
    assert sorted([*base.tolist(), *head.tolist()]) == everything.tolist()


class Crossed(nn.Module):
    """A model whose last layer is registered first."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(8, 4)
        self.body = nn.Linear(12, 8)

    def forward(self, x):
        return self.classifier(self.body(x).relu())


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"algorithm.name": "fedper"}, "algorithm.private"),
        ({"algorithm.name": "fedbabu"}, "algorithm.frozen"),
        ({"model.private": ["base"]}, "model.private"),
        ({"model.trainable": ["head"]}, "model.trainable"),
        ({"run.finetune_steps": 2, "run.finetune_layers": ["head"]}, "run.finetune_layers"),
    ],
)
def test_a_head_that_is_not_registered_last(tmp_path, changed, key):
    keys = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
    keys |= {"algorithm.name": "fedavg", "run.output": str(tmp_path), "run.rounds": 1}
    with pytest.raises(
        UserError, match=rf"^{key}: (head|base) goes by the layer .* last, body, but .* calls classifier"
    ):
        simulate(keys | changed, data=small_source(), model=Crossed)
    named = changed | {key: ["classifier"]}
    made = simulate(keys | named, data=small_source(), model=Crossed)
    assert made.model().classifier.weight.shape == (4, 8)


class Fixed(FedAvg):
    """Private layers that no key says, beside another list of names."""

    private = ("head",)

    class Hyper(base.Hyper):
        others: tuple[str, ...] = base.parameter((), "a list of names")


def test_a_head_that_the_algorithm_itself_names(tmp_path):
    keys = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
    with pytest.raises(UserError, match=r"^algorithm.name=.*: head goes by the layer .* last, body, but"):
        simulate(keys | {"run.output": str(tmp_path)}, data=small_source(), model=Crossed, algorithm=Fixed)


class Direct(nn.Module):
    """A model that uses the weights of its last layer without calling it."""

    def __init__(self):
        super().__init__()
        self.body, self.classifier = nn.Linear(12, 8), nn.Linear(8, 4)

    def forward(self, x):
        return nn.functional.linear(self.body(x).relu(), self.classifier.weight, self.classifier.bias)


def test_a_head_that_is_not_called_is_the_one_registered_last(tmp_path):
    keys = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
    keys |= {"algorithm.name": "fedper", "run.output": str(tmp_path), "run.rounds": 1}
    # the server's head stays as it began, because it is private
    changes = [{"run.rounds": rounds, "run.name": str(rounds)} for rounds in (1, 2)]
    begun, later = (simulate(keys | each, data=small_source(), model=Direct) for each in changes)
    weights = [dict(each.model().named_parameters()) for each in (begun, later)]
    assert torch.equal(weights[0]["classifier.weight"], weights[1]["classifier.weight"])
    assert not torch.equal(weights[0]["body.weight"], weights[1]["body.weight"])


def test_fedbn_keeps_statistics(tmp_path):
    """The server's statistics stay those of the initial model, and a client's are those of its own samples."""
    keys = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}
    keys |= {"algorithm.name": "fedbn", "run.output": str(tmp_path)}
    made = simulate(keys, data=small_source(), model=Mixed())
    named = dict(made.model().state_dict())
    assert (named["norm.running_mean"] == 0).all()
    assert (named["norm.running_var"] == 1).all()
    assert named["norm.num_batches_tracked"] == 0
    assert (made.metrics.personalized_accuracy != made.metrics.test_accuracy).any()


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"model__private": ["heads"]},
            "private layers: the model has no parameter and no layer 'heads' (did you mean 'head'?)",
        ),
        (
            {"algorithm": "scaffold", "model__private": ["head"]},
            "model.private: algorithm.name=scaffold does not say that its rule is right with private layers",
        ),
        (
            # its rate compares the lengths of whole updates with that of what is shared
            {"algorithm": "fedexp", "model__private": ["head"]},
            "model.private: algorithm.name=fedexp does not say that its rule is right with private layers",
        ),
        (
            {"algorithm": "fedper", "model__private": ["head"]},
            "model.private: fedper has private layers of its own, which algorithm.private says",
        ),
        (
            {"algorithm": "fedper", "run__diagnostics": "virtual"},
            "run.diagnostics=virtual: the model has private layers; use true",
        ),
        (
            {"algorithm": "fedper", "system__mode": "buffered", "system__latency_ms": 1},
            "system.mode=buffered",
        ),
    ],
)
def test_what_is_refused(tmp_path, keys, line):
    with pytest.raises(UserError, match=re.escape(line)):
        run(tmp_path, **keys)
