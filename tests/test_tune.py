"""Sweeps on Ray: trials side by side, on whatever fits, to the bits of a run alone; nothing hangs, nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import pytest
import yaml
from optuna.trial import TrialState

import fedray
from fedray.algorithms import Algorithm, Carry, Result, Upload, parameter
from fedray.config import flat, load, read_file
from fedray.engine.stored import store, store_source
from fedray.errors import UserError
from fedray.experiment import Own
from fedray.resolve import resolve
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tracking.folder import read_metrics
from fedray.tuning import tune
from fedray.tuning.driver import load_own, run_sweeps, start_ray
from fedray.tuning.report import state_of, write_report
from fedray.tuning.spec import known_spaces, read_sweeps
from fedray.tuning.storage import read_study, study_of
from fedray.tuning.suite import read_suite, run_suite
from fedray.tuning.suite_table import suite_table, write_suite
from fedray.tuning.view import View

SPACE = {"algorithm.mu": {"loguniform": [0.001, 1]}, "train.lr": {"uniform": [0.01, 0.5]}}


def described(space=SPACE, **base: Any) -> dict[str, Any]:
    settings = {key: value for key, value in SETTINGS.items() if key not in ("engine.kind", "data.public_samples")}
    settings |= {"algorithm.name": "fedprox", "run.rounds": 5}
    return {"base": settings | {key.replace("__", "."): v for key, v in base.items()}, "spaces": {"wide": space}}


def go(folder: Path, *overrides: str, sweep=None, **options: Any):
    """A sweep in ``folder``/s on the small source."""
    everything = [f"tune.output={folder}", "tune.name=s", *overrides]
    (result,) = tune(sweep or described(), everything, data=small_source(), **options)
    return result


def trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    return read_study(folder / "study.journal", "sweep").get_trials(deepcopy=False)


def states(folder: Path) -> list[str]:
    return [state_of(trial) for trial in trials(folder)]


@pytest.fixture(scope="module")
def finished(ray_cluster, tmp_path_factory):
    """A sweep that ran to its end, on 4 processors."""
    return go(tmp_path_factory.mktemp("tune"), "tune.trials=7", "run.targets=[0.5, 0.99]")


# ---------------------------------------------------------------- a sweep from start to end


def test_sampled_values_reach_the_trials(finished):
    """The resolved config of each is on disk, and no two are the same."""
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


def test_one_trial_of_every_space_file(ray_cluster, tmp_path):
    """On other data and a smaller model, all at one go."""
    small = {
        "data.clients": 6, "data.partition.kind": "iid", "data.samples_per_client": None, "model.name": "mlp",
        "model.hidden": [8], "train.local_steps": 2, "train.local_epochs": None, "run.iterations": 4,
        "run.rounds": None, "train.cohort_size": 3, "data.augment": "none", "data.source": "sample",
        "data.partition.overlap": False, "data.partition.capped": False,
    }  # fmt: skip
    specs = []
    for name in known_spaces():
        for spec in read_sweeps(name, [f"tune.output={tmp_path}", "tune.trials=2"]):
            base = {key: value for key, value in spec.base.items() if not key.startswith(("data.", "model.name"))}
            space = {key: text for key, text in spec.raw_space.items() if key != "train.local_steps"}
            specs.append(
                read_sweeps(
                    {"base": {**base, **small}, "spaces": {"wide": space}, "first": spec.first},
                    [f"tune.output={tmp_path}", f"tune.name={spec.name}", "tune.trials=2"],
                )[0]
            )
    view = View(quiet=True)
    with start_ray(specs, view) as start:
        run_sweeps(specs, load_own(specs[0], data=small_source()), start, view)
    for spec in specs:
        assert [state_of(trial) for trial in study_of(spec).trials] == ["complete"] * 2, spec.name
        values = [trial.params for trial in study_of(spec).trials]
        assert values[0] != values[1]


def test_one_trial_at_a_time_makes_a_sweep_that_can_be_repeated(ray_cluster, tmp_path):
    """Which values are drawn, what is pruned and when, and every model."""
    options = ("tune.max_concurrent_trials=1", "tune.trials=6", "tune.pruner.kind=asha")
    one, other = (go(tmp_path / name, *options).folder for name in ("one", "other"))
    for a, b in zip(trials(one), trials(other), strict=True):
        assert (a.state, a.params, a.intermediate_values) == (b.state, b.params, b.intermediate_values)
        same_model(one, other, a.number)
    assert TrialState.PRUNED in {trial.state for trial in trials(one)}


# ---------------------------------------------------------------- trials that go wrong


class Touchy(Algorithm):
    """Local SGD that can't bear a large mu, and diverges with a negative one."""

    class Hyper(Algorithm.Hyper):
        mu: float = parameter(0.1, "mood")

    def begin(self, client):
        return Carry({"y": client.start("x")})

    def step(self, client, carry, batch):
        if self.hyper.mu > 0.5 and not os.environ.get("CALM"):
            raise ValueError("that is too much")
        scale = 1e30 if self.hyper.mu < 0 else 1.0
        return client.optimizer.descend(carry, "y", scale * client.objective.gradient(carry["y"], batch))

    def end(self, client, carry):
        return Result(uploads={"y": Upload.weighted_mean(carry["y"])})

    def server_update(self, server, phase, sums, scalars):
        server["x"] = sums["y"]


def touchy(**more):
    grid = {"algorithm.mu": {"grid": [0.1, 0.9, -1.0, 0.2]}}
    return described(grid, algorithm__name="test_tune:Touchy", **more)


def test_a_failed_trial_is_recorded_and_the_others_go_on(ray_cluster, tmp_path):
    result = go(tmp_path, sweep=touchy())
    assert states(result.folder) == ["complete", "failed", "diverged", "complete"]
    error = (result.folder / "trials/0001/error.txt").read_text()
    assert "that is too much" in error
    assert re.search(r"client \d+", error)
    table = result.trials
    assert table.loc[1, "error"] in error
    assert table["state"].tolist() == states(result.folder)
    # nothing left to do, but for those that failed
    assert len(trials(go(tmp_path, sweep=touchy()).folder)) == 4
    again = go(tmp_path, sweep=touchy(), retry_failed=True)
    assert states(again.folder) == ["complete", "failed", "diverged", "complete", "failed"]
    assert trials(again.folder)[4].params == trials(again.folder)[1].params


def test_a_trial_whose_process_is_killed_goes_on(ray_cluster, tmp_path):
    """From its last checkpoint, in another process, to the same bits; the others notice nothing."""
    slow = described(train__local_epochs=8, run__rounds=30, run__checkpoint_every=1)
    whole = go(tmp_path / "whole", "tune.trials=3", "tune.max_concurrent_trials=2", sweep=slow)
    killed: list[int] = []

    class Killing(View):
        def progress(self) -> None:
            for sweep in self.sweeps:
                trial = sweep.running.get(1)
                if trial is not None and trial.step >= 8 and not killed:
                    log = (sweep.folder / "trials/0001/seed-0/log.txt").read_text()
                    killed.append(int(re.findall(r"server: pid (\d+)", log)[-1]))
                    os.kill(killed[0], signal.SIGKILL)

    broken = go(
        tmp_path / "broken", "tune.trials=3", "tune.max_concurrent_trials=2", sweep=slow, view=Killing(quiet=True)
    )
    assert killed
    assert states(broken.folder) == ["complete"] * 3
    log = (broken.folder / "trials/0001/seed-0/log.txt").read_text()
    assert "resuming" in log
    pids = {int(pid) for pid in re.findall(r"server: pid (\d+)", log)}
    assert killed[0] in pids
    assert len(pids) == 2
    for number in range(3):
        # which values the third one gets depends on who ended first
        if trials(whole.folder)[number].params == trials(broken.folder)[number].params:
            same_model(whole.folder, broken.folder, number)
    same_model(whole.folder, broken.folder, 1)


def same_model(one: Path, other: Path, number: int) -> None:
    summaries = [
        json.loads((folder / f"trials/{number:04d}/seed-0/summary.json").read_text()) for folder in (one, other)
    ]
    assert summaries[0]["model_sha256"] == summaries[1]["model_sha256"]


def test_a_process_that_dies_between_two_trials(ray_cluster, tmp_path):
    """The trial for which it was kept is started in another."""

    class Killing(View):
        killed = 0

        def ended(self, sweep, number, trial, how) -> None:
            log = (sweep.folder / f"trials/{number:04d}/seed-0/log.txt").read_text()
            if number < 2:
                os.kill(int(re.findall(r"server: pid (\d+)", log)[-1]), signal.SIGKILL)
                self.killed += 1

    view = Killing(quiet=True)
    result = go(tmp_path, "tune.trials=5", "tune.max_concurrent_trials=1", view=view)
    assert view.killed == 2
    assert states(result.folder) == ["complete"] * 5


@pytest.mark.slow
def test_a_trial_whose_process_always_dies_fails_alone(ray_cluster, tmp_path):
    space = described({"algorithm.mu": {"grid": [0.1, 0.7]}}, algorithm__name="test_tune:Deadly")
    result = go(tmp_path, "tune.max_concurrent_trials=1", sweep=space)
    assert states(result.folder) == ["complete", "failed"]
    error = (result.folder / "trials/0001/error.txt").read_text()
    assert re.fullmatch(r"its process died: .* \(4 times\)", error.splitlines()[-1])


class Deadly(Touchy):
    """Kills the process that it is in."""

    def step(self, client, carry, batch):
        if self.hyper.mu > 0.5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(client, carry, batch)


# ---------------------------------------------------------------- trials of several processes


def test_trials_with_client_actors_of_their_own_side_by_side(ray_cluster, tmp_path):
    """Two at once, of two client actors each, on 4 processors; the bits are those of the local engine."""
    nested = ("engine.kind=ray", "engine.actors=2", "tune.trials=4", "tune.max_concurrent_trials=2")
    result = go(tmp_path / "nested", *nested)
    assert states(result.folder) == ["complete"] * 4
    local = go(tmp_path / "local", "tune.trials=4", "tune.max_concurrent_trials=2")
    same = 0
    for number in range(4):
        if trials(result.folder)[number].params == trials(local.folder)[number].params:
            same_model(result.folder, local.folder, number)
            same += 1
    assert same >= 2
    log = (result.folder / "trials/0000/seed-0/log.txt").read_text()
    assert len(re.findall(r"client actor: pid", log)) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_trials_at_once_with_client_actors_twenty_times(ray_cluster, tmp_path):
    """On 4 processors, of which they take all: none ever waits for another's."""
    for turn in range(20):
        nested = ("engine.kind=ray", "engine.actors=1", "tune.trials=4", "tune.max_concurrent_trials=4", "run.rounds=2")
        assert states(go(tmp_path / str(turn), *nested).folder) == ["complete"] * 4


def test_a_client_actor_of_a_trial_is_killed(ray_cluster, tmp_path):
    """Another takes its place, within the trial's own resources: there are no others."""
    slow = described(train__local_epochs=8, run__rounds=20, run__checkpoint_every=1)
    nested = ("engine.kind=ray", "engine.actors=2", "tune.trials=2", "tune.max_concurrent_trials=2")
    killed: list[int] = []

    class Killing(View):
        def progress(self) -> None:
            for sweep in self.sweeps:
                for number, trial in sweep.running.items():
                    if trial.step >= 6 and number == 0 and not killed:
                        log = (sweep.folder / "trials/0000/seed-0/log.txt").read_text()
                        killed.append(int(re.findall(r"client actor: pid (\d+)", log)[-1]))
                        os.kill(killed[0], signal.SIGKILL)

    result = go(tmp_path / "nested", *nested, sweep=slow, view=Killing(quiet=True))
    assert killed
    assert states(result.folder) == ["complete"] * 2
    assert "a client actor died" in (result.folder / "trials/0000/seed-0/log.txt").read_text()
    alone = go(tmp_path / "alone", "tune.trials=2", "tune.max_concurrent_trials=2", sweep=slow)
    same_model(result.folder, alone.folder, 0)


# ---------------------------------------------------------------- resources


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("engine.gpus_per_actor=1",), "a trial takes 1 CPU and 1 GPU; the cluster has 4 CPU"),
        (("engine.cpus_per_actor=5",), "a trial takes 5 CPU; the cluster has 4 CPU"),
        (("engine.kind=ray", "engine.actors=9"), "a trial takes 9 client actors of 1 CPU; the cluster has 4 CPU"),
    ],
)
def test_what_the_cluster_does_not_have_ends_in_one_line(overrides, message, ray_cluster, tmp_path):
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        go(tmp_path, "engine.start_timeout=3", *overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("engine.actors_per_gpu=auto",), "give how many trials or client actors share a GPU"),
        (("engine.server_gpus=1",), "the servers have no GPU"),
        (("engine.kind=ray", "engine.actors=per_client"), "give a number of client actors"),
    ],
)
def test_what_a_sweep_can_not_arrange(overrides, message, ray_cluster, tmp_path):
    with pytest.raises(UserError, match=message):
        go(tmp_path, *overrides)


def test_fewer_at_once_than_asked_for_are_announced(ray_cluster, tmp_path):
    said: list[str] = []
    view = View(quiet=True)
    view.say = said.append  # type: ignore[method-assign]
    go(tmp_path, "tune.max_concurrent_trials=9", "tune.trials=5", "engine.cpus_per_actor=2", view=view)
    assert "2 trials at once, not 9: a trial takes 2 CPU; the cluster has 4 CPU (4 free), 0 GPU (0 free)" in said
    assert len(trials(tmp_path / "s")) == 5


def test_samples_are_put_into_the_store_once(ray_cluster):
    """What a trial's own engine stores of a source that came out of the store is the same object."""
    stored = store_source(small_source())
    source = stored.get()
    assert not source.x_train.flags.writeable
    _, data = resolve(load({**SETTINGS, "algorithm.name": "fedavg"}), Own(source))
    again = store(data)
    assert again.samples == stored.samples
    received = again.get()
    assert all((getattr(received, name) == getattr(data, name)).all() for name in ("x", "y", "x_test", "y_test"))
    _, fresh = resolve(load({**SETTINGS, "algorithm.name": "fedavg"}), Own(small_source()))
    assert store(fresh).samples != stored.samples


# ---------------------------------------------------------------- suites


def test_a_suite_from_start_to_table(ray_cluster, tmp_path, monkeypatch):
    """FedAvg and pFedMo, of 3 trials each, the winners on 2 fresh seeds, and what shares their labels or their runs; a
    second time nothing is run again."""
    monkeypatch.setattr("fedray.data.source.load_source", lambda *a: small_source())
    base = {key: value for key, value in SETTINGS.items() if key not in ("engine.kind", "data.public_samples")}
    base |= {"train.local_steps": 4, "run.rounds": 24, "run.targets": [0.3]}
    del base["train.local_epochs"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"base": {"algorithm.name": "fedavg"}, "spaces": {
        "wide": {"train.server_lr": {"uniform": [0.5, 1.5]}}}}))  # fmt: skip
    (tmp_path / "two.yaml").write_text(
        yaml.safe_dump({"base": base, "algorithms": ["mine.yaml", "pfedmo"], "seeds": 2, "tune": {"trials": 3}})
    )
    suite = read_suite(tmp_path / "two.yaml", [f"tune.output={tmp_path}"])
    assert run_suite(suite) == "completed"
    table = suite_table(suite)
    dealt, alone = "mine, the public samples dealt to its clients", "pfedmo, representation model alone"
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
    text = write_suite(suite)[1].read_text()
    assert text.count("\n") == 8
    assert ", ".join(f"{100 * value:.2f}" for value in first["accuracies"]) in text
    assert pd.read_csv(tmp_path / "two" / "suite.csv")["accuracies"].str.split().map(len).tolist() == [2] * 4
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert run_suite(suite) == "completed"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")} == times
    # a winner's run that was interrupted does not count yet
    (stopped,) = (tmp_path / suite.specs[0].name / "winners").glob("trial-????/seed-2/summary.json")
    stopped.write_text(stopped.read_text().replace('"completed"', '"interrupted"'))
    assert sorted(suite_table(suite)["seeds"]) == [1, 2, 2, 2]
