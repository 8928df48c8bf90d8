"""Many runs by one call: the product of settings, the bits of single runs, going on, failures, and one comparison."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedray import UserError, compare, simulate, simulate_many
from fedray.cli.main import main
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tuning.many import product
from fedray.tuning.planned_view import RunsView

KEYS = dict(SETTINGS)
OVER = {"algorithm.name": ["fedavg", "fedprox"], "train.lr": [0.05, 0.1]}


def many(folder: Path, **changes: Any) -> Any:
    call = {"seeds": 1, "over": OVER, "data": small_source(), "view": RunsView(tell=LINES.append), "most": 2} | changes
    return simulate_many({**KEYS, "run.output": str(folder), "run.name": "all"}, **call)


LINES: list[str] = []


def test_the_product_of_settings():
    place, planned, runs = product({"data.clients": 5, "run.seed": 7}, 2, OVER, ["run.output=there"])
    assert place == "there/runs"
    assert list(runs)[:3] == ["fedavg-lr_0.05-seed_7", "fedavg-lr_0.05-seed_8", "fedavg-lr_0.1-seed_7"]
    assert len(runs) == len(planned) == 8
    assert runs["fedprox-lr_0.1-seed_8"] == {"algorithm.name": "fedprox", "train.lr": 0.1, "run.seed": 8}
    last = planned[-1].settings
    assert (last["data.clients"], last["algorithm.name"], last["run.seed"]) == (5, "fedprox", 8)
    assert list(product(None, [3, 11], {}, [])[2]) == ["seed_3", "seed_11"]


def test_settings_of_an_algorithm_alone_are_applied(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("for_algorithm: {fedprox: {train.lr: 0.7, algorithm.mu: 0.3}}\nrun: {rounds: 2}\n")
    place, planned, _ = product(config, 1, {"algorithm.name": ["fedavg", "fedprox"]}, [])
    assert place == "runs/mine"
    assert [run.settings.get("train.lr") for run in planned] == [None, 0.7]
    assert "algorithm.mu" not in planned[0].settings


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"over": {"train.lr": []}}, "train.lr needs a list of values"),
        ({"over": {"train.lr": "0.1"}}, "train.lr needs a list of values"),
        ({"over": {"train.lrr": [1]}}, r"lrr_1-seed_0: .*unknown key.*train.lr"),
        ({"over": {"run.seed": [1]}}, "run.seed differs by itself: seeds says how many"),
        ({"over": {"train.lr": [0.1, 0.1]}}, "have the same name"),
        ({"over": {"train.lr": [0.1, -1]}}, "lr_-1-seed_0: train.lr"),
        ({"over": {"train.lr": [0.1]}, "overrides": ["train.lr=0.2"]}, "train.lr is set to one value as well"),
        ({"over": {"algorithm.nam": ["fedavg"]}}, r"unknown key algorithm.nam \(did you mean 'algorithm.name'\?\)$"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"over": {"train.lr": [0.001 * k for k in range(1, 200)]}, "seeds": 100}, "19,900 runs"),
        ({"over": {"algorithm.mu": [0.1], "algorithm.name": ["fedavg"]}}, "mu_0.1-fedavg-seed_0: .*algorithm.mu"),
        ({"seeds": []}, "seeds: give at least one"),
        ({"over": {"train.lr": [object()]}}, "has a value of the type object"),
    ],
)
def test_a_product_that_is_not_possible(call, message):
    with pytest.raises(UserError, match=message):
        simulate_many({"data.clients": 5}, **call)


def test_many_runs_are_single_runs_and_go_on(ray_cluster, tmp_path):
    LINES.clear()
    done = many(tmp_path)
    assert (done.failures, done.interrupted, len(done.runs)) == ({}, False, 4)
    assert sum("completed" in line for line in LINES) == 4
    name = "fedprox-lr_0.05-seed_0"
    single = simulate(
        {**KEYS, "run.output": str(tmp_path), "run.name": "single", "algorithm.name": "fedprox"},
        data=small_source(),
        overrides=["train.lr=0.05"],
    )
    table = done.compare().table
    assert sorted(table["runs"]) == [1, 1, 1, 1]
    made = {run.folder.name: run.summary["model_sha256"] for run in compare(tmp_path / "all").runs}
    assert made[name] == single.summary["model_sha256"]
    assert len(set(made.values())) == 4
    # what has ended is not made again, and what is missing is made
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "all").glob("*/summary.json")}
    again = many(tmp_path, over=OVER | {"train.lr": [0.05, 0.1, 0.2]})
    assert len(again.runs) == 6
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    # the folder of a run with other settings is no result of these
    other = many(tmp_path, overrides=["train.batch_size=7"])
    assert len(other.failures) == 4
    assert all("holds another run (train.batch_size differs)" in why for why in other.failures.values())


def test_runs_that_callbacks_end_keep_their_checkpoints(ray_cluster, tmp_path):
    LINES.clear()
    done = many(tmp_path, over={}, seeds=1, callbacks=[lambda report: report.round == 1])
    assert any("seed_0: ended by a callback" in line for line in LINES)
    with pytest.raises(UserError, match="no run"):
        done.compare()
    assert many(tmp_path, over={}, seeds=1).failures == {}
    assert len(done.compare().runs) == 1


def test_runs_that_fail_are_named_and_the_others_go_on(ray_cluster, tmp_path):
    LINES.clear()
    done = many(tmp_path, over={"algorithm.name": ["fedavg"], "train.cohort_size": [2, 500]}, seeds=1)
    assert list(done.failures) == ["fedavg-cohort_size_500-seed_0"]
    assert len(done.compare().runs) == 1
    assert any("failed: " in line for line in LINES)


@pytest.mark.slow
def test_runs_on_other_data_are_made_in_one_start(ray_cluster, tmp_path):
    place = tmp_path / "sources.py"
    place.write_text(
        "from fedray.testing.contracts import small_source\n\n\n"
        "def one():\n    return small_source()\n\n\ndef other():\n    return small_source()\n"
    )
    sources = [f"{place}:one", f"{place}:other"]
    done = many(tmp_path, over={"data.source": sources}, seeds=1, data=None)
    assert done.failures == {}
    assert len(done.compare().environments) == 2


def test_the_command(ray_cluster, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["run", "data.clients=10", "run.rounds=2", "model.name=logistic"]
    assert (
        main(
            [*words, "--seeds", "2", "--most", "2", "--over", "algorithm.name=fedavg,fedprox", "--over", "train.lr=0.1"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "4/4 " in out
    assert "fedprox" in out
    assert (tmp_path / "runs/runs/comparison/report.html").exists()
    for wrong, message in (
        (["--over", "train.lr="], "--over train.lr=: give a key and its values"),
        (["--over", "train.lr=1", "--most", "0"], "most must be at least 1"),
        (["--seeds", "2", "run.resume=false"], "run.resume=false: give another run.name"),
        (["--over", "train.lr=1", "--over", "train.lr=2"], "--over train.lr is given twice"),
        (["--seeds", "2", "--print-config"], "--print-config is for one run"),
        (["--most", "2"], "--most is for several runs"),
    ):
        assert main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_the_table_of_progress():
    out = io.StringIO()
    view = RunsView(console=Console(file=out, force_terminal=True, width=100, highlight=False))
    view.began(["a", "b", "c"])
    view.round("a", {"round": 3, "train_loss": 0.5, "test_accuracy": 0.25})
    view.ended("b", "diverged", {"round": 2, "train_loss": float("nan")})
    view.stop()
    last = out.getvalue().splitlines()
    text = "\n".join(last[-6:])
    assert "running" in text
    assert "accuracy 0.2500" in text
    assert "diverged" in text
    assert "waits" in text
    assert "1 of 3 have ended" in text
