"""A sweep or a suite on Ray gives the bits of its runs alone, and a record and a report of every trial."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import yaml
from optuna.trial import TrialState
from pages import Page
from small_sweeps import SPACE
from sweeps_on_ray import go, same_model, trials

import fedray
from fedray.cli.main import main
from fedray.config import flat, read_file
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tracking.tables import read_metrics
from fedray.tuning.report import write_report
from fedray.tuning.spec import read_sweeps
from fedray.tuning.storage import study_of
from fedray.tuning.suite import read_suite, run_suite
from fedray.tuning.suite_table import suite_table, write_suite
from fedray.tuning.view import View


@pytest.fixture(scope="module")
def finished(ray_cluster, tmp_path_factory):
    """Runs a sweep to its end on 4 processors, and returns its result."""
    return go(tmp_path_factory.mktemp("tune"), "tune.trials=7", "run.targets=[0.5, 0.99]")


def test_sampled_values_reach_the_trials(finished):
    """The resolved config of each trial is on disk, and no two are the same."""
    values = [trial.params for trial in trials(finished.folder)]
    configs = [flat(read_file(path)) for path in sorted(finished.folder.glob("trials/*/seed-0/config.yaml"))]
    assert len(values) == len(configs) == 7
    for sampled, config in zip(values, configs, strict=True):
        assert {key: config[key] for key in sampled} == sampled
    assert len({(config["algorithm.mu"], config["train.lr"]) for config in configs}) == 7
    # the base first
    assert (configs[0]["algorithm.mu"], configs[0]["train.lr"]) == (0.01, 0.1)


def test_every_trial_is_told_once_with_what_its_run_reached(finished):
    for trial in trials(finished.folder):
        rows = read_metrics(finished.folder / "trials" / f"{trial.number:04d}" / "seed-0")
        assert trial.state == TrialState.COMPLETE
        assert trial.value == rows["validation_accuracy"].iloc[-1]
        assert trial.intermediate_values == {
            step: rows["validation_accuracy"].iloc[(step - 1) // 4] for step in range(1, 21)
        }
    best = max(trials(finished.folder), key=lambda trial: trial.value)
    assert flat(read_file(finished.best[0]))["train.lr"] == best.params["train.lr"]


def test_trials_leave_the_test_set_alone(finished):
    for path in finished.folder.glob("trials/*/seed-0"):
        rows = read_metrics(path)
        assert rows["test_accuracy"].isna().all()
        assert rows["test_loss"].isna().all()
        assert json.loads((path / "summary.json").read_text())["final_accuracy"] is None


def test_a_trial_alone_gives_the_identical_result(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((finished.folder / "trials/0003/seed-0/config.yaml").read_text())
    alone = fedray.simulate(config | {"run": config["run"] | {"output": "runs"}}, data=small_source())
    summary = json.loads((finished.folder / "trials/0003/seed-0/summary.json").read_text())
    assert alone.summary["model_sha256"] == summary["model_sha256"]


@pytest.mark.slow
def test_the_best_config_is_for_a_run_with_the_test_set(finished, tmp_path):
    run = fedray.simulate(read_file(finished.best[0]) | {"run.output": str(tmp_path)}, data=small_source())
    assert run.metrics["test_accuracy"].notna().all()
    assert run.metrics["validation_accuracy"].iloc[-1] == max(trial.value for trial in trials(finished.folder))


def test_a_finished_sweep_is_not_done_again(finished):
    before = (finished.folder / "study.journal").read_bytes()
    said: list[str] = []
    view = View(quiet=True)
    view.say = said.append  # type: ignore[method-assign]
    again = go(finished.folder.parent, "tune.trials=7", "run.targets=[0.5, 0.99]", view=view)
    assert again.best == finished.best
    assert any("is finished already: 7 trials" in line for line in said)
    after = (finished.folder / "study.journal").read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") <= before.count(b"\n") + 1


def test_the_report_has_a_row_per_trial_and_pictures(finished):
    (spec,) = read_sweeps(finished.folder)
    written = {path.name for path in write_report(spec)}
    assert {"trials.csv", "trials.md", "history.png", "curves.png", "slices.png"} <= written
    table = pd.read_csv(finished.folder / "report" / "trials.csv")
    assert table["trial"].tolist() == list(range(7))
    row = table.iloc[table["validation_accuracy"].argmax()]
    rows = read_metrics(finished.folder / f"trials/{row['trial']:04d}/seed-0")
    assert row["best"] == rows["validation_accuracy"].max()
    assert row["best_round"] == rows["round"][rows["validation_accuracy"].idxmax()]
    assert row["mean"] == pytest.approx(rows["validation_accuracy"].mean())
    assert row["bytes"] == rows["bytes_down"].iloc[-1] + rows["bytes_up"].iloc[-1]
    at = rows[rows["validation_accuracy"] >= 0.5].iloc[0]
    assert row["bytes_to_0.5"] == at["bytes_down"] + at["bytes_up"]
    assert table["bytes_to_0.99"].isna().all() or table["best"].max() >= 0.99
    ranked = [line.split("|")[3] for line in (finished.folder / "report/trials.md").read_text().splitlines()[2:]]
    assert ranked == sorted(ranked, key=float, reverse=True)
    for path in (finished.folder / "report").glob("*.png"):
        assert path.stat().st_size > 5000


def test_tensorboard_shows_what_was_searched(finished):
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.hparams import plugin_data_pb2

    events = EventMultiplexer().AddRunsFromDirectory(str(finished.folder))
    events.Reload()
    declared = [
        run for run in events.Runs() if "_hparams_/experiment" in events.PluginRunToTagToContent("hparams")[run]
    ]
    assert declared == ["."]
    content = events.SummaryMetadata(".", "_hparams_/experiment").plugin_data.content
    experiment = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    assert [info.name for info in experiment.hparam_infos] == list(SPACE)
    assert [info.name.tag for info in experiment.metric_infos] == ["accuracy/validation"]
    for trial in trials(finished.folder):
        run = f"trials/{trial.number:04d}/seed-0"
        content = events.SummaryMetadata(run, "_hparams_/session_start_info").plugin_data.content
        start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
        assert start.hparams["train.lr"].number_value == trial.params["train.lr"]


def test_one_trial_at_a_time_makes_a_sweep_that_can_be_repeated(ray_cluster, tmp_path):
    """Both times the same values are drawn, the same trials pruned in the same rounds, and the same models made."""
    options = ("tune.max_concurrent_trials=1", "tune.trials=5", "tune.pruner.kind=asha")
    one, other = (go(tmp_path / name, *options).folder for name in ("one", "other"))
    for a, b in zip(trials(one), trials(other), strict=True):
        assert (a.state, a.params, a.intermediate_values) == (b.state, b.params, b.intermediate_values)
        same_model(one, other, a.number)
    assert TrialState.PRUNED in {trial.state for trial in trials(one)}


def test_a_suite_from_start_to_table(ray_cluster, tmp_path, monkeypatch):
    """FedAvg and pFedMo, of 3 trials each, the winners on 2 fresh seeds, and what shares their labels or their runs; a
    second time nothing is run again."""
    monkeypatch.setattr("fedray.data.sources.source.load_source", lambda *a: small_source())
    unset = ("engine.kind", "data.public_samples", "train.local_epochs")
    base = {key: value for key, value in SETTINGS.items() if key not in unset}
    base |= {"train.local_steps": 4, "run.rounds": 12, "run.targets": [0.3]}
    wide = {"wide": {"train.server_lr": {"uniform": [0.5, 1.5]}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"base": {"algorithm.name": "fedavg"}, "spaces": wide}))
    (tmp_path / "two.yaml").write_text(
        yaml.safe_dump({"base": base, "algorithms": ["mine.yaml", "pfedmo"], "seeds": 2, "tune": {"trials": 3}})
    )
    suite = read_suite(tmp_path / "two.yaml", [f"tune.output={tmp_path}"])
    assert run_suite(suite) == "completed"
    table = suite_table(suite)
    dealt, alone = "mine, the public samples divided among its clients", "pfedmo, representation model alone"
    assert sorted(table["algorithm"]) == ["mine", dealt, "pfedmo", alone]
    assert table["trials"].tolist() == [3, 3, 3, 3]
    by_name = table.set_index("algorithm")
    assert by_name["public_samples"].to_dict() == {"mine": 0, dealt: 36, "pfedmo": 36, alone: 36}
    assert set(table["weighting"]) == {"samples"}
    assert table["parameters"].nunique() == 1
    assert by_name["validation"].notna().to_dict() == {"mine": True, dealt: False, "pfedmo": True, alone: False}
    for name, label, column in ((f"{suite.specs[0].name}/winners/*-public-dealt", dealt, "test_accuracy"),
                                (f"{suite.specs[1].name}/winners/*", alone, "representation_accuracy")):  # fmt: skip
        runs = sorted(tmp_path.glob(f"{name}/seed-*"))
        assert by_name["accuracies"][label] == tuple(read_metrics(run)[column].iloc[-1] for run in runs)
    # the dealt runs are those of the winner but for who has the public samples
    one, other = (flat(read_file(path)) for path in sorted(tmp_path.glob("*/mine/winners/*/seed-1/config.yaml")))
    assert {key for key in one if one[key] != other[key]} == {"run.output", "data.public_to"}
    for spec in suite.specs:
        row = table[table["algorithm"] == spec.name.rpartition("/")[2]].iloc[0]
        runs = sorted((tmp_path / spec.name / "winners").glob("trial-????/seed-*"))
        # the trials had seed 0
        assert [path.name for path in runs] == ["seed-1", "seed-2"]
        finals = [read_metrics(path)["test_accuracy"].iloc[-1] for path in runs]
        assert row["accuracy"] == pytest.approx(sum(finals) / 2)
        assert row["accuracies"] == tuple(finals)
        configs = [flat(read_file(path / "config.yaml")) for path in runs]
        best = study_of(spec).best_trial
        assert all({key: config[key] for key in best.params if key != "train.local_steps"}.items()
                   <= best.params.items() for config in configs)  # fmt: skip
        assert {config["data.public_samples"] for config in configs} == {36}
    first, other = (table[table["algorithm"] == name].iloc[0] for name in ("mine", "pfedmo"))
    differences = [b - a for a, b in zip(first["accuracies"], other["accuracies"], strict=True)]
    assert other["differences"] == tuple(differences)
    assert (text := write_suite(suite)[1].read_text()).count("\n") == 8
    assert main(["report", str(tmp_path / "two")]) == 0
    page = Page((tmp_path / "two" / "report.html").read_text())
    page.check()
    assert all(words in page.text for words in ("Suite two", "The winners on fresh seeds", "two/mine", "two/pfedmo"))
    assert ", ".join(f"{100 * value:.2f}" for value in first["accuracies"]) in text
    assert pd.read_csv(tmp_path / "two" / "suite.csv")["accuracies"].str.split().map(len).tolist() == [2] * 4
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert run_suite(suite) == "completed"
    assert times == {path: path.stat().st_mtime_ns for path in times}
    # a winner's run that was interrupted does not count yet
    (stopped,) = (tmp_path / suite.specs[0].name / "winners").glob("trial-????/seed-2/summary.json")
    stopped.write_text(stopped.read_text().replace('"completed"', '"interrupted"'))
    assert sorted(suite_table(suite)["seeds"]) == [1, 2, 2, 2]
