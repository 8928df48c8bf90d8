"""Heads and models of a client's own: each rule against its reference, what it reduces to, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import references_personal
from pairs import pairwise
from reference_runs import EVERYTHING, PARTICIPATION, cohorts_of, distance, expect, flat, make_start
from reference_runs import run as reference_run
from safetensors.numpy import load_file
from small_runs import run

from fedray import UserError
from fedray.algorithms import find_algorithm
from fedray.algorithms.fedrep import FedRep
from fedray.config import load
from fedray.engine.evaluation.evaluator import Evaluator
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import assert_same

BIASES = {"private": ["*bias"]}
HYPER = {
    "fedrep": [BIASES | {"head_steps": 3}, BIASES | {"head_steps": 0}],
    "fedbabu": [{"frozen": ["*bias"]}],
    "lg_fedavg": [BIASES, BIASES | {"warmup_rounds": 3}],
    "ditto": [{"lam": 0.7}, {"lam": 0.2, "personal_lr": 0.05, "personal_steps": 2}, BIASES | {"lam": 0.9}],
    "pfedme": [{"lam": 2.0, "inner_steps": 2}, {"lam": 3.0, "personal_lr": 0.1, "beta": 0.7}],
    "apfl": [{"alpha": 0.3}, {"alpha": 0.8, "adaptive": False}, BIASES | {"alpha": 0.4}],
    "perfedavg": [{"alpha": 0.3}, BIASES | {"alpha": 0.2}],
}
CASES = [(name, hyper) for name, each in HYPER.items() for hyper in each]


def label(case):
    if not isinstance(case, tuple):
        return None
    name, hyper = case
    return "-".join([name, *(f"{key}_{value}" for key, value in hyper.items() if key not in ("private", "frozen"))])


def keys_of(name, hyper):
    """The keys of hyper-parameters; private layers of an algorithm without any are the model's."""
    known = find_algorithm(name).Hyper.model_fields
    return {f"{'algorithm' if key in known else 'model'}.{key}": value for key, value in hyper.items()}


def reference(data, name, hyper, cohorts, train, start):
    theirs = dict(hyper)
    if theirs.pop("private", theirs.pop("frozen", None)):
        theirs["private"] = np.arange(len(start) - data.problem.classes, len(start))
    return getattr(references_personal, name)(data.problem, cohorts, train, start, **theirs)


@pytest.fixture
def personal_models(monkeypatch):
    """Clients and their personal models, in the order in which they are scored."""
    found = []
    made = Evaluator._personal

    def keeping(self, task, rows, shared):
        models, slots = made(self, task, rows, shared), self.clients.network.layout.slots
        for client, row in zip(task.ids[rows], models.row.double().numpy(), strict=True):
            found.append((client, np.concatenate([row[slot.start : slot.start + slot.size] for slot in slots])))
        return models

    monkeypatch.setattr(Evaluator, "_personal", keeping)
    return found


def check(made, data, personal_models, rounds):
    final = flat(list(load_file(made.folder / "model.safetensors").values()))
    assert distance(final, rounds[-1].model) < 1e-5
    expect(made.metrics["train_loss"], [np.mean(list(each.loss.values())) for each in rounds])
    of_rounds = iter(personal_models)
    for each in rounds if personal_models else []:
        ours = dict(next(of_rounds) for _ in each.personal)
        for client, model in each.personal.items():
            assert distance(ours[client], model) < 1e-5


@pytest.mark.parametrize(
    ("case", "participation", "vectorize"), pairwise(CASES, ("full", "uniform"), (False, True)), ids=label
)
def test_against_reference(data, tmp_path, personal_models, case, participation, vectorize):
    """With momentum, decay and clipping."""
    name, hyper = case
    train = replace(EVERYTHING, steps=5 if vectorize else 4, momentum=0.5, server_lr=0.6)
    if name == "pfedme":
        train = replace(train, server_lr=1.0)
    start, path = make_start(data, tmp_path)
    keys = PARTICIPATION[participation] | keys_of(name, hyper)
    keys |= {"model.weights": str(path), "engine.vectorize": vectorize, "engine.chunk": 2 if vectorize else None}
    made = reference_run(data, tmp_path, name, train, **keys)
    assert bool(personal_models) == find_algorithm(name)().has_personal_model()
    check(made, data, personal_models, reference(data, name, hyper, cohorts_of(made), train, start))


@pytest.mark.parametrize("vectorize", [False, True], ids=["loop", "vmap"])
@pytest.mark.parametrize("participation", ["full", "uniform"])
def test_ifca(data, tmp_path, personal_models, participation, vectorize):
    train = replace(EVERYTHING, momentum=0.5, server_lr=0.6)
    keys = {"algorithm.models": 3, "engine.vectorize": vectorize, "engine.chunk": 2 if vectorize else None}
    keys |= PARTICIPATION[participation] | {"model.init": "default"}
    made = reference_run(data, tmp_path, "ifca", train, **keys)
    experiment, _ = resolve(load(made.folder / "config.yaml"))
    start, *others = (
        flat([p.detach() for p in experiment.build_model(number).parameters()]) for number in (None, 1, 2)
    )  # fmt: skip
    rounds = references_personal.ifca(data.problem, cohorts_of(made), train, start, others=others)
    assert len({int(k) for each in rounds for k in each.clients["k"].values()}) > 1
    check(made, data, personal_models, rounds)
    rows = made.clients.sort_values(["round", "client"])
    assert rows.cluster.tolist() == [each.clients["k"][i] for each in rounds for i in sorted(each.clients["k"])]


def test_each_model_of_ifca_has_its_column(tmp_path):
    made = run(tmp_path, algorithm="ifca", algorithm__models=3, run__rounds=2)
    names = {name.partition("_accuracy")[0] for name in made.metrics if name.startswith("model_")}
    assert {name for name in names if not name.endswith("shares")} == {"model_2", "model_3"}
    assert made.metrics.model_2_accuracy.notna().all()


def test_ifca_with_one_model_is_fedavg(tmp_path):
    one, plain = run(tmp_path / "one", algorithm="ifca", algorithm__models=1), run(tmp_path / "plain")
    assert one.metrics.test_loss.tolist() == pytest.approx(plain.metrics.test_loss.tolist(), rel=1e-5)


def test_the_reference_sees_what_moves(data, tmp_path):
    """The cases above are no no-ops: each hyper-parameter changes the personal models or the global one."""
    start, cohorts = make_start(data, tmp_path)[0], [[0, 1, 2], [1, 2, 4], [0, 3, 4]]
    for name in ("ditto", "pfedme", "apfl", "perfedavg"):
        found = []
        for hyper in [{}, *HYPER[name]]:
            last = reference(data, name, hyper, cohorts, replace(EVERYTHING, steps=4), start)
            found.append(np.concatenate([last[-1].model, *last[-1].personal.values()]))
        assert min(distance(one, other) for place, one in enumerate(found) for other in found[:place]) > 1e-3


REDUCED = {
    "fedrep without steps of the head, which stays, is fedbabu": (
        ("fedrep", {"head_steps": 0}), ("fedbabu", {}),
    ),
    "a head that is not there": (("fedbabu", {"frozen": []}), ("fedavg", {})),
    "nothing private": (("fedrep", {"private": [], "head_steps": 0}), ("fedavg", {})),
    "warm-up alone": (("lg_fedavg", {"warmup_rounds": 99}), ("fedavg", {})),
    "ditto's global model": (("ditto", {}), ("fedavg", {})),
    "apfl's global model": (("apfl", {}), ("fedavg", {})),
}  # fmt: skip


@pytest.mark.parametrize("which", REDUCED)
def test_reductions(which, tmp_path):
    models = []
    for name, hyper in REDUCED[which]:
        keys = {f"algorithm__{key}": value for key, value in hyper.items()}
        models.append(run(tmp_path / name, algorithm=name, **keys).summary["model_sha256"])
    assert models[0] == models[1]


@pytest.mark.parametrize("case", [(name, HYPER[name][-1]) for name in HYPER], ids=label)
def test_survive_a_pause_and_other_workers(case, tmp_path):
    name, hyper = case
    keys = {"algorithm": name, "run__rounds": 6, "run__checkpoint_every": 1} | keys_of(name, hyper)
    whole = run(tmp_path / "whole", **keys)
    run(tmp_path / "parts", **keys | {"run__rounds": 3})
    assert_same(whole, run(tmp_path / "parts", **keys))
    assert_same(whole, run(tmp_path / "pickled", engine__kind="fedray.testing.pickling:PicklingPool", **keys))


def test_epochs_of_a_head(tmp_path, monkeypatch):
    """Of full batches they are steps, and of others as many as the client has mini-batches, the last one too."""
    shas = [
        run(tmp_path / each, algorithm="fedrep", train__batch_size="full", **{f"algorithm__head_{each}": 2}).summary[
            "model_sha256"
        ]
        for each in ("steps", "epochs")
    ]
    assert shas[0] == shas[1]
    found, step = {}, FedRep.head_step

    def counting(self, client, carry, batch):
        for position, number in enumerate(client.stack.ids):
            found.setdefault((number, len(client.stack.indices[position])), []).append(batch.step)
        return step(self, client, carry, batch)

    monkeypatch.setattr(FedRep, "head_step", counting)
    run(tmp_path / "counted", algorithm="fedrep", algorithm__head_epochs=2, run__rounds=1, engine__chunk=1)
    assert {size: len(steps) for (_, size), steps in found.items()} == {size: 2 * -(-size // 8) for _, size in found}
    assert any(size % 8 for _, size in found)


def test_warm_up_rounds_send_the_whole_model(tmp_path):
    plain = run(tmp_path / "plain")
    made = run(tmp_path / "warm", algorithm="lg_fedavg", algorithm__warmup_rounds=2)
    sent, all_of_it = made.metrics.bytes_up.diff().fillna(made.metrics.bytes_up[0]), plain.metrics.bytes_up
    assert sent[:2].tolist() == all_of_it.diff().fillna(all_of_it[0])[:2].tolist()
    assert (sent[2:] < sent[0]).all()


def test_fine_tuning_of_some_layers(tmp_path):
    keys = {"algorithm": "fedbabu", "run__finetune_steps": 3, "run__rounds": 3}
    found = {}
    for layers in (None, ["head"], ["base"], ["*"]):
        made = run(tmp_path / str(layers), **keys, run__finetune_layers=layers)
        found[str(layers)] = made.metrics.finetuned_accuracy.tolist()
    assert found["None"] == found["['*']"]
    assert len({tuple(each) for each in found.values()}) == 3


def test_what_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"run\.finetune_layers: the model has no parameter and no layer 'heads'"):
        run(tmp_path, run__finetune_steps=2, run__finetune_layers=["heads"])
    with pytest.raises(UserError, match=r"run\.finetune_layers is for run.finetune_steps"):
        run(tmp_path, run__finetune_layers=["head"])
    with pytest.raises(UserError, match="do not all begin with the same model"):
        run(tmp_path, algorithm="ifca", train__upload=[{"clip": 1.0}])
    with pytest.raises(UserError, match="do not all begin with the same model"):
        run(tmp_path, algorithm="ifca", run__diagnostics=True)
    with pytest.raises(UserError, match=r"begin with the same weights.*model\.init=default"):
        run(tmp_path, algorithm="ifca", model__name="logistic", model__init="zeros", model__hidden=None)
    with pytest.raises(UserError, match="goes by losses of one model, and ifca has several"):
        run(tmp_path, algorithm="ifca", train__sampling={"kind": "power_of_choice", "candidates": 6})
    with pytest.raises(UserError, match="keeps something of each client, and the first rounds"):
        run(tmp_path, algorithm="lg_fedavg", algorithm__warmup_rounds=2, train__upload=[{"topk": 3}])
    with pytest.raises(UserError, match=r"run\.finetune_layers: the model has none that norm names"):
        run(tmp_path, run__finetune_steps=2, run__finetune_layers=["norm"])
    with pytest.raises(UserError, match="which the clock can't count"):
        run(tmp_path, algorithm="lg_fedavg", algorithm__warmup_rounds=2, system__latency_ms=3)
    with pytest.raises(UserError, match=r"algorithm\.frozen=\['head'\] leaves nothing to train"):
        run(tmp_path, algorithm="fedbabu", model__trainable=["head"])
