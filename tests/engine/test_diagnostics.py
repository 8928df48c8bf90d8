"""run.diagnostics: no bit of a run changes, and what is measured satisfies the identities that it must satisfy."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import fedray
from fedray.algorithms import Algorithm, Result, Upload
from fedray.testing.pickling import pickling_workers
from fedray.tracking.diagnostics import measured

SETTINGS = {
    "data.source": "sample", "data.clients": 7, "data.partition.kind": "dirichlet", "data.partition.alpha": 0.3,
    "model.name": "mlp", "train.cohort_size": 5, "train.local_steps": 3, "train.lr": 0.05, "run.rounds": 4,
    "run.checkpoint_every": 2, "engine.kind": "local",
}  # fmt: skip


ALL = {"run__diagnostics": "all_clients"}


def simulate(folder, name, **settings):
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return fedray.simulate(SETTINGS | {"run.output": str(folder), "run.name": name} | keys)


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "scaffold", "mime", "domo", "fednag", "fedacg", "fedsiam_da", "pfedmo"]
)
def test_no_bit_of_the_result_changes(algorithm, tmp_path):
    plain = simulate(tmp_path, "plain", algorithm__name=algorithm)
    found = simulate(tmp_path, "measured", algorithm__name=algorithm, run__diagnostics=True)
    assert found.summary["model_sha256"] == plain.summary["model_sha256"]
    times = ["round_seconds", "wall_seconds"]
    pd.testing.assert_frame_equal(
        found.metrics[plain.metrics.columns].drop(columns=times), plain.metrics.drop(columns=times), check_exact=True
    )
    pd.testing.assert_frame_equal(found.clients[plain.clients.columns], plain.clients, check_exact=True)
    assert np.isfinite(found.clients[["drift", "spread", "alignment"]].to_numpy()).all()


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("runs"), "run", algorithm__name="fedavg", run__diagnostics=True)


def test_lengths_and_cosines_fit_each_other(fedavg):
    """With D_i the updates and D their mean by p_i: sum p_i |D_i - D|^2 = sum p_i |D_i|^2 - |D|^2, and
    sum p_i |D_i| cos(D_i, D) = |D|, which is the length of FedAvg's step."""
    for number, rows in fedavg.clients.groupby("round"):
        p = rows["samples"] / rows["samples"].sum()
        step = fedavg.metrics.set_index("round")["update_norm"][number]
        assert (p * rows["drift"] * rows["alignment"]).sum() == pytest.approx(step, rel=1e-5)
        around = (p * rows["spread"] ** 2).sum()
        assert around == pytest.approx((p * rows["drift"] ** 2).sum() - step**2, rel=1e-4)


def test_columns_are_means_over_the_cohort(fedavg):
    means = fedavg.clients.groupby("round")[["drift", "spread", "alignment"]].mean()
    for name in means:
        assert fedavg.metrics[name].to_numpy() == pytest.approx(means[name].to_numpy(), rel=1e-12)


def test_the_drift_is_that_of_the_models(tmp_path):
    """One client alone: what it moves away is what the server's model moves."""
    run = simulate(tmp_path, "one", algorithm__name="fedavg", run__diagnostics=True, train__cohort_size=1)
    assert run.clients["drift"].to_numpy() == pytest.approx(run.metrics["update_norm"].to_numpy(), rel=1e-6)
    assert run.clients["spread"].to_numpy() == pytest.approx(0, abs=1e-6)
    assert run.clients["alignment"].to_numpy() == pytest.approx(1, abs=1e-6)


def test_layers(fedavg):
    rows = pd.read_parquet(fedavg.folder / "layers.parquet")
    tensors = load_file(fedavg.folder / "model.safetensors")
    last = rows[rows["round"] == 4].set_index("layer")
    assert list(last.index) == [name for name, _ in fedavg.model().named_parameters()]
    for name, norm in last["norm"].items():
        assert norm == pytest.approx(float(torch.linalg.vector_norm(tensors[name])), rel=1e-6)
    whole = rows.groupby("round")["update_norm"].apply(lambda each: math.sqrt((each**2).sum()))
    assert whole.to_numpy() == pytest.approx(fedavg.metrics["update_norm"].to_numpy(), rel=1e-6)


def test_a_resumed_run_measures_the_same(fedavg, tmp_path):
    stop = [lambda report: report.round == 2]
    settings = SETTINGS | {"algorithm.name": "fedavg", "run.diagnostics": True, "run.output": str(tmp_path)}
    assert fedray.simulate(settings, callbacks=stop).summary["status"] == "interrupted"
    again = fedray.simulate(settings)
    columns = ["round", "drift", "spread", "alignment", "update_norm"]
    pd.testing.assert_frame_equal(again.metrics[columns], fedavg.metrics[columns], check_exact=True)
    layers = [pd.read_parquet(run.folder / "layers.parquet") for run in (again, fedavg)]
    pd.testing.assert_frame_equal(*layers, check_exact=True)


def test_with_two_workers(fedavg, tmp_path):
    """Each has kept the updates of its own clients."""
    with pickling_workers(2):
        run = simulate(tmp_path, "two", algorithm__name="fedavg", **ALL)
    assert run.summary["model_sha256"] == fedavg.summary["model_sha256"]
    pd.testing.assert_frame_equal(run.clients, fedavg.clients, check_exact=True)
    local = simulate(tmp_path, "local", algorithm__name="fedavg", **ALL)
    assert run.metrics["cohort_error"].tolist() == local.metrics["cohort_error"].tolist()


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "ghbm", "pfedmo"])
def test_the_comparison_with_all_clients_changes_no_bit(algorithm, tmp_path):
    plain = simulate(tmp_path, "plain", algorithm__name=algorithm)
    found = simulate(tmp_path, "measured", algorithm__name=algorithm, **ALL)
    assert found.summary["model_sha256"] == plain.summary["model_sha256"]
    same = [name for name in plain.metrics if name not in ("round_seconds", "wall_seconds")]
    pd.testing.assert_frame_equal(found.metrics[same], plain.metrics[same], check_exact=True)


def test_the_error_of_a_cohort_is_that_of_two_runs(tmp_path):
    """One round with the cohort, and one with all clients, from the same model on the same batches."""

    def step(name, **settings):
        run = simulate(tmp_path, name, algorithm__name="fedavg", run__rounds=1, **settings)
        after = torch.cat([p.detach().flatten() for p in run.model().parameters()])
        return after - torch.cat([p.detach().flatten() for p in run.module(None).parameters()]), run

    cohort, run = step("cohort", **ALL)
    everybody, _ = step("all", train__cohort_size=None)
    wanted = torch.linalg.vector_norm(cohort - everybody) / torch.linalg.vector_norm(everybody)
    assert run.metrics["cohort_error"].iloc[0] == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_there_is_no_error_with_full_participation(server_lr, tmp_path):
    everybody = {"train__cohort_size": None, "algorithm__tau": 2, "algorithm__name": "ghbm"}
    everybody |= {"train__server_lr": server_lr}
    run = simulate(tmp_path, "all", **everybody, **ALL)
    assert run.metrics["cohort_error"].to_numpy() == pytest.approx(0, abs=1e-6)
    assert run.metrics["momentum_error"].isna().tolist() == [True, True, False, False]
    assert run.metrics["momentum_error"].to_numpy()[2:] == pytest.approx(0, abs=1e-5)


def test_the_momentum_of_one_round_is_as_wrong_as_the_cohort_was(tmp_path):
    """With tau = 1 the momentum of a round is the update of the round before."""
    run = simulate(tmp_path, "one", algorithm__name="ghbm", algorithm__tau=1, **ALL)
    found, before = run.metrics["momentum_error"].to_numpy()[1:], run.metrics["cohort_error"].to_numpy()[:-1]
    assert found == pytest.approx(before, rel=1e-4)


def test_rounds_without_clients_belong_to_the_window(tmp_path):
    """All clients take part, but for two rounds in which none can be reached. In neither does the model move."""
    path = tmp_path / "when.csv"
    path.write_text("client,from,to\n" + "".join(f"{client},0,10\n{client},50,1e9\n" for client in range(7)))
    clock = {"system__availability": str(path), "system__latency_ms": 4000, "system__deadline_seconds": 30}
    keys = {"train__cohort_size": None, "algorithm__tau": 2, "algorithm__name": "ghbm", "run__rounds": 6}
    run = simulate(tmp_path, "gaps", **keys, **clock, **ALL)
    assert run.metrics["cohort_size"].tolist() == [7, 0, 0, 7, 7, 7]
    assert run.metrics["momentum_error"].to_numpy()[4:] == pytest.approx(0, abs=1e-5)


def test_the_mean_of_a_window_is_remembered_over_a_stop(tmp_path):
    settings = SETTINGS | {"algorithm.name": "ghbm", "algorithm.tau": 2, "run.diagnostics": "all_clients"}
    whole = fedray.simulate(settings | {"run.output": str(tmp_path), "run.name": "whole"})
    halves = settings | {"run.output": str(tmp_path), "run.name": "halves"}
    fedray.simulate(halves, callbacks=[lambda report: report.round == 2])
    again = fedray.simulate(halves)
    columns = ["cohort_error", "momentum_error"]
    pd.testing.assert_frame_equal(again.metrics[columns], whole.metrics[columns], check_exact=True)


VIRTUAL = {"run__diagnostics": "virtual"}


@pytest.mark.parametrize("algorithm", ["fedavg", "ghbm", "pfedmo", "fednag"])
def test_the_virtual_model_changes_no_bit(algorithm, tmp_path):
    plain = simulate(tmp_path, "plain", algorithm__name=algorithm)
    found = simulate(tmp_path, "measured", algorithm__name=algorithm, **VIRTUAL)
    assert found.summary["model_sha256"] == plain.summary["model_sha256"]
    assert (found.metrics["virtual_distance"] > 0).all()


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("fedavg", "train__local_steps"), ("fedavg", "train__cohort_size"), ("pfedmo", "train__cohort_size")],
)
def test_the_virtual_model_is_the_mean_where_clients_cannot_drift(algorithm, key, tmp_path):
    """In one step from the same model, or with one client."""
    run = simulate(tmp_path, "run", algorithm__name=algorithm, **{key: 1}, **VIRTUAL)
    assert run.metrics["virtual_distance"].to_numpy() == pytest.approx(0, abs=2e-6 * run.metrics["drift"].max())


def test_the_virtual_model_is_that_of_all_data_together(tmp_path):
    """With full batches its steps are those of one client that holds all samples."""
    full = {"algorithm__name": "fedavg", "train__batch_size": "full", "train__cohort_size": None}
    full["run__rounds"] = 1
    run = simulate(tmp_path, "clients", **full, **VIRTUAL)
    whole = simulate(tmp_path, "whole", **full, data__clients=1)
    models = [torch.cat([p.detach().flatten() for p in each.model().parameters()]) for each in (run, whole)]
    wanted = torch.linalg.vector_norm(models[0] - models[1])
    assert run.metrics["virtual_distance"].iloc[0] == pytest.approx(float(wanted), rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("scaffold", "run.diagnostics=virtual: the clients of Scaffold keep states; use true"),
        ("mime", "run.diagnostics=virtual: Mime does not begin with local training; use true"),
        ("moon", "run.diagnostics=virtual.*"),
    ],
)
def test_algorithms_without_a_virtual_model(algorithm, message, tmp_path):
    with pytest.raises(fedray.UserError, match=message):
        simulate(tmp_path, "run", algorithm__name=algorithm, **VIRTUAL)


def test_an_algorithm_that_begins_otherwise_is_not_compared(tmp_path):
    with pytest.raises(fedray.UserError, match="Mime does not begin with local training; use true"):
        simulate(tmp_path, "mime", algorithm__name="mime", **ALL)


def test_an_algorithm_without_local_steps_is_refused():
    class Odd(Algorithm):
        phases = ("guess",)

        def guess(self, client):
            return Result({"x": Upload.weighted_mean(client.start("x"))})

    with pytest.raises(fedray.UserError, match="Odd has no local steps that could be measured"):
        measured(Odd())
