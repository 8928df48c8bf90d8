"""The tools of others show a run: its settings, rounds and end, once, through stops and restarts; offline."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import run
from sweeps_on_ray import go

from fedray import UserError, simulate, simulate_many
from fedray.config import load
from fedray.experiment.custom import CustomObjects
from fedray.loggers import prepare
from fedray.loggers.trackio import Trackio
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tuning.trial import Assignment, Line, run_trial

ROUNDS = 4


def logged(folder: Path, *loggers: Any, **changes: Any) -> Any:
    return run(folder, "fedprox", run__loggers=list(loggers), run__rounds=ROUNDS, **changes)


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """The tools keep what they are shown below a folder, and ask nobody. trackio reads its folder when it is
    imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield


@pytest.fixture
def places(tmp_path):
    """Where MLflow keeps the runs of a test."""
    return f"sqlite:///{tmp_path}/mlflow.db"


def mlflow_runs(uri: str, experiment: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def test_no_logger_changes_a_bit(tmp_path, places):
    plain = run(tmp_path / "plain", "fedprox", run__rounds=ROUNDS)
    assert_same(plain, logged(tmp_path / "logged", {"mlflow": places}, "wandb", "trackio"))


def test_a_finished_run_is_sent_nowhere(tmp_path, places, capsys):
    keys = {**SETTINGS, "run.rounds": 1, "run.output": str(tmp_path)}
    simulate(keys, data=small_source(), verbose=True)
    simulate(keys | {"run.loggers": [{"mlflow": places}]}, data=small_source(), verbose=True)
    assert "is finished already; nothing more is sent to run.loggers" in capsys.readouterr().out


def test_mlflow_shows_a_run_once_through_a_stop(tmp_path, places):
    from mlflow import MlflowClient

    entry = {"name": "mlflow", "uri": places}
    run(tmp_path, "fedprox", run__rounds=ROUNDS, run__loggers=[entry], call={"callbacks": [lambda r: r.round == 2]})
    (shown,) = mlflow_runs(places, "fedray")
    assert shown.info.status == "KILLED"
    result = logged(tmp_path, entry)
    (shown,) = mlflow_runs(places, "fedray")
    assert (shown.info.status, shown.info.run_name) == ("FINISHED", result.folder.name)
    assert shown.data.params["algorithm.name"] == "fedprox"
    assert shown.data.params["train.lr"] == str(SETTINGS["train.lr"])
    assert shown.data.tags["fedray.model_sha256"] == result.summary["model_sha256"]
    history = MlflowClient(places).get_metric_history(shown.info.run_id, "train_loss")
    assert [(point.step, point.value) for point in sorted(history, key=lambda point: point.step)] == list(
        result.metrics[["round", "train_loss"]].itertuples(index=False, name=None)
    )


def test_trackio_has_the_rounds(tmp_path):
    result = logged(tmp_path, {"name": "trackio", "project": "mine"})
    from trackio.sqlite_storage import SQLiteStorage

    name = json.loads((result.folder / "loggers.json").read_text())["trackio"]
    assert re.fullmatch(rf"{result.folder.name}-[0-9a-f]{{8}}", name)
    found = {point["step"]: point["train_loss"] for point in SQLiteStorage.get_logs("mine", name)}
    assert found == dict(result.metrics[["round", "train_loss"]].itertuples(index=False, name=None))


def shown_in_trackio(folder: Path, *rounds: int, **options: Any) -> None:
    """Shows so many ``rounds`` of the run in ``folder`` in trackio, in a process that begins there and then ends."""
    logger = Trackio("resumed", **options)
    logger.start(SimpleNamespace(folder=folder, config=load({"run.group": None})))
    for number in rounds:
        logger.round(SimpleNamespace(round=number, metrics={"train_loss": 1.0}))
    logger.failed()


@pytest.mark.parametrize("options", [{}, {"name": "called"}])
def test_trackio_goes_on_with_the_run_of_a_folder(tmp_path, options):
    """One that ended before its first round, and one between whose parts another of the same name was run."""
    folders = [tmp_path / place / "fedavg-sample" for place in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
    shown_in_trackio(folders[0], **options)
    shown_in_trackio(folders[0], 1, 2, **options)
    shown_in_trackio(folders[1], 1, **options)
    shown_in_trackio(folders[0], 3, **options)
    from trackio.sqlite_storage import SQLiteStorage

    names = [json.loads((folder / "loggers.json").read_text())["trackio"] for folder in folders]
    steps = [sorted(point["step"] for point in SQLiteStorage.get_logs("resumed", name)) for name in names]
    assert steps == [[1, 2, 3], [1]]


def test_wandb_has_a_folder_of_its_own_in_the_run_folder(tmp_path):
    result = logged(tmp_path, {"name": "wandb", "project": "mine"})
    (folder,) = (result.folder / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))
    assert json.loads((result.folder / "loggers.json").read_text())["wandb"] == folder.name.rpartition("-")[2]


def wandb_records(folder: Path) -> list[Any]:
    """What the one offline run below ``folder`` has kept for Weights & Biases, in LevelDB's log format: blocks of 32
    kB with pieces of records, each behind a checksum of 4 bytes, a length of 2 and a kind (1 whole, 2 first, 3 middle,
    4 last). The process that writes it may be behind a run that has ended, and is waited for."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()
    (file,) = folder.glob("**/*.wandb")
    data, place, found, parts = file.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        if -place % 32768 < 7:
            place += -place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(parts))
            parts = b""
    return found


def test_wandb_has_the_rounds_and_the_group(tmp_path):
    result = logged(tmp_path, {"name": "wandb", "project": "mine"}, run__group="together")
    records = wandb_records(result.folder)
    (described,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (described.project, described.run_group) == ("mine", "together")
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["train_loss"] for row in rows] == result.metrics.train_loss.tolist()


@pytest.mark.slow
def test_the_trials_of_a_sweep_are_a_group(tmp_path, places, ray_cluster):
    loggers = f"run.loggers=[{{mlflow: '{places}'}}, {{name: wandb, mode: offline}}]"
    sweep = go(tmp_path, "tune.trials=2", "run.rounds=2", loggers)
    assert len(mlflow_runs(places, sweep.folder.name)) == 2
    for trial in ("0000", "0001"):
        records = wandb_records(sweep.folder / "trials" / trial / "seed-0")
        assert {r.run.run_group for r in records if r.WhichOneof("record_type") == "run"} == {sweep.folder.name}


def test_many_runs_are_a_group(tmp_path, places, ray_cluster):
    keys = {key: value for key, value in SETTINGS.items() if key not in ("run.name", "run.resume")}
    keys |= {"run.output": str(tmp_path), "run.name": "together", "engine.cpus_per_actor": 0.5}
    done = simulate_many(keys | {"run.loggers": [{"mlflow": places}]}, seeds=2, data=small_source())
    assert done.failures == {}
    assert sorted(shown.info.run_name for shown in mlflow_runs(places, "together")) == ["seed_0", "seed_1"]


def test_a_logger_that_fails_does_not_end_the_run(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text(
        "class Fails:\n    def round(self, report):\n        raise OSError('no route')\n"
        "class FailsAtOnce:\n    def start(self, run):\n        raise OSError('no route')\n"
    )
    with pytest.warns(
        UserWarning, match=r"run.loggers: .*Fails failed in round: OSError: no route.* goes on without it"
    ):
        assert logged(tmp_path / "runs", f"{code}:Fails").status == "completed"
    with pytest.raises(UserError, match="FailsAtOnce failed in start: OSError: no route"):
        logged(tmp_path / "other", f"{code}:FailsAtOnce")


def test_a_trial_tells_of_a_logger_that_fails(tmp_path):
    (tmp_path / "mine.py").write_text("class Fails:\n    def round(self, report):\n        raise OSError('no route')\n")
    keys = {**SETTINGS, "run.rounds": 2, "run.output": str(tmp_path), "run.loggers": [f"{tmp_path / 'mine.py'}:Fails"]}
    found: list[Any] = []
    end = run_trial(
        Assignment("7", [keys], "train_loss", "rounds", 2), CustomObjects(small_source()),
        lambda message: bool(found.append(message)),
    )  # fmt: skip
    assert end.error is None
    (line,) = (each for each in found if isinstance(each, Line))
    assert re.search(r"^warning: trial 7: run.loggers: .*OSError: no route.* goes on without it", line.of("trial 7"))


def test_a_logger_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"run.loggers: there is no 'mlfow'.*mlflow"):
        logged(tmp_path, "mlfow")
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(UserError, match=r"wandb needs the library wandb, as in pip install 'fedray\[wandb\]'"):
        logged(tmp_path, "wandb")


def test_what_can_not_be_shown_is_one_line_before_anything_begins(tmp_path):
    with pytest.raises(UserError, match=r"^run.loggers: mlflow failed in prepare: .*nowhere"):
        prepare([{"mlflow": "nowhere://x"}], "group")
    two = [{"mlflow": f"sqlite:///{tmp_path}/{name}.db"} for name in "ab"]
    with pytest.raises(UserError, match=r"^run.loggers has mlflow more than once"):
        logged(tmp_path, *two)
    assert list(tmp_path.iterdir()) == []
