"""Models scored on single clients' own test shares, each number checked with plain torch from the final model."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, vector_to_parameters

from fedray import UserError, simulate
from fedray.algorithms.fedavg import FedAvg
from fedray.config import load
from fedray.core.seeds import Purpose, stream
from fedray.data.sources.source import Source
from fedray.engine.state.checkpoint import load_last
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.testing.pickling import pickling_workers

SHARED = ["global_on_shares_accuracy", "cohort_with_shares", "cohort_least_share"]
CLIENTS = [
    "clients_accuracy_mean", "clients_accuracy_weighted_mean", "clients_accuracy_worst_tenth", "clients_accuracy_std",
    "clients_with_shares", "clients_least_share",
]  # fmt: skip


class Twofold(FedAvg):
    """FedAvg, watched at twice its model too."""

    def further_models(self, server):
        x = server["x"]
        return {"twofold": x.with_parameters(2 * x.parameters)}


class Misnamed(FedAvg):
    """A monitor whose column would be another's."""

    def further_models(self, server):
        return {"train": server["x"]}


def config(folder, algorithm="fedavg", **keys):
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    return {**SETTINGS, "algorithm.name": algorithm, "run.output": str(folder), "run.rounds": 3, **changed}


def run(folder, algorithm="fedavg", call=None, **keys):
    return simulate(config(folder, algorithm, **keys), **{"data": small_source(), **(call or {})})


def shares_of(folder, algorithm="fedavg", **keys):
    _, data = resolve(load(config(folder, algorithm, **keys)), CustomObjects(source=small_source()))
    return data


def right(module, x, y):
    with torch.no_grad():
        return (module(torch.from_numpy(x)).argmax(1).numpy() == y).mean()


def on_share(module, data, client):
    own = data.client_test(client)
    return right(module, data.x_test[own], data.y_test[own])


def last_rows(result):
    rows = result.evaluation
    return rows[rows["round"] == rows["round"].max()].set_index("client")


def test_all_models_are_scored_on_the_shares_of_the_personal_one(tmp_path):
    result = run(tmp_path, "pfedmo", run__eval_every=2, data__clients=20)
    data = shares_of(tmp_path, "pfedmo", data__clients=20)
    rows, metrics = last_rows(result), result.metrics.iloc[-1]
    clients = result.clients[result.clients["round"] == 3]["client"].tolist()
    assert rows.index.tolist() == clients
    assert rows["test_samples"].tolist() == [len(data.client_test(i)) for i in clients]
    assert rows["in_cohort"].all()
    assert not rows["in_eval_clients"].any()
    alone = copy.deepcopy(result.model())
    vectors = load_last(result.folder / "checkpoints", print).vectors.arrays
    vector_to_parameters(vectors["x_rep"][: result.summary["parameters"]], alone.parameters())
    scored = [i for i in clients if len(data.client_test(i))]
    for name, module in (("global", result.model()), ("representation", alone)):
        expected = [on_share(module, data, i) for i in scored]
        np.testing.assert_allclose(rows.loc[scored, f"{name}_accuracy"], expected)
        assert metrics[f"{name}_on_shares_accuracy"] == pytest.approx(np.mean(expected))
    assert metrics["personalized_accuracy"] == pytest.approx(rows.loc[scored, "personal_accuracy"].mean())
    assert metrics["cohort_with_shares"] == len(scored)
    assert metrics["cohort_least_share"] == min(len(data.client_test(i)) for i in scored)
    assert set(result.evaluation["round"]) == {2, 3}
    assert result.metrics["global_on_shares_accuracy"].isna().tolist() == [True, False, False]


def test_a_client_without_a_share_has_a_row_without_accuracies(tmp_path):
    """60 test samples are not enough for all of 100 clients."""
    keys = {"data__clients": 100, "data__partition__min_samples": 0, "run__eval_clients": "all"}
    result, data = run(tmp_path, **keys), shares_of(tmp_path, **keys)
    rows, metrics = last_rows(result), result.metrics.iloc[-1]
    empty = rows["test_samples"] == 0
    assert empty.any()
    assert rows.loc[empty, "global_accuracy"].isna().all()
    assert rows.loc[~empty, "global_accuracy"].notna().all()
    assert len(rows) == data.active
    assert metrics["clients_with_shares"] == (~empty).sum()
    assert metrics["clients_least_share"] == rows.loc[~empty, "test_samples"].min()


def test_nothing_is_scored_unless_asked_for(tmp_path):
    result = run(tmp_path)
    assert not {*SHARED, *CLIENTS} & set(result.metrics.columns)
    assert not (result.folder / "evaluation.parquet").exists()
    with pytest.raises(UserError, match=r"no scores of single clients: run\.eval_clients=all"):
        result.evaluation  # noqa: B018


def finetuned(module, data, client, number, steps, train, seed=0):
    """Plain SGD from ``module`` on a client's own samples, in batches of permutations of its own."""
    module = copy.deepcopy(module).train()
    own = data.client(client)
    size = min(train["batch_size"], len(own))
    sgd = torch.optim.SGD(
        module.parameters(), train["lr"], momentum=train["momentum"], weight_decay=train["weight_decay"]
    )
    passes = range(-(-steps * size // len(own)))
    order = np.concatenate([stream(seed, Purpose.FINETUNE, number, client, i).permutation(len(own)) for i in passes])
    for j in range(steps):
        batch = own[order[j * size : (j + 1) * size]] if size < len(own) else own
        sgd.zero_grad()
        F.cross_entropy(module(torch.from_numpy(data.x[batch])), torch.from_numpy(data.y[batch])).backward()
        clip_grad_norm_(module.parameters(), train["grad_clip"])
        sgd.step()
    return module.eval()


class Normalised(nn.Module):
    """A network with running statistics."""

    def __init__(self, input_shape, classes):
        super().__init__()
        layers = nn.Linear(input_shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes)
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("model", [None, Normalised])
@pytest.mark.parametrize("vectorize", [False, True])
def test_finetuned_accuracy_is_that_of_plain_sgd(tmp_path, model, vectorize):
    if model and vectorize:
        pytest.skip("models with buffers are not batched over clients")
    train = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01, "grad_clip": 0.8, "batch_size": 8}
    keys = {f"train__{key}": value for key, value in train.items()}
    keys |= {
        "train__lr_decay": 0.9,
        "run__finetune_steps": 7,
        "run__eval_clients": "all",
        "data__least_test_samples": 9,
    }
    if model:
        # no batch of a single sample
        keys |= {"model__hidden": None, "data__partition__min_samples": 8}
    call = {"model": model} if model else {}
    given = {key: value for key, value in config(tmp_path, **keys).items() if value is not None}
    if vectorize:
        given |= {"engine.vectorize": True, "engine.chunk": 4}
    result = simulate(given, data=small_source(), **call)
    _, data = resolve(load(given), CustomObjects(source=small_source(), model=model))
    rows = last_rows(result)
    assert len(rows) == data.active
    train["lr"] *= 0.9**2
    expected = {i: on_share(finetuned(result.model(), data, i, 3, 7, train), data, i) for i in rows.index}
    np.testing.assert_allclose(rows["finetuned_accuracy"], list(expected.values()))
    cohort = rows.index[rows["in_cohort"]]
    assert result.metrics.iloc[-1]["finetuned_accuracy"] == pytest.approx(np.mean([expected[i] for i in cohort]))
    assert (rows["finetuned_accuracy"] != rows["global_accuracy"]).any()


@pytest.mark.parametrize("algorithm", ["scaffold", "pfedmo", "moon", "feddyn", "mimemom", "fedhbm"])
def test_scoring_changes_nothing_in_training(tmp_path, algorithm):
    plain = run(tmp_path / "plain", algorithm)
    scored = run(tmp_path / "scored", algorithm, run__finetune_steps=3, run__eval_clients="all")
    assert scored.summary["model_sha256"] == plain.summary["model_sha256"]
    for name in ("train_loss", "test_accuracy", "personalized_accuracy", "representation_accuracy"):
        np.testing.assert_array_equal(scored.metrics[name], plain.metrics[name])
    assert scored.clients.equals(plain.clients)
    assert scored.metrics["finetuned_accuracy"].notna().all()


@pytest.mark.parametrize(("algorithm", "vectorize"), [("pfedmo", False), ("scaffold", True)])
def test_any_workers_give_the_same_bits(tmp_path, algorithm, vectorize):
    keys = {"run__finetune_steps": 3, "run__eval_clients": 7, "run__rounds": 2, "engine__vectorize": vectorize}
    keys |= {"engine__chunk": 2} if vectorize else {}
    local = run(tmp_path / "local", algorithm, **keys)
    for workers in (1, 2):
        with pickling_workers(workers):
            assert_same(local, run(tmp_path / str(workers), algorithm, **keys))
    assert local.has_evaluation


def test_mean_worst_tenth_and_spread_of_all_clients(tmp_path):
    keys = {"data__clients": 25, "data__least_test_samples": 12, "run__eval_clients": "all", "train__lr": 0.02}
    result, data = run(tmp_path, **keys), shares_of(tmp_path, **keys)
    each = [on_share(result.model(), data, i) for i in range(25)]
    expected, sizes = np.sort(each), [len(data.client_test(i)) for i in range(25)]
    metrics = result.metrics.iloc[-1]
    # three of 25 are a tenth or a little more
    found = metrics[CLIENTS].tolist()
    means = [expected.mean(), np.average(each, weights=sizes), expected[:3].mean(), expected.std()]
    np.testing.assert_allclose(found[:4], means)
    assert found[4:] == [25, 12]
    assert expected.std() > 0
    rows = last_rows(result)
    assert rows["in_eval_clients"].all()
    assert not rows["in_cohort"].any()
    assert not set(SHARED) & set(result.metrics.columns)


def test_personal_and_fine_tuned_models_of_all_clients(tmp_path):
    """The columns as from the rows of evaluation.parquet, in which clients of the cohort and others are."""
    made = run(tmp_path, "fedper", run__eval_clients="all", run__finetune_steps=2, train__cohort_size=3)
    for number, rows in made.evaluation.groupby("round"):
        metrics = made.metrics.set_index("round").loc[number]
        assert len(rows) > rows.in_cohort.sum() == 3
        for name in ("global", "personal", "finetuned"):
            prefix = "clients_accuracy" if name == "global" else f"clients_{name}_accuracy"
            values = rows[f"{name}_accuracy"]
            assert metrics[f"{prefix}_mean"] == pytest.approx(values.mean())
            assert metrics[f"{prefix}_weighted_mean"] == pytest.approx(np.average(values, weights=rows.test_samples))
            assert metrics[f"{prefix}_std"] == pytest.approx(values.std(ddof=0))
            assert metrics[f"{prefix}_worst_tenth"] == values.min()
    assert "clients_personal_accuracy_mean" not in run(tmp_path / "no", run__eval_clients="all").metrics


def test_the_clients_on_request_are_the_same_in_every_round_and_run(tmp_path):
    keys = {"run__eval_clients": 4, "data__seed": 3}
    rows = run(tmp_path / "a", **keys).evaluation
    chosen = rows[rows["in_eval_clients"]].groupby("round")["client"].apply(list)
    assert chosen.map(len).tolist() == [4, 4, 4]
    assert chosen.tolist() == [chosen[1]] * 3
    others = run(tmp_path / "b", run__seed=9, **keys).evaluation
    assert others["client"].tolist() == rows["client"].tolist()


def test_personal_models_of_clients_that_never_took_part(tmp_path):
    """One that was never scored starts from the global model."""
    result = run(tmp_path, "pfedmo", run__eval_clients="all", run__rounds=1, train__cohort_size=2)
    rows = last_rows(result)
    assert rows["in_cohort"].sum() == 2
    never = rows[~rows["in_cohort"]]
    assert never["personal_accuracy"].equals(never["global_accuracy"])


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    keys = {"run__finetune_steps": 2, "run__eval_clients": 3, "run__rounds": 6, "run__checkpoint_every": 2}
    whole = run(tmp_path / "whole", "scaffold", **keys)

    def fail(report):
        if report.round == 5:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path / "parts", "scaffold", {"callbacks": [fail]}, **keys)
    parts = run(tmp_path / "parts", "scaffold", **keys)
    assert_same(whole, parts)
    assert parts.evaluation["round"].value_counts().index.sort_values().tolist() == [1, 2, 3, 4, 5, 6]


def test_every_monitor_has_its_columns(tmp_path):
    metrics = run(tmp_path, f"{__name__}:Twofold", run__finetune_steps=1).metrics
    names = ["twofold_accuracy", "global_on_shares_accuracy", "twofold_on_shares_accuracy", "finetuned_accuracy"]
    assert list(metrics.columns)[16:] == [*names, "cohort_with_shares", "cohort_least_share"]
    assert metrics[names].notna().all(axis=None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"run__eval_clients": 10}, "run.eval_clients=10 is more than the 9 clients that have samples; use all"),
        ({"run__eval_clients": -1}, "run.eval_clients must be 'all' or at least 0, not -1"),
        ({"run__finetune_steps": -1}, "run.finetune_steps"),
        ({"data__least_test_samples": 61, "run__eval_clients": 2}, "the test set has only"),
        ({"algorithm__name": f"{__name__}:Misnamed"}, "a further model can't be called 'train'"),
    ],
)
def test_what_can_not_be_scored_is_refused(tmp_path, keys, message):
    with pytest.raises(UserError, match=message.replace(".", r"\.")) as error:
        run(tmp_path, **keys)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"run__eval_test": False, "run__finetune_steps": 2, "run__eval_clients": 3, "data__validation_samples": 20},
            "run.eval_clients=3 and run.finetune_steps=2: not evaluated, as run.eval_test=false",
        ),
        ({"data__least_test_samples": 5}, "data.least_test_samples=5 changes nothing"),
    ],
)
def test_what_is_asked_for_and_not_done_is_said(tmp_path, keys, line):
    result = run(tmp_path, **keys)
    assert line in (result.folder / "log.txt").read_text()
    assert not result.has_evaluation
    assert not {*SHARED, *CLIENTS} & set(result.metrics.columns)


def test_a_cohort_without_any_test_share_has_no_accuracy(tmp_path):
    """The test samples are of a class that one client holds alone."""
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    y, owner = np.repeat([0, 1], 20), np.repeat([0, 1], 20)
    source = Source("split", x, y, x[20:25], y[20:25], 2, client_train=owner)
    keys = {"data__partition__kind": "natural", "train__cohort_size": 1, "run__finetune_steps": 1, "run__rounds": 6}
    result = simulate(config(tmp_path, **keys) | {"data.public_samples": "auto"}, data=source)
    took_part = result.clients["client"].tolist()
    assert set(took_part) == {0, 1}
    assert [math.isnan(a) for a in result.metrics["finetuned_accuracy"]] == [i == 0 for i in took_part]
    assert result.metrics["cohort_with_shares"].tolist() == took_part
