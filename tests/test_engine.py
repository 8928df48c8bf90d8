"""A whole run from outside: its folder, its records, the user's own things in it, and what it must leave alone."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from torch import nn

import fedray
from fedray import ClientError, Report, simulate
from fedray.config import load
from fedray.core.clock import Clock
from fedray.engine.opening import open_run
from fedray.engine.pool import LocalPool
from fedray.engine.process import computing_process, describe
from fedray.engine.worker import Worker
from fedray.experiment import Own
from fedray.resolve import resolve
from fedray.simulation import RunResult
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking import columns
from fedray.tracking.columns import PURPOSES, TAGS

PACKAGE = Path(fedray.__file__).parent

COLUMNS = [
    "round", "iterations", "cohort_size", "train_loss", "train_accuracy", "test_loss", "test_accuracy",
    "validation_accuracy", "personalized_accuracy", "representation_accuracy", "bytes_down", "bytes_up", "flops",
    "virtual_seconds", "round_seconds", "wall_seconds",
]  # fmt: skip

OF_SHARES = [
    "global_on_shares_accuracy", "representation_on_shares_accuracy", "cohort_with_shares", "cohort_least_share",
]  # fmt: skip
"""Further columns of an algorithm that has personal models, here pFedMo."""

SUMMARY = {
    "status", "final_accuracy", "best_accuracy", "last10_accuracy", "rounds", "targets", "parameters", "model_sha256",
    "partition_hash", "versions", "machine",
}  # fmt: skip


def run(folder: Path, algorithm: str = "fedavg", data: Any = None, call: Any = None, **keys: Any) -> RunResult:
    """The contracts' small run with some keys changed (None takes one out); ``call``: simulate's other arguments."""
    changed = {key.replace("__", "."): value for key, value in keys.items()}
    config = {**SETTINGS, "algorithm.name": algorithm, "run.output": str(folder), **changed}
    config = {key: value for key, value in config.items() if value is not None}
    return simulate(config, data=small_source() if data is None else data, **(call or {}))


def right(module: nn.Module, x: np.ndarray, y: np.ndarray) -> float:
    with torch.no_grad():
        return float((module(torch.from_numpy(x)).argmax(1).numpy() == y).mean())


# ---------------------------------------------------------------- the run folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """pFedMo over six rounds, evaluated every other one, with everything that can be logged."""
    return run(
        tmp_path_factory.mktemp("finished"),
        "pfedmo",
        run__eval_every=4,
        run__eval_train_samples=50,
        data__validation_samples=40,
        run__targets=[0.3, 1.0],
    )


def test_the_folder_holds_what_it_should_and_no_more(finished):
    names = {path.name for path in finished.folder.iterdir()}
    (events,) = [name for name in names if name.startswith("events.out.tfevents.")]
    assert names - {events} == {
        "config.yaml", "metrics.csv", "clients.parquet", "evaluation.parquet", "model.safetensors", "summary.json",
        "inputs.json",
        "checkpoints", "log.txt",
    }  # fmt: skip


def test_metrics_columns(finished):
    with (finished.folder / "metrics.csv").open() as file:
        assert next(file).strip().split(",") == [*COLUMNS, *OF_SHARES]
    metrics = finished.metrics
    assert list(metrics.columns) == [*COLUMNS, *OF_SHARES]
    assert metrics["round"].tolist() == [1, 2, 3, 4, 5, 6]
    assert (metrics["cohort_size"] == 5).all()
    for name in ("iterations", "bytes_down", "bytes_up", "flops", "wall_seconds"):
        assert (metrics[name].diff().dropna() > 0).all(), name
    assert metrics["train_loss"].notna().all()


def test_everything_that_is_recorded_is_described(finished, events):
    """With its unit, in :mod:`fedray.tracking.columns`, of which the glossary is made."""

    def lacking(names: Any, *described: Any) -> list[str]:
        forms = [re.sub(r"<\w+>", r"\\w+", name) for each in described for name in each]
        return [name for name in names if not any(re.fullmatch(form, name) for form in forms)]

    assert list(columns.METRICS) == COLUMNS
    assert not lacking(finished.metrics, columns.METRICS, columns.FURTHER_METRICS)
    assert not lacking(finished.clients, columns.CLIENT_FACTS, columns.CLIENT_SCORES)
    assert not lacking(finished.evaluation, columns.EVALUATION)
    assert not lacking(finished.summary, columns.SUMMARY)
    tags = [tag for kind in ("scalars", "histograms") for tag in events.Tags()[kind]]
    assert not lacking(tags, columns.TAGS.values(), columns.FURTHER_TAGS)


def test_evaluations_come_every_so_many_rounds_and_at_the_end(finished):
    evaluated = [name for name in COLUMNS if name.endswith("_accuracy")] + ["test_loss"]
    for name in evaluated:
        assert finished.metrics["round"][finished.metrics[name].notna()].tolist() == [4, 6], name
    lines = (finished.folder / "metrics.csv").read_text().splitlines()
    assert lines[1].split(",")[COLUMNS.index("test_accuracy")] == ""


def test_without_any_evaluation_but_the_last(tmp_path):
    metrics = run(tmp_path, run__eval_every=0).metrics
    assert metrics["round"][metrics["test_accuracy"].notna()].tolist() == [6]
    assert metrics[["train_accuracy", "validation_accuracy", "personalized_accuracy"]].isna().all(axis=None)


def test_iterations_add_up(finished, tmp_path):
    """Under local_epochs, the most steps that a client of each round makes."""
    most = finished.clients.groupby("round")["steps"].max()
    assert most.nunique() > 1
    assert finished.metrics["iterations"].tolist() == most.cumsum().tolist()
    steps = run(tmp_path, train__local_epochs=None, train__local_steps=3)
    assert steps.metrics["iterations"].tolist() == [3, 6, 9, 12, 15, 18]


def test_summary_keys(finished):
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert summary.keys() == SUMMARY
    accuracy = finished.metrics["test_accuracy"].dropna()
    assert summary["status"] == "completed"
    assert summary["rounds"] == 6
    assert summary["final_accuracy"] == accuracy.iloc[-1]
    assert summary["best_accuracy"] == accuracy.max()
    assert summary["last10_accuracy"] == pytest.approx(accuracy.mean())
    assert summary["parameters"] == 12 * 8 + 8 + 8 * 4 + 4
    row = finished.metrics[finished.metrics["test_accuracy"] >= 0.3].iloc[0]
    assert summary["targets"]["0.3"] == {
        "round": row["round"],
        "bytes": row["bytes_down"] + row["bytes_up"],
        "flops": row["flops"],
        "seconds": row["wall_seconds"],
    }
    assert summary["targets"]["1"] is None
    assert summary["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert summary["machine"]["bits_promised"] is True


def test_clients_columns(finished):
    clients = finished.clients
    assert set(clients.columns) == {"round", "client", "samples", "steps", "loss", "accuracy", "score"}
    assert clients.groupby("round").size().tolist() == [5] * 6
    for _, rows in clients.groupby("round"):
        assert rows["client"].is_monotonic_increasing
        assert rows["client"].is_unique
    # one epoch of batches of 8
    assert (clients["steps"] == np.ceil(clients["samples"] / 8)).all()
    means = clients.groupby("round")["loss"].mean()
    np.testing.assert_allclose(finished.metrics["train_loss"], means, rtol=1e-12)


def test_client_rows_can_be_left_out(tmp_path):
    assert not (run(tmp_path, run__log_clients=False).folder / "clients.parquet").exists()


@pytest.mark.parametrize("algorithm", ["fedavg", "pfedmo"])
def test_the_saved_model_is_the_model(algorithm, tmp_path):
    result = run(tmp_path, algorithm)
    saved = load_file(result.folder / "model.safetensors")
    state = result.model().state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)
    numbers = b"".join(p.detach().numpy().tobytes() for p in result.model().parameters())
    assert result.summary["model_sha256"] == hashlib.sha256(numbers).hexdigest()
    source = small_source()
    assert right(result.model(), source.x_test, source.y_test) == pytest.approx(result.summary["final_accuracy"])
    assert not result.model().training


def test_the_resolved_config_gives_the_same_run_again(tmp_path):
    config = {**SETTINGS, "algorithm.name": "pfedmo", "data.source": "problem:source", "data.public_samples": "auto"}
    first = simulate({**config, "run.output": str(tmp_path / "one")})
    again = simulate(first.folder / "config.yaml", overrides=[f"run.output={tmp_path / 'two'}"])
    assert again.folder != first.folder
    assert_same(first, again)


def test_what_the_splits_are_evaluated_on(tmp_path):
    """All accuracies and the loss of the last round, from the final model and the data alone."""
    keys = {"run__eval_train_samples": 50, "data__validation_samples": 40, "run__rounds": 2}
    result = run(tmp_path, **keys)
    config = {**SETTINGS, "algorithm.name": "fedavg", "run.output": str(tmp_path)}
    config |= {key.replace("__", "."): value for key, value in keys.items()}
    _, data = resolve(load(config), Own(source=small_source()))
    row, model = result.metrics.iloc[-1], result.model()
    assert (len(data.validation), len(data.train_subset)) == (40, 50)
    assert not set(data.validation) & set(data.indices)
    assert set(data.train_subset) <= set(data.indices)
    for name, indices in (("validation", data.validation), ("train", data.train_subset)):
        assert row[f"{name}_accuracy"] == pytest.approx(right(model, data.x[indices], data.y[indices]))
    assert row["test_accuracy"] == pytest.approx(right(model, data.x_test, data.y_test))
    with torch.no_grad():
        loss = F.cross_entropy(model(torch.from_numpy(data.x_test)), torch.from_numpy(data.y_test))
    assert row["test_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert math.isnan(row["personalized_accuracy"])


def test_evaluation_in_blocks_weighs_every_sample_alike(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", "pfedmo")
    monkeypatch.setattr("fedray.engine.evaluation.EVAL_BLOCK", 7)
    monkeypatch.setattr("fedray.engine.evaluator.EVAL_BATCH", {"cpu": 3})
    blocks = run(tmp_path / "blocks", "pfedmo")
    for name in ("test_accuracy", "test_loss", "representation_accuracy", "personalized_accuracy"):
        np.testing.assert_allclose(whole.metrics[name], blocks.metrics[name], rtol=1e-6)


def test_a_diverged_run_keeps_its_records(tmp_path):
    result = run(tmp_path, train__lr=1e30)
    assert result.summary["status"] == "diverged"
    assert result.summary["rounds"] == len(result.metrics) < 6


# ---------------------------------------------------------------- TensorBoard


@pytest.fixture(scope="module")
def events(finished: RunResult) -> EventAccumulator:
    accumulator = EventAccumulator(str(finished.folder))
    accumulator.Reload()
    return accumulator


def test_scalars_are_the_metrics(finished, events):
    tags = set(events.Tags()["scalars"])
    missing = {"virtual_seconds"}
    of_shares = {f"accuracy/{name}_on_shares" for name in ("global", "representation")}
    of_shares |= {f"clients/{name}" for name in ("cohort_with_shares", "cohort_least_share")}
    assert tags == {tag for name, tag in TAGS.items() if name not in missing} | of_shares | {
        "final/final_accuracy",
        "final/best_accuracy",
    }
    for name, tag in TAGS.items():
        if name in missing:
            continue
        column = finished.metrics[["round", name]].dropna()
        found = events.Scalars(tag)
        assert [event.step for event in found] == column["round"].tolist()
        np.testing.assert_allclose([event.value for event in found], column[name], rtol=1e-6)


def test_histograms_are_over_the_cohort(finished, events):
    assert set(events.Tags()["histograms"]) == {"clients/loss", "clients/accuracy", "clients/score"}
    for event in events.Histograms("clients/loss"):
        rows = finished.clients[finished.clients["round"] == event.step]
        assert event.histogram_value.num == 5
        assert event.histogram_value.sum == pytest.approx(rows["loss"].sum())


def test_hyper_parameters_and_final_figures(finished, events):
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert values["algorithm.name"] == "pfedmo"
    assert values["train.lr"] == 0.1
    assert values["algorithm.pi"] == 0.5
    assert values["data.partition.kind"] == "dirichlet"
    # columns that one run declares would be those of all below the same folder
    assert "_hparams_/experiment" not in events.PluginTagToContent("hparams")
    assert events.Scalars("final/best_accuracy")
    (final,) = events.Scalars("final/final_accuracy")
    assert final.value == pytest.approx(finished.summary["final_accuracy"])


def test_tensorflow_is_never_imported(tmp_path):
    """Though there is one: tensorboard would take it."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('tensorflow was imported')")
    code = (
        "import sys; from fedray import simulate; from fedray.testing.contracts import SETTINGS, small_source;"
        "simulate({**SETTINGS, 'algorithm.name': 'fedavg', 'run.output': sys.argv[1]}, data=small_source());"
        "sys.exit('tensorflow' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run").glob("*/events.out.tfevents.*"))


# ---------------------------------------------------------------- the user's own


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.x[i]), int(self.y[i])


def test_own_arrays_and_datasets_are_the_same_run(tmp_path):
    source = small_source()
    given = run(tmp_path / "source")
    arrays = run(
        tmp_path / "arrays", data=(source.x_train, source.y_train), call={"test": (source.x_test, source.y_test)}
    )
    pairs = run(
        tmp_path / "dataset",
        data=Pairs(source.x_train, source.y_train),
        call={"test": Pairs(source.x_test, source.y_test)},
    )
    assert_same(given, arrays)
    assert_same(given, pairs)


def test_own_clients_in_a_dataframe_or_as_an_array(tmp_path):
    source = small_source()
    owners = np.arange(360) % 7
    names = np.array(["f", "a", "e", "b", "g", "c", "d"])[owners]
    features = [f"x{k}" for k in range(12)]
    frame = pd.DataFrame(source.x_train, columns=features).assign(label=source.y_train, client=names)
    test = pd.DataFrame(source.x_test, columns=features).assign(label=source.y_test)
    keys = {"data__partition__kind": "natural", "data__clients": None, "data__public_samples": 0}
    framed = run(tmp_path / "frame", data=frame, call={"test": test}, **keys)
    columns = {"label": "species", "client": "station"}
    renamed = {"test": test.rename(columns=columns), "label_column": "species", "client_column": "station"}
    assert_same(framed, run(tmp_path / "renamed", data=frame.rename(columns=columns), call=renamed, **keys))
    arrays = run(
        tmp_path / "arrays",
        data=(source.x_train, source.y_train, names),
        call={"test": (source.x_test, source.y_test)},
        **keys,
    )
    assert_same(framed, arrays)
    # clients are numbered in the order of their names
    sizes = pd.Series(names).value_counts().sort_index().to_numpy()
    rows = framed.clients.drop_duplicates("client")
    assert (rows["samples"].to_numpy() == sizes[rows["client"]]).all()


class Mine(nn.Module):
    """Takes what it wants to know of the data."""

    def __init__(self, classes: int, width: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sigmoid(self.first(x)))


def test_an_own_model_as_a_class_with_options(tmp_path):
    keys = {"model__name": None, "model__hidden": None, "model__width": 5}
    result = run(tmp_path, call={"model": Mine}, **keys)
    assert result.summary["parameters"] == 12 * 5 + 5 + 5 * 4 + 4
    assert isinstance(result.model(), Mine)
    # its initial weights come from run.seed alone
    torch.manual_seed(123)
    assert torch.equal(result.module().first.weight, result.module().first.weight)


def test_an_own_model_as_an_object_starts_where_it_is_and_is_left_alone(tmp_path):
    module = Mine(4)
    before = {name: p.clone() for name, p in module.state_dict().items()}
    result = run(tmp_path, call={"model": module}, model__name=None, model__hidden=None, train__lr=1e-12)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
        torch.testing.assert_close(result.model().state_dict()[name], value)


def test_an_own_loss_and_metrics(tmp_path):
    """A loss that ignores class 0, whose clients then can't learn it; and two metrics that anybody can check."""

    def loss(logits, targets):
        return F.cross_entropy(logits, targets, reduction="none") * (targets != 0)

    def brier(logits, targets):
        return (torch.softmax(logits, 1) - F.one_hot(targets, 4)).square().sum(1)

    def top2(logits, targets):
        return (logits.topk(2, dim=1).indices == targets[:, None]).any(1)

    result = run(tmp_path, call={"loss": loss, "metrics": {"brier": brier, "top2": top2}})
    source, row = small_source(), result.metrics.iloc[-1]
    assert list(result.metrics.columns) == [*COLUMNS, "test_brier", "test_top2"]
    x, y = torch.from_numpy(source.x_test), torch.from_numpy(source.y_test)
    with torch.no_grad():
        logits = result.model()(x)
    assert row["test_brier"] == pytest.approx(float(brier(logits, y).mean()), rel=1e-5)
    assert row["test_top2"] == pytest.approx(float(top2(logits, y).float().mean()))
    assert row["test_loss"] == pytest.approx(float(loss(logits, y).mean()), rel=1e-5)
    assert not (logits.argmax(1) == 0).any()
    accumulator = EventAccumulator(str(result.folder))
    accumulator.Reload()
    assert accumulator.Scalars("metrics/test_brier")[-1].value == pytest.approx(row["test_brier"])


def test_torchs_loss_modules_are_taken_as_they_are_meant(tmp_path):
    assert_same(run(tmp_path / "own", call={"loss": nn.CrossEntropyLoss()}), run(tmp_path / "default"))


def test_callbacks_see_every_round_and_may_stop_the_run(tmp_path):
    reports: list[Report] = []
    result = run(tmp_path, call={"callbacks": [reports.append, lambda report: report.round == 4]})
    assert [report.round for report in reports] == [1, 2, 3, 4]
    assert result.summary["status"] == "interrupted"
    assert result.summary["rounds"] == 4
    for report, (_, row) in zip(reports, result.metrics.iterrows(), strict=True):
        assert report.metrics["test_accuracy"] == row["test_accuracy"]
        assert report.metrics["train_loss"] == row["train_loss"]
    finished = run(tmp_path, call={"callbacks": [reports.append]})
    assert [report.round for report in reports] == [1, 2, 3, 4, 5, 6]
    assert_same(finished, run(tmp_path / "whole"))


def test_the_exception_of_a_client_is_told_with_its_place(tmp_path):
    calls = []

    def loss(logits, targets):
        calls.append(1)
        # after the trial pass of the beginning, in the middle of the training
        if logits.requires_grad and len(calls) > 40:
            raise ZeroDivisionError("my own mistake")
        return F.cross_entropy(logits, targets, reduction="none")

    with pytest.raises(ClientError, match=r"client \d+ failed in phase train of round \d+ on ") as caught:
        run(tmp_path, call={"loss": loss})
    assert "my own mistake" in str(caught.value)
    assert "test_engine.py" in str(caught.value)


# ---------------------------------------------------------------- inside


def opened_run(folder: Path, algorithm: str, **own: Any) -> Iterator[Any]:
    config = {**SETTINGS, "algorithm.name": algorithm, "run.output": str(folder)}
    if "model" in own:
        config = {key: value for key, value in config.items() if not key.startswith("model.")}
    experiment, data = resolve(load(config), Own(source=small_source(), **own))

    def make_pool(worker: Worker) -> Any:
        return LocalPool(worker), [describe("cpu")]

    with computing_process(1, False), open_run(experiment, data, make_pool, False) as found:
        yield found


def test_the_server_takes_as_many_steps_on_its_public_set_as_it_is_told(tmp_path):
    """Under local_epochs too, where its clients' numbers of steps follow from their sizes."""
    for found in opened_run(tmp_path, "pfedmo"):
        assert found.experiment.training.local_epochs == 1
        for steps in (1, 3, 40):
            client = found.worker.server_as_client(found.state.server, steps)
            batches = list(client.data.batches())
            assert len(batches) == steps
            assert client.J.item() == steps
            assert all(batch.counts is None and batch.y.shape == (1, 8) for batch in batches)


class AlwaysDropping(nn.Module):
    """A common slip: F.dropout drops in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 7), nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(torch.relu(self.first(x))))


def test_a_model_that_draws_in_evaluations_leaves_the_global_generator_alone(tmp_path):
    """And evaluations of the same model give the same numbers."""
    rows = []
    for attempt in ("one", "two"):
        for found in opened_run(tmp_path / attempt, "pfedmo", model=AlwaysDropping):
            torch.manual_seed(len(rows))
            before = torch.random.get_rng_state()
            rows.append([report.metrics["personalized_accuracy"] for report in found.rounds()])
            assert torch.equal(torch.random.get_rng_state(), before)
    assert rows[0] == rows[1]
    assert len(set(rows[0])) > 1


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_the_representation_model_is_asked_with_its_own_buffers(tmp_path):
    """Whatever the module that the server has computed with before."""
    for found in opened_run(tmp_path, "pfedmo", model=Normed):
        rounds = found.rounds()
        next(rounds)
        server, network = found.state.server, found.worker.clients.network
        asked = found.experiment.algorithm.broadcast(server, "score").shared
        other = server["x"].clone()
        other.buffers.fill_(3.0)
        network.load(other)
        again = found.experiment.algorithm.broadcast(server, "score").shared
        assert torch.equal(asked["w"], again["w"])
        module = Normed().eval()
        module.load_state_dict(network.layout.named(server["x_rep"]))
        with torch.no_grad():
            torch.testing.assert_close(asked["w"], torch.softmax(module(asked["inputs"]), 1))


# ---------------------------------------------------------------- what a run leaves alone


def test_torchs_global_settings_are_as_before(tmp_path):
    def settings() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        )

    def inside(report: Report) -> None:
        seen.append(settings())

    def failing(report: Report) -> None:
        raise KeyError("the user's own")

    before, threads = settings(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        changed, seen = settings(), []
        run(tmp_path / "one", call={"callbacks": [inside]})
        assert settings() == changed
        assert seen[0][:4] == (1, True, True, False)
        with pytest.raises(KeyError):
            run(tmp_path / "two", call={"callbacks": [failing]})
        assert settings() == changed
    finally:
        torch.set_num_threads(threads)
    assert settings() == before


# ---------------------------------------------------------------- the package's own order

LAYERS = [
    ("errors", "files"),
    ("importing", "own_modules"),
    ("config", "code_digest"),
    ("core",),
    ("models", "data"),
    ("algorithms",),
    ("tracking", "inputs"),
    ("placement", "implied", "making"),
    ("experiment",),
    ("resolve",),
    ("engine", "comparison"),
    ("simulation",),
    ("testing", "tuning"),
    ("rerun", "listing"),
    ("cli",),
    ("run",),
]
"""From the bottom to the top: an import may only point down, or stay within a module or folder of its own."""

RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    """Everything that is imported anywhere in a module, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_point_down():
    seen = set()
    for path, tree in modules():
        if path == "__init__.py":
            continue
        own = path.removesuffix(".py").split("/")[0]
        for name in imports(tree):
            parts = name.split(".")
            if parts[0] != "fedray":
                continue
            other = parts[1]
            seen.add((own, other))
            # what the package itself offers stands above all that it is made of
            rank = RANK.get(other, RANK["simulation"])
            assert other == own or rank < RANK[own], f"{path} imports {name}"
    assert ("core", "core") in seen
    assert ("engine", "tracking") in seen


def test_no_module_imports_one_that_imports_it_back():
    """Whether at the top, for types only or in a function: what two such modules do can only be understood together."""
    trees = {
        f"fedray/{path}".removesuffix(".py").replace("/", ".").removesuffix(".__init__"): t for path, t in modules()
    }
    imported: dict[str, set[str]] = {module: set() for module in trees}
    for module, tree in trees.items():
        for name in imports(tree):
            while name and name not in trees:
                name = name.rpartition(".")[0]
            if name and name != module:
                imported[module].add(name)

    def chain(start: str) -> list[str]:
        """The modules from ``start`` back to it, each of which imports the next; empty if there is no such chain."""
        before: dict[str, str] = {}
        left = [start]
        while left:
            module = left.pop()
            for name in sorted(imported[module]):
                if name == start:
                    found = [start, module]
                    while found[-1] != start:
                        found.append(before[found[-1]])
                    return found[::-1]
                if name not in before:
                    before[name] = module
                    left.append(name)
        return []

    assert "fedray.errors" in imported["fedray.tracking.lock"]
    assert [found for found in map(chain, trees) if found] == []


def test_ray_is_imported_by_the_engine_and_the_tuning_alone():
    users = {path.split("/")[0] for path, tree in modules() for name in imports(tree) if name.split(".")[0] == "ray"}
    assert users <= {"engine", "tuning", "cli.py", "run.py"}
    assert "engine" in users


def test_a_local_run_needs_no_ray(tmp_path):
    code = (
        "import sys; sys.modules['ray'] = None;"
        "from fedray import simulate; from fedray.testing.contracts import SETTINGS, small_source;"
        "simulate({**SETTINGS, 'algorithm.name': 'pfedmo', 'run.output': sys.argv[1]}, data=small_source())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ALLOWED = {"default_rng", "Generator", "Philox", "PCG64", "SeedSequence", "BitGenerator"}
DRAWS = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "multinomial",
    "bernoulli",
    "normal",
    "manual_seed",
    "seed",
    "initial_seed",
}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def uses_of_global_generators(tree: ast.Module) -> list[str]:
    """What draws from, or seeds, a generator that is not a value of one's own."""
    found = [name for name in imports(tree) if name == "random" or name.startswith(("random.", "numpy.random"))]
    for node in ast.walk(tree):
        name = dotted(node)
        module, _, function = name.rpartition(".")
        if module in ("np.random", "numpy.random") and function not in ALLOWED:
            found.append(name)
        if module in ("torch", "torch.random", "torch.cuda") and function in {*DRAWS, "manual_seed_all"}:
            found.append(name)
    # a generator of numpy's without a seed is as bad
    found += [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func).endswith("default_rng") and not node.args
    ]
    return found


def test_no_global_generator_is_used():
    for path, tree in modules():
        # the one place that lends torch's global generators, and gives them back
        if path != "core/seeds.py":
            assert not uses_of_global_generators(tree), path


@pytest.mark.parametrize(
    "line",
    [
        "import random",
        "from random import choice",
        "x = np.random.permutation(3)",
        "np.random.seed(0)",
        "from numpy.random import rand",
        "torch.manual_seed(1)",
        "x = torch.randn(3)",
        "rng = np.random.default_rng()",
    ],
)
def test_a_global_generator_would_be_found(line):
    assert uses_of_global_generators(ast.parse(line))


def test_warnings_of_what_a_paper_does_not_mean(tmp_path):
    """R3's, and that of FedHBM whose cohort is everybody."""

    def warnings(algorithm: str, **keys: Any) -> list[str]:
        config = {**SETTINGS, "algorithm.name": algorithm, "run.output": str(tmp_path), "run.rounds": 1, **keys}
        folder = simulate({**config, "run.resume": False}, data=small_source()).folder
        return [line for line in (folder / "log.txt").read_text().splitlines() if "warning" in line]

    (line,) = warnings("scaffold", **{"train.momentum": 0.9})
    assert "train.momentum=0.9" in line
    assert "up to 10 times" in line
    assert not warnings("fedtrip", **{"train.momentum": 0.9}) + warnings("scaffold") + warnings("fedhbm")
    (line,) = warnings("fedhbm", **{"train.cohort_size": 9})
    assert "the cohort is everybody" in line


# ---------------------------------------------------------------- where the time goes


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_the_profile_accounts_for_all_of_a_round(kind, tmp_path, request):
    if kind == "ray":
        request.getfixturevalue("ray_cluster")
    keys = {"engine__kind": kind, "engine__actors": 2, "engine__cpus_per_actor": 0.1, "engine__profile": True}
    result = run(tmp_path, "scaffold", run__rounds=5, run__checkpoint_every=2, **keys)
    profile = result.profile
    assert list(profile) == ["round", *PURPOSES]
    assert list(profile["round"]) == [1, 2, 3, 4, 5]
    whole = profile[list(PURPOSES)].sum(axis=1)
    assert whole.sum() == pytest.approx(result.metrics["wall_seconds"].iloc[-1], abs=0.05)
    if kind == "local":
        np.testing.assert_allclose(whole[1:], result.metrics["wall_seconds"].diff()[1:], atol=0.01)
    for purpose in ("data", "gradient", "algorithm", "transport"):
        assert (profile[purpose] > 0).all(), purpose
    # a round is evaluated at its end, on Ray beside the next one if no checkpoint waits for it
    assert (profile["evaluation"] > 0).sum() >= 3
    # the checkpoint after round 2 lies between the rows of rounds 2 and 3
    assert list(profile["checkpoint"] > 0) == [False, False, True, False, True]
    assert (profile > -0.002).all(axis=None)
    accumulator = EventAccumulator(str(result.folder))
    accumulator.Reload()
    found = [event.value for event in accumulator.Scalars("profile/gradient")]
    np.testing.assert_allclose(found, profile["gradient"], rtol=1e-6)


def test_a_profile_has_the_rounds_that_count(tmp_path):
    """Of a run that goes on, with or without profiling; one that starts over without has none."""
    keys = {"run__checkpoint_every": 2, "engine__profile": True}

    def stopped_after_three(report):
        if report.round == 3:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run(tmp_path, run__rounds=6, call={"callbacks": [stopped_after_three]}, **keys)
    result = run(tmp_path, run__rounds=6, **keys | {"engine__profile": False})
    assert list(result.profile["round"]) == [1, 2, 3, 4, 5, 6]
    result = run(tmp_path, run__rounds=6, run__resume=False, **keys | {"engine__profile": False})
    assert not (result.folder / "profile.csv").exists()


def test_the_servers_own_training_is_the_servers_time(tmp_path):
    """Locally the server trains before the clients do, in the process in which tasks are timed too."""
    result = run(tmp_path, algorithm__name="pfedmo", engine__kind="local", engine__profile=True, run__rounds=4)
    assert (result.profile[list(PURPOSES)] >= -1e-6).all(axis=None)
    assert (result.profile["server"] > 0).all()


def test_the_profile_table_names_every_purpose(tmp_path, monkeypatch, capsys):
    from fedray.cli import main

    monkeypatch.chdir(tmp_path)
    settings = ["model.name=logistic", "data.clients=4", "run.rounds=3", "engine.kind=local", "algorithm.name=fedavg"]
    # an option may stand between settings
    assert main(["run", *settings[:2], "--profile", *settings[2:]]) == 0
    shown = capsys.readouterr().out
    assert "seconds per round, mean of 2" in shown
    assert all(purpose in shown for purpose in PURPOSES)


@pytest.mark.parametrize("algorithm", ["fedavg", "moon", "fedsiam_da"])
def test_every_backward_pass_counts_as_one(algorithm, tmp_path, monkeypatch):
    """Those of a loss that needs other models' features too."""
    plain, purposes = torch.autograd.grad, []
    for found in opened_run(tmp_path, algorithm):

        def watched(*args, **options):
            purposes.append(found.worker.clients.clock._purposes[-1])  # noqa: B023
            return plain(*args, **options)

        monkeypatch.setattr(torch.autograd, "grad", watched)
        next(found.rounds())
    assert set(purposes) == {"gradient"}


def test_a_clock_counts_what_is_timed_within_something_else_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock()
    with clock.on("outer"):
        with clock.on("inner"):
            pass
        with clock.on("inner"):
            pass
    assert clock.take() == {"outer": 1.0 + 4.0 + 16.0, "inner": 2.0 + 8.0}
    assert clock.take() == {}
