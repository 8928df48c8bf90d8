"""A finished run's folder holds its records, its model and its TensorBoard events, and they agree with each other."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from small_runs import COLUMNS, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from torch import nn

from fedray import FedrayWarning, UserError, evaluate, simulate
from fedray.algorithms.fedavg import FedAvg
from fedray.config import load
from fedray.engine.evaluation.evaluator import samples_of_pass
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.models.inspection import ModelFacts
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.columns import TAGS
from fedray.tracking.failure import write_failure
from fedray.tracking.result import RunResult

OF_SHARES = [
    "global_on_shares_accuracy", "representation_on_shares_accuracy", "cohort_with_shares", "cohort_least_share",
]  # fmt: skip
"""Further columns of an algorithm that has personal models, here pFedMo."""

SUMMARY = {
    "status", "metric", "mode", "final", "best", "last10", "last_rounds", "final_accuracy", "best_accuracy",
    "last10_accuracy", "final_personalized_accuracy", "rounds", "targets", "parameters", "model_sha256",
    "partition_hash", "stopped_by", "versions", "machine", "records",
}  # fmt: skip


def right(module: nn.Module, x: np.ndarray, y: np.ndarray) -> float:
    with torch.no_grad():
        return float((module(torch.from_numpy(x)).argmax(1).numpy() == y).mean())


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
        run__last_rounds=3,
    )


def test_the_folder_holds_what_it_should_and_no_more(finished):
    names = {path.name for path in finished.folder.iterdir()}
    (events,) = [name for name in names if name.startswith("events.out.tfevents.")]
    assert names - {events} == {
        "config.yaml", "metrics.csv", "clients.parquet", "evaluation.parquet", "model.safetensors", "summary.json",
        "inputs.json", "partition.parquet", "checkpoints", "log.txt",
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
    """Under local_epochs, a round counts the most steps that one of its clients makes."""
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
    assert summary["final_personalized_accuracy"] == finished.metrics["personalized_accuracy"].dropna().iloc[-1]
    assert summary["best_accuracy"] == accuracy.max()
    assert summary["last10_accuracy"] == pytest.approx(accuracy.mean())
    # rounds 1, 4 and 6 were evaluated
    assert summary["last_rounds"] == {
        "from_round": 4, "to_round": 6, "evaluations": 2, "mean": pytest.approx(accuracy.iloc[-2:].mean())
    }  # fmt: skip
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
    """All accuracies and the loss of the last round follow from the final model and the data alone."""
    keys = {"run__eval_train_samples": 50, "data__validation_samples": 40, "run__rounds": 2}
    result = run(tmp_path, **keys)
    config = {**SETTINGS, "algorithm.name": "fedavg", "run.output": str(tmp_path)}
    config |= {key.replace("__", "."): value for key, value in keys.items()}
    _, data = resolve(load(config), CustomObjects(source=small_source()))
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
    monkeypatch.setattr("fedray.engine.evaluation.accuracies.EVAL_BLOCK", 7)
    for bound in ("FEWEST", "MOST"):
        monkeypatch.setattr(f"fedray.engine.evaluation.evaluator.{bound}", 3)
    blocks = run(tmp_path / "blocks", "pfedmo")
    for name in ("test_accuracy", "test_loss", "representation_accuracy", "personalized_accuracy"):
        np.testing.assert_allclose(whole.metrics[name], blocks.metrics[name], rtol=1e-6)


@pytest.mark.parametrize(
    ("flops", "uncounted", "device", "samples"),
    [
        (0.0, (), "cpu", 500),
        (158_800.0, (), "cpu", 500),
        (833_040.0, (), "cpu", 480),
        (3_124_096.0, (), "cpu", 128),
        (25e6, (), "cpu", 50),
        (0.0, ("own (CustomObjects)",), "cpu", 50),
        (25e6, (), "cuda", 250),
    ],
)
def test_an_evaluation_passes_more_samples_at_once_through_a_small_model(flops, uncounted, device, samples):
    facts = ModelFacts(parameters=10, buffers=0, flops=flops, uncounted=uncounted)
    assert samples_of_pass(facts, device) == samples


def test_a_diverged_run_keeps_its_records(tmp_path):
    result = run(tmp_path, train__lr=1e30)
    assert result.summary["status"] == "diverged"
    assert result.summary["rounds"] == len(result.metrics) < 6


@pytest.fixture(scope="module")
def events(finished: RunResult) -> EventAccumulator:
    accumulator = EventAccumulator(str(finished.folder))
    accumulator.Reload()
    return accumulator


def test_scalars_are_the_metrics(finished, events):
    tags = set(events.Tags()["scalars"])
    missing = {"virtual_seconds", "joules", "clip_norm", "epsilon"}
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


class Trusting(FedAvg):
    """Its server knows something of clients, from a later round on."""

    trusted: Any = staticmethod(lambda cohort: [1] * len(cohort.ids))

    def server_update(self, server: Any, phase: str, sums: Any, scalars: Any) -> None:
        super().server_update(server, phase, sums, scalars)
        if server.round > 2:
            server.client_scalars["trust"] = self.trusted(server.cohort)


def run_with(algorithm: type[FedAvg], folder: Path, **keys: Any) -> RunResult:
    settings = {**SETTINGS, "run.output": str(folder), "run.rounds": 4, "run.checkpoint_every": 1, **keys}
    return simulate(settings, data=small_source(), algorithm=algorithm)


def test_a_column_may_begin_in_a_later_round(tmp_path):
    """However many files the table has, and also if nobody answered in the first rounds."""
    clients = run_with(Trusting, tmp_path).clients
    assert clients[clients["round"] > 2].trust.tolist() == [1.0] * 10
    assert clients[clients["round"] <= 2].trust.isna().all()
    silent = {"system.dropout": 0.8, "train.cohort_size": 1, "run.rounds": 12, "run.seed": 1, "run.name": "silent"}
    made = run_with(Trusting, tmp_path, **silent)
    assert made.metrics.cohort_size.iloc[0] == 0
    assert made.clients.loss.notna().sum() == made.metrics.cohort_size.sum() > 0


@pytest.mark.parametrize(
    "wrong", [lambda cohort: [1.0], lambda cohort: 0.5, lambda cohort: dict.fromkeys(cohort.ids, 1.0)]
)
def test_what_is_no_column_of_clients_is_one_line(tmp_path, wrong):
    with pytest.raises(UserError, match=r"server\.client_scalars\['trust'\] of round 3 must have a number for each of"):
        run_with(type("Wrong", (Trusting,), {"trusted": staticmethod(wrong)}), tmp_path)


def test_the_best_model_of_a_run_that_was_extended(tmp_path):
    """The last round of the shorter run was evaluated, and may be the best, though the longer run would not do that."""
    keys = {"algorithm": "fedavg", "run__save_best": True, "run__eval_every": 2, "train__lr": 2.0}
    found = set()
    for seed in range(4):
        for rounds in (3, 4):
            made = run(tmp_path / str(seed), run__seed=seed, run__rounds=rounds, **keys)
        best = evaluate(made.folder / "model-best.safetensors", data=small_source()).metrics["accuracy"]
        assert best == made.summary["best"]
        found.add(made.metrics.test_accuracy.idxmax())
    assert 2 in found


def test_a_folder_that_is_no_run_folder_yet_stays_empty(tmp_path):
    write_failure(tmp_path, OSError("no room"))
    assert [*tmp_path.iterdir()] == []


def test_a_run_that_was_interrupted_and_keeps_no_checkpoints_begins_anew(tmp_path):
    """Of many runs the same command finishes those that are not, whatever they keep."""

    def ends_at_2(report: Any) -> bool:
        return bool(report.round == 2)

    keys = {"run__checkpoint_every": 0, "run__name": "run"}
    whole = run(tmp_path / "whole", **keys)
    assert run(tmp_path, call={"callbacks": [ends_at_2]}, **keys).summary["status"] == "interrupted"
    with pytest.raises(UserError, match=r"has no checkpoint to go on from: use run.resume=false"):
        run(tmp_path, run__resume=True, **keys)
    with pytest.warns(FedrayWarning, match=r"interrupted after 2 rounds.*kept nothing.*starting over \(the old one is"):
        assert_same(whole, run(tmp_path, **keys))
    assert len((tmp_path / "run.bak-1/metrics.csv").read_text().splitlines()) == 3
