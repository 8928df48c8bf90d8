"""Runs with asynchronous rounds: FedBuff's rule from saved local models, the same bits, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from command_runs import refused
from safetensors.numpy import load_file
from small_runs import Normed

from fedray import UserError, simulate
from fedray.algorithms import Cohort
from fedray.config import load
from fedray.core.vectors import Layout
from fedray.engine.asynchronous import asynchronous_of
from fedray.engine.state.pending import Pending
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.selection import Chosen
from fedray.testing.contracts import SETTINGS, small_source

BUFFERED = {
    "system.mode": "buffered", "system.flops_per_second": {"lognormal": [1e6, 1.0]}, "system.watts": 2,
    "train.cohort_size": 3, "system.concurrency": 6, "run.rounds": 14, "algorithm.name": "fedavg",
}  # fmt: skip


def run(folder, model=None, **changes):
    keys = SETTINGS | BUFFERED | {"run.output": str(folder)}
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    keys = {key: value for key, value in keys.items() if model is None or not key.startswith("model.")}
    return simulate(keys, data=small_source(), model=model)


def table(result):
    return result.metrics.drop(columns=["round_seconds", "wall_seconds"])


def flat(path):
    return np.concatenate([value.ravel() for _, value in sorted(load_file(path).items())]).astype(np.float64)


@pytest.mark.parametrize("members", [([2], [5, 8]), ([5, 8], [2])])
def test_running_statistics_are_averaged(members):
    """And not moved like parameters, which would lead variances below zero. The server's have the weight that is left.
    Counts are those of the client with the lowest number, whichever group it is in (ALGORITHMS R4)."""
    layout = Layout(Normed())
    begun, now = (layout.model(torch.rand(layout.row_width) + 1) for _ in range(2))
    (count,) = layout.whole_numbers
    pending, total, weights = Pending(layout), torch.zeros(layout.row_width), ([0.4], [0.1, 0.2])
    for ids, of_group in zip(members, weights if len(members[0]) == 1 else weights[::-1], strict=True):
        sent = sum(weight * torch.rand(layout.row_width) for weight in of_group)
        sent[count] = 10 * ids[0]
        pending.add(3, "y", layout.model(sent), Cohort(ids=ids, weights=of_group), begun)
        pending.restore(dict(pending.vectors()), {})
        total += sent
    row = pending.take(3, now)["y"].row
    buffers = slice(layout.width, layout.width + 14)
    torch.testing.assert_close(row[: layout.width], (now.row + total - 0.7 * begun.row)[: layout.width])
    torch.testing.assert_close(row[buffers], (0.3 * now.row + total)[buffers])
    assert set(row[count].tolist()) == {20}


def test_counts_are_those_of_one_client(tmp_path):
    """Updates of answers that began with different models have a client's count, as it is after its training."""
    made = run(
        tmp_path, model=Normed, run__local_models_of=list(range(9)),
        run__local_models_in=list(range(1, 15)),
    )  # fmt: skip
    last = made.clients[made.clients["round"] == 14].sort_values("client")
    assert last.staleness.nunique() > 1
    began = 14 - int(last.staleness.iloc[0])
    local = made.folder / f"local/round-{began:08}/client-{last.client.iloc[0]}.safetensors"
    count = "norm.num_batches_tracked"
    assert load_file(made.folder / "model.safetensors")[count] == load_file(local)[count] > 0


@pytest.mark.parametrize(("staleness", "weighting"), [("polynomial", "samples"), ("constant", "uniform")])
def test_fedbuff(staleness, weighting, tmp_path):
    """x^{r+1} = x^r + eta_g sum_i p_i s_i (y_i - x^{r_i}), over the answers that come before the update."""
    keys = {"train.server_lr": 0.7, "system.staleness": staleness, "train.weighting": weighting}
    made = run(
        tmp_path, run__local_models_of=list(range(9)), run__local_models_in=list(range(1, 15)),
        **{key.replace(".", "__"): value for key, value in keys.items()},
    )  # fmt: skip
    experiment, data = resolve(load(SETTINGS | BUFFERED | keys), CustomObjects(source=small_source()))

    class State:
        sizes = data.sizes()

    schedule = asynchronous_of(experiment, data, State).schedule
    module = experiment.build_model()
    models = {
        1: np.concatenate([v.detach().numpy().ravel() for _, v in sorted(module.state_dict().items())]).astype(
            np.float64
        )
    }
    late = []
    for number in range(1, 15):
        answers = schedule.update(number).answers
        total = sum(data.sizes()[start.client] for start in answers)
        moved = models[number].copy()
        for start in answers:
            p = data.sizes()[start.client] / total if weighting == "samples" else 1 / len(answers)
            s = 1 / math.sqrt(1 + number - start.version) if staleness == "polynomial" else 1.0
            y = flat(made.folder / f"local/round-{start.version:08}/client-{start.client}.safetensors")
            moved += 0.7 * p * s * (y - models[start.version])
            late.append(number - start.version)
        models[number + 1] = moved
    assert max(late) >= 2
    final = flat(made.folder / "model.safetensors")
    assert np.linalg.norm(final - models[15]) < 1e-5 * np.linalg.norm(final - models[1])


def test_those_who_begin_together_make_a_synchronous_round(tmp_path, monkeypatch):
    """As many clients as make an update, all as fast as each other: the cohorts of a synchronous run."""
    same = run(tmp_path, system__flops_per_second=None, system__latency_ms=100, system__concurrency=3)
    cohorts = {number: rows.client.to_numpy() for number, rows in same.clients.groupby("round")}
    monkeypatch.setattr("fedray.engine.selection.chosen_of", lambda known, experiment: Chosen(cohorts[known.round]))
    keys = {key.replace(".", "__"): None for key in BUFFERED if key.startswith("system.")}
    other = run(tmp_path / "sync", **keys | {"system__mode": "sync"})
    assert flat(same.folder / "model.safetensors") == pytest.approx(flat(other.folder / "model.safetensors"), abs=2e-6)
    assert same.metrics.virtual_seconds.tolist() == pytest.approx([0.2 * number for number in range(1, 15)])
    assert (same.clients.staleness == 0).all()
    for column in ("bytes_down", "bytes_up", "flops", "cohort_size"):
        assert same.metrics[column].tolist() == other.metrics[column].tolist()


@pytest.mark.parametrize("name", ["fedavg", "fedadam", "fedavgm", "fedprox"])
def test_the_same_in_other_processes_and_when_it_is_resumed(name, tmp_path):
    whole = run(tmp_path / "whole", algorithm__name=name, system__dropout=0.2)
    assert {"used", "dropped"} == set(whole.clients.outcome)
    other = run(
        tmp_path / "other",
        algorithm__name=name,
        system__dropout=0.2,
        train__cohort_size=None,
        system__buffer=3,
        engine__kind="fedray.testing.pickling:DoublingPool",
    )
    assert other.summary["model_sha256"] == whole.summary["model_sha256"]
    keys = SETTINGS | BUFFERED | {"run.output": str(tmp_path), "algorithm.name": name, "system.dropout": 0.2}
    stopped = simulate(
        keys | {"run.checkpoint_every": 2}, data=small_source(), callbacks=[lambda report: report.round == 5]
    )
    assert stopped.summary["status"] == "interrupted"
    resumed = simulate(keys | {"run.checkpoint_every": 2}, data=small_source())
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    pd.testing.assert_frame_equal(table(resumed), table(whole))
    pd.testing.assert_frame_equal(resumed.clients, whole.clients)


def test_a_run_that_was_to_be_shorter_can_not_go_on(tmp_path):
    """The answers of its last clients, which a longer run needs, were never made."""
    run(tmp_path, run__rounds=3)
    with pytest.raises(UserError, match=r"holds another run \(run.rounds differs\)"):
        run(tmp_path, run__rounds=6)


def test_on_ray(tmp_path, ray_cluster):
    whole = run(tmp_path / "whole")
    other = run(tmp_path / "ray", engine__kind="ray", engine__actors=2, engine__cpus_per_actor=0.5)
    assert other.summary["model_sha256"] == whole.summary["model_sha256"]
    pd.testing.assert_frame_equal(other.clients, whole.clients)


def test_what_is_refused(capsys, own_folder, no_real_data):
    base = ["system.mode=buffered", "data.clients=6", "system.buffer=2"]
    line = refused(capsys, *base, "algorithm.name=scaffold")
    assert "algorithm.name=scaffold does not say" in line
    able = line.split("these do: ")[1].strip().split(", ")
    assert {"fedadam", "fedavg", "fedavgm", "fedprox"} <= set(able)
    assert not {"scaffold", "mime", "fedtrip"} & set(able)
    assert "system.deadline_seconds is for system.mode=sync" in refused(capsys, *base, "system.deadline_seconds=3")
    assert "system.buffer=2 and train.cohort_size=3: the cohort" in refused(capsys, *base, "train.cohort_size=3")
    assert "system.buffer=2 and train.participation=1: the cohort" in refused(capsys, *base, "train.participation=1")
    assert "system.buffer=7 is more than the 6 clients" in refused(capsys, *base[:2], "system.buffer=7")
    assert "system.buffer is for system.mode=buffered" in refused(capsys, "system.buffer=3")
    assert "system.concurrency is for system.mode=buffered" in refused(capsys, "system.concurrency=3")
    assert "system.concurrency=7 is more than the 6 clients" in refused(capsys, *base, "system.concurrency=7")
    assert "run.diagnostics compares clients that began together" in refused(capsys, *base, "run.diagnostics=true")
