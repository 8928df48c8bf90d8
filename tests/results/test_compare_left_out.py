"""fedray compare: folders that can't be compared are named and left out; what a user gets wrong is one line."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from compared_runs import write_metrics

import fedray
from fedray.cli.main import main
from fedray.errors import UserError


def test_of_several_versions_that_of_most_runs_is_compared(runs):
    path = runs / "fedavg-5.0-0/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"versions": {"fedray": "99.0.0"}}))
    found = fedray.compare(runs)
    assert [each.folder.name for each in found.left_out] == ["fedavg-5.0-0"]
    assert found.table["runs"].sum() == 11


def test_folders_that_cannot_be_compared_are_named_and_left_out(runs):
    def summary(name: str, **keys) -> None:
        path = runs / name / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    (runs / "fedavg-0.1-0/summary.json").unlink()
    summary("fedavg-0.1-1", status="interrupted", rounds=3)
    (runs / "fedavg-5.0-0/metrics.csv").write_text("round,test_accuracy\n1,0.5\n")
    (runs / "fedavg-5.0-1/summary.json").write_text("{")
    (runs / "fedprox-0.1-0/config.yaml").write_text("run: [")
    summary("fedprox-0.1-1", versions={"fedray": "0.0.9"})
    (runs / "fedprox-5.0-0").rename(runs / "fedprox-5.0-0.bak-1")
    metrics = pd.read_csv(runs / "fedprox-5.0-1/metrics.csv")
    write_metrics(runs / "fedprox-5.0-1", metrics.assign(test_accuracy=np.nan))
    found = fedray.compare(runs)
    reasons = {each.folder.name: each.reason for each in found.left_out}
    wanted = {
        "fedavg-0.1-0": "has not ended",
        "fedavg-0.1-1": "interrupted after 3 of 6 rounds",
        "fedavg-5.0-0": "metrics.csv is damaged",
        "fedavg-5.0-1": "is damaged",
        "fedprox-0.1-0": "not valid YAML",
        "fedprox-0.1-1": "another version of fedray, 0.0.9",
        "fedprox-5.0-0.bak-1": "set aside",
        "fedprox-5.0-1": "no test_accuracy",
    }
    assert reasons.keys() == wanted.keys()
    assert all(wanted[name] in reasons[name] for name in wanted)
    assert found.table["runs"].sum() == 4
    assert "fedprox-0.1-1" not in {each.folder.name for each in fedray.compare(runs, any_version=True).left_out}


def test_a_sweep_that_was_set_aside_is_left_out_with_all_its_runs(runs):
    shutil.copytree(runs / "fedavg-0.1-0", runs / "sweep.bak-1" / "winners" / "fedavg" / "seed-7")
    found = fedray.compare(runs)
    assert {each.folder.name: each.reason for each in found.left_out} == {
        "sweep.bak-1": "it was set aside by run.resume=false or tune.resume=false"
    }
    assert found.table["runs"].sum() == 12
    assert len(fedray.compare(runs / "sweep.bak-1").table) == 1


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("metrics.csv", lambda lines: lines[:4], "it does not have each of the 6 rounds once"),
        ("metrics.csv", lambda lines: lines[:3] + lines[4:], "it does not have each of the 6 rounds once"),
        ("metrics.csv", lambda lines: lines + lines[-1:], "it does not have each of the 6 rounds once"),
        ("metrics.csv", lambda lines: [], "Empty CSV file"),
        # several columns, of which any may be named
        ("metrics.csv", lambda lines: [*lines[:-1], lines[-1].replace("0.", "x.")], "In CSV column #"),
        ("summary.json", lambda lines: [], "Expecting value: line 1 column 1"),
        ("summary.json", lambda lines: ["[]"], "it does not hold status"),
        ("config.yaml", lambda lines: [], "it lacks run, algorithm, data, model, train, engine"),
        ("config.yaml", lambda lines: lines[:12], "it lacks algorithm, data, model, train, engine"),
        ("config.yaml", lambda lines: lines[:-3], "it lacks its end"),
        ("inputs.json", lambda lines: ["{"], "Expecting property name"),
    ],
)
def test_a_damaged_file_is_named(runs, capsys, name, damage, reason):
    path = runs / "fedavg-0.1-0" / name
    path.write_text("".join(damage(path.read_text().splitlines(keepends=True))))
    (left_out,) = fedray.compare(runs).left_out
    assert left_out.folder == path.parent
    assert f"{name} is damaged: {reason}" in left_out.reason
    assert main(["report", str(path.parent)]) == 2
    assert f"{name} is damaged: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (("metrics.csv", "summary.json"), "can't read the config file"),
        (("config.yaml", "inputs.json"), "the run has not ended"),
        (("config.yaml", "summary.json"), "can't read metrics.csv: No such file"),
    ],
)
def test_a_run_of_which_files_are_gone_is_named(runs, kept, reason):
    folder = runs / "fedavg-0.1-0"
    for name in {"config.yaml", "inputs.json", "metrics.csv", "summary.json"}.difference(kept):
        (folder / name).unlink()
    (left_out,) = fedray.compare(runs).left_out
    assert left_out.folder == folder
    assert left_out.reason.startswith(reason)


@pytest.mark.parametrize("rounds", [[], "many", None])
def test_a_value_of_another_type_is_damage(runs, rounds):
    path = runs / "fedavg-0.1-0/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rounds": rounds}))
    (left_out,) = fedray.compare(runs).left_out
    assert left_out.reason == "summary.json is damaged: it does not hold status and rounds"


def test_an_evaluation_that_is_gone_is_missed(runs):
    path = runs / "fedavg-0.1-0/metrics.csv"
    rows = pd.read_csv(path)
    rows.loc[5, "test_accuracy"] = np.nan
    rows.to_csv(path, index=False)
    (left_out,) = fedray.compare(runs).left_out
    assert left_out.reason == "metrics.csv is damaged: it is not what the run recorded"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is not there: give folders of runs"),
        (["empty"], "there is no run folder in empty"),
        (["runs", "--by", "algorithm.nam"], "--by algorithm.nam: there is no such key .did you mean 'algorithm.name'"),
        (["runs", "--by", "lr"], r"--by lr: there is no such key .did you mean 'train.lr'..; these runs differ in alg"),
        (["runs", "--by", "xyzzy"], "--by xyzzy: there is no such key; these runs differ in algorithm.name, "),
        (["runs", "--by", "train.lr"], "--by train.lr: all runs have the same; these runs differ in algorithm.name, "),
        (["runs", "--x", "round"], "--x: there is no 'round' .did you mean 'rounds'"),
        (["runs", "--x", "virtual_seconds"], "--x virtual_seconds: no run has it"),
        (["runs", "--baseline", "fedavgg"], "--baseline: there is no group 'fedavgg' .did you mean 'fedavg'"),
        (["runs", "--target", "much"], "argument --target: invalid float value: 'much'"),
        (["runs", "--target", "80"], "--target must be between 0 and 1, as in 0.8 for 80 %, not 80"),
        (["runs", "--target", "nan"], "--target must be between 0 and 1, as in 0.8 for 80 %, not nan"),
        (["runs", "--by", "run.seed"], "--by run.seed: it is no part of a result"),
        (["runs", "--last", "0"], "--last must be at least 1, not 0"),
        ([], "give folders of runs, as in: fedray compare runs/"),
    ],
)
def test_mistakes(words, message, compared, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(compared)
    (tmp_path / "empty").mkdir()
    assert main(["compare", *words]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert re.search(message, err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "runs"]


def test_a_run_made_twice_counts_once(runs):
    """Three copies of one run were a mean with the interval 0."""
    for name in ("copy", "another"):
        shutil.copytree(runs / "fedavg-5.0-0", runs / name)
    (runs / "deep").mkdir()
    (runs / "deep/link").symlink_to(runs / "fedavg-5.0-1")
    other = runs / "another/config.yaml"
    other.write_text(other.read_text().replace("channels_last: false", "channels_last: true"))
    found = fedray.compare(runs)
    assert found.table["runs"].tolist() == [3, 3, 3, 3]
    assert all("it is the same run as" in each.reason for each in found.left_out)
    assert any(each.reason.endswith("with the same seeds, but for engine.channels_last") for each in found.left_out)


def test_a_linked_run_below_a_folder_is_found(runs, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links/a").symlink_to(runs / "fedavg-5.0-0")
    (tmp_path / "links/back").symlink_to(tmp_path / "links")
    assert fedray.compare(tmp_path / "links").table["runs"].tolist() == [1]


def test_other_main_metrics_are_refused(runs):
    path = runs / "fedavg-5.0-0/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metric": "mean_squared_error", "mode": "min"}))
    rows = pd.read_csv(runs / "fedavg-5.0-0/metrics.csv")
    write_metrics(runs / "fedavg-5.0-0", rows.assign(test_mean_squared_error=rows["test_accuracy"]))
    with pytest.raises(UserError, match="main metrics differ"):
        fedray.compare(runs)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("evaluation.parquet", lambda path: max(path.glob("part-*")).write_bytes(b"PAR1")),
        ("metrics.csv", lambda path: path.write_text(path.read_text().replace("cohort_size", "other", 1))),
        (
            "summary.json",
            lambda path: path.write_text(path.read_text().replace('"versions": {', '"versions": 3, "x": {')),
        ),
    ],
)
def test_what_is_damaged_leaves_out_the_run_alone(runs, name, damage):
    damage(runs / "fedavg-0.1-0" / name)
    (left_out,) = fedray.compare(runs).left_out
    assert f"{name} is damaged" in left_out.reason


@pytest.mark.parametrize("name", ["clients.parquet/part-*", "partition.parquet"])
def test_a_page_of_a_damaged_run_is_refused(runs, name, capsys):
    next((runs / "fedavg-0.1-0").glob(name)).write_bytes(b"PAR1")
    assert main(["report", str(runs / "fedavg-0.1-0")]) == 2
    assert f"{name.partition('/')[0]} is damaged" in capsys.readouterr().err
