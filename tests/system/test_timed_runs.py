"""Runs with a virtual clock: who counts, what is recorded, and the same bits."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from fedray import simulate
from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.selection import Chosen
from fedray.testing.contracts import SETTINGS, small_source

CLOCK = {
    "system.flops_per_second": {"lognormal": [1e6, 1.0]},
    "system.down_mbps": 1,
    "system.up_mbps": {"uniform": [0.1, 1]},
    "system.latency_ms": 20,
    "system.watts": 5,
    "system.server_mbps": 2,
    "system.server_flops_per_second": 1e7,
    "system.availability": {"from": 0, "to": 23, "shift": {"uniform": [0, 24]}},
    "system.dropout": 0.2,
    "system.deadline_seconds": 1.5,
    "system.over_select": 1.4,
}


def run(folder, name="scaffold", **changes):
    keys = SETTINGS | CLOCK | {"algorithm.name": name, "run.output": str(folder), "run.rounds": 12}
    return simulate(keys | {key.replace("__", "."): value for key, value in changes.items()}, data=small_source())


def table(result):
    return result.metrics.drop(columns=["round_seconds", "wall_seconds"])


@pytest.mark.parametrize("name", ["scaffold", "pfedmo", "mimemom", "fedtrip"])
def test_those_who_leave_a_round_were_never_in_it(name, tmp_path, monkeypatch):
    """The clients that are used give the model of a run without a clock whose cohorts are exactly these: weights,
    states and gaps too (ALGORITHMS R8)."""
    timed = run(tmp_path / "timed", name)
    rows = timed.clients
    used = {number: of.client[of.outcome == "used"].to_numpy() for number, of in rows.groupby("round")}
    assert {"late", "dropped", "used", "unavailable"} >= set(rows.outcome)
    assert len({len(each) for each in used.values()}) > 1
    monkeypatch.setattr("fedray.engine.selection.chosen_of", lambda known, experiment: Chosen(used[known.round]))
    keys = dict.fromkeys(CLOCK)
    without = run(tmp_path / "without", name, **{key.replace(".", "__"): default for key, default in DEFAULTS.items()})
    assert keys.keys() == DEFAULTS.keys()
    assert without.summary["model_sha256"] == timed.summary["model_sha256"]
    assert timed.metrics.cohort_size.tolist() == [len(used[number]) for number in sorted(used)]


DEFAULTS = {key: None for key in CLOCK} | {"system.dropout": 0.0, "system.over_select": 1.0}


def test_what_is_recorded(tmp_path):
    timed = run(tmp_path)
    rows, metrics = timed.clients, timed.metrics
    assert metrics.virtual_seconds.is_monotonic_increasing
    assert metrics.joules.is_monotonic_increasing
    assert (rows.groupby("round").size() == 7).all()
    used = rows[rows.outcome == "used"]
    assert used[["loss", "virtual_seconds"]].notna().all().all()
    assert (used.virtual_seconds <= 1.5).all()
    late = rows[rows.outcome == "late"]
    assert len(late)
    assert (late.virtual_seconds > 0).all()
    assert (late.steps > 0).all()
    assert late.loss.isna().all()
    for outcome in ("dropped", "unavailable"):
        of = rows[rows.outcome == outcome]
        assert (of.steps == 0).all()
        assert of.virtual_seconds.isna().all()
    # 5 watts while a client takes part
    joules = 5 * rows.virtual_seconds.sum()
    assert metrics.joules.iloc[-1] == pytest.approx(joules)
    # what is sent in vain counts too
    assert (
        metrics.bytes_up.iloc[-1] > run(tmp_path / "all", **{"system__deadline_seconds": None}).metrics.bytes_up.iloc[0]
    )


def test_a_round_without_anybody_changes_nothing(tmp_path):
    path = tmp_path / "when.csv"
    path.write_text("client,from,to\n" + "".join(f"{client},1,2\n{client},100,1e9\n" for client in range(9)))
    nobody = {key: None for key in CLOCK} | {"system.dropout": 0.0, "system.over_select": 1.0}
    changes = nobody | {"system.availability": str(path), "system.deadline_seconds": 30.0, "system.down_mbps": 1}
    timed = run(tmp_path, "fedavgm", **{key.replace(".", "__"): value for key, value in changes.items()})
    sizes = timed.metrics.cohort_size.tolist()
    assert sizes == [0, 0, 0, 0, *[5] * 8]
    losses = timed.metrics.test_loss
    assert losses[0] == losses[3] != losses[4]
    assert timed.metrics.virtual_seconds[:4].tolist() == [30, 60, 90, 120]
    assert timed.metrics.train_loss.isna().tolist() == [True] * 4 + [False] * 8
    assert timed.metrics.flops[3] == 0


def plain(**system):
    """Changes of the settings with no other keys of the clock than these."""
    return {key.replace(".", "__"): value for key, value in DEFAULTS.items()} | system


def test_time_goes_on_where_hours_are_too_short_for_another_round(tmp_path):
    """Clients need 2,000 s and can be reached for an hour of each day: there is time for one round."""
    keys = plain(system__availability={"from": 8, "to": 9}, system__latency_ms=1e6)
    timed = run(tmp_path, "fedavg", **keys, run__rounds=8)
    assert timed.metrics.cohort_size.tolist() == [0, 5, 0, 0, 5, 0, 0, 5]
    hours = [8, 8 + 2000 / 3600, 9, 32, 32 + 2000 / 3600, 33, 56, 56 + 2000 / 3600]
    assert (timed.metrics.virtual_seconds / 3600).tolist() == pytest.approx(hours)


@pytest.mark.parametrize("buffered", [False, True])
def test_a_run_ends_when_no_client_can_be_reached_any_more(buffered, tmp_path):
    """In good order, its last round evaluated, and is complete for whoever starts it again."""
    path = tmp_path / "when.csv"
    path.write_text("client,from,to\n" + "".join(f"{client},0,{100 + client}\n" for client in range(9)))
    keys = plain(system__availability=str(path), system__latency_ms=10_000, run__rounds=40, run__eval_every=0)
    keys |= {"system__mode": "buffered"} if buffered else {}
    timed = run(tmp_path, "fedavg", **keys)
    assert (timed.summary["status"], timed.summary["stopped_by"]) == ("completed", "system.availability")
    # five rounds of 20 s, and for those who can be reached longest the last seconds
    assert 100 <= timed.metrics.virtual_seconds.iloc[-1] <= 108
    assert timed.summary["rounds"] == len(timed.metrics) < 40
    assert timed.metrics.test_accuracy.notna().tolist() == [False] * (len(timed.metrics) - 1) + [True]
    line = f"warning: after round {len(timed.metrics)} no client can be reached any more (system.availability)"
    assert line in (timed.folder / "log.txt").read_text()
    again = run(tmp_path, "fedavg", **keys)
    assert again.summary == timed.summary


def test_a_run_that_is_over_goes_on_to_its_end_and_no_further(tmp_path):
    path = tmp_path / "when.csv"
    path.write_text("client,from,to\n" + "".join(f"{client},0,100\n" for client in range(9)))
    keys = plain(system__availability=str(path), system__latency_ms=10_000, run__rounds=40, run__checkpoint_every=1)
    whole = run(tmp_path / "whole", "fedavg", **keys)
    settings = {key.replace("__", "."): value for key, value in keys.items()} | {"algorithm.name": "fedavg"}
    last = len(whole.metrics)
    for number in (2, last):
        stopped = simulate(
            SETTINGS | settings | {"run.output": str(tmp_path), "run.name": f"{number}"}, data=small_source(),
            callbacks=[lambda report, number=number: report.round == number],
        )  # fmt: skip
        assert (stopped.summary["status"] == "interrupted") == (number < last)
        resumed = run(tmp_path, "fedavg", **keys, run__name=f"{number}")
        assert resumed.summary["stopped_by"] == "system.availability"
        pd.testing.assert_frame_equal(table(resumed), table(whole))


def test_the_server_is_charged_for_the_steps_of_those_who_are_used(tmp_path):
    """pFedMo's server trains for as many steps as they do in the mean, though others were drawn."""
    keys = plain(system__server_flops_per_second=1e6, system__up_mbps={"lognormal": [1, 2]}, system__over_select=1.4)
    timed = run(tmp_path, "pfedmo", **keys, run__checkpoint_every=0)
    experiment, data = resolve(load(timed.folder / "config.yaml"), CustomObjects(source=small_source()))
    forward, public = experiment.facts.flops, len(data.public)
    batch = min(experiment.training.batch_size, public)
    rows = timed.clients[timed.clients.outcome == "used"].groupby("round")
    assert (rows.steps.mean().round() != timed.clients.groupby("round").steps.mean().round()).any()
    slowest, mean = rows.virtual_seconds.max(), rows.steps.mean().round()
    beside = forward * 3 * mean * batch / 1e6
    probes = forward * min(256, public) * (rows.size() + 1) / 1e6
    took = timed.metrics.virtual_seconds.diff().fillna(timed.metrics.virtual_seconds.iloc[0])
    assert (beside > slowest).any()
    assert took.tolist() == pytest.approx((np.maximum(slowest, beside) + probes).tolist())


def test_a_round_without_anybody_after_one_with_clients_on_ray(tmp_path, ray_cluster):
    """Its evaluation is put off there until workers have something to do, and is not lost if they have nothing."""
    keys = {"system__dropout": 0.6, "system__availability": None, "train__cohort_size": 2, "system__over_select": 1.0}
    keys["system__deadline_seconds"] = None
    local = run(tmp_path / "local", **keys)
    assert {0, 1} <= set(local.metrics.cohort_size)
    other = run(tmp_path / "ray", engine__kind="ray", engine__actors=1, engine__cpus_per_actor=0.5, **keys)
    pd.testing.assert_frame_equal(table(other), table(local))


@pytest.mark.slow
def test_the_same_on_ray_and_when_it_is_resumed(tmp_path, ray_cluster):
    whole = run(tmp_path / "whole")
    for actors in (1, 2, 3):
        other = run(tmp_path / f"{actors}", engine__kind="ray", engine__actors=actors, engine__cpus_per_actor=0.5)
        assert other.summary["model_sha256"] == whole.summary["model_sha256"]
        pd.testing.assert_frame_equal(table(other), table(whole))
        pd.testing.assert_frame_equal(other.clients, whole.clients)
    begun = {"run__checkpoint_every": 2, "run__name": "resumed"}
    keys = SETTINGS | CLOCK | {"algorithm.name": "scaffold", "run.output": str(tmp_path), "run.rounds": 12}
    stopped = simulate(
        keys | {"run.checkpoint_every": 2, "run.name": "resumed"},
        data=small_source(),
        callbacks=[lambda report: report.round == 5],
    )
    assert stopped.summary["status"] == "interrupted"
    resumed = run(tmp_path, **begun)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    pd.testing.assert_frame_equal(table(resumed), table(whole))
    pd.testing.assert_frame_equal(resumed.clients, whole.clients)


def test_another_file_of_devices_is_another_run(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("client,down_mbps\n" + "".join(f"{client},1\n" for client in range(9)))
    keys = {**{key.replace(".", "__"): default for key, default in DEFAULTS.items()}, "system__devices": str(path)}
    run(tmp_path, **keys)
    path.write_text(path.read_text().replace("3,1", "3,2"))
    with pytest.raises(Exception, match=r"system\.devices"):
        run(tmp_path, **keys, run__resume=True)


def test_time_to_a_target_is_that_of_the_clock(tmp_path):
    timed = run(tmp_path, run__targets=[0.5])
    reached = timed.summary["targets"]["0.5"]
    row = timed.metrics[timed.metrics["round"] == reached["round"]].iloc[0]
    assert reached["virtual_seconds"] == row.virtual_seconds
    assert np.isfinite(reached["joules"])
