"""Runs whose output is a URI: the same results, resumed from there alone, read from there, and ended with one line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from command_runs import FAST, done, refused
from processes import PROGRAM, environment
from s3_server import S3Server
from small_runs import run

from fedray import compare
from fedray.cli.main import main
from fedray.config import flat, read_file
from fedray.errors import OutputLost
from fedray.remote import mirror, owner
from fedray.remote.storage import Storage
from fedray.util.uris import below


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mirror, "PAUSE", 0.1)
    # a process that still lives is waited for; on a real machine it would have ended
    monkeypatch.setattr(owner, "PATIENCE", 1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))


@pytest.fixture
def uri(s3: S3Server, tmp_path: Path) -> str:
    """A URI with nothing there yet. What is so with shared folders, too, is tested without runs."""
    return s3.uri(f"{tmp_path.name}/runs")


def on_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))


def test_a_run_is_resumed_from_the_uri_alone(uri, tmp_path, monkeypatch):
    # SCAFFOLD keeps states of clients, which are files of checkpoints, too
    keys = {"run__name": "run", "run__checkpoint_every": 1}
    whole = run(tmp_path / "here", "scaffold", run__rounds=4, **keys)
    run(uri, "scaffold", run__rounds=2, **keys)
    on_another_machine(monkeypatch, tmp_path)
    resumed = run(uri, "scaffold", run__rounds=4, **keys)
    assert "round 2 reached before; resuming" in (resumed.folder / "log.txt").read_text()
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert json.loads(Storage(below(uri, "run")).read("summary.json")) == resumed.summary
    config = flat(read_file(resumed.folder / "config.yaml"))
    assert (config["run.output"], "run.working_copy" in config) == (uri, False)


def test_a_run_that_fails_leaves_its_log_at_the_uri(uri, tmp_path):
    def fail(report):
        raise ZeroDivisionError("for a reason")

    with pytest.raises(Exception, match="for a reason"):
        run(uri, run__name="run", call={"callbacks": [fail]})
    assert b"started" in Storage(below(uri, "run")).read("log.txt")


def test_commands_read_runs_at_uris(s3, tmp_path, monkeypatch, capsys):
    runs = s3.uri(f"{tmp_path.name}/runs")
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        done(f"run.output={runs}", f"run.name=seed-{seed}", f"run.seed={seed}")
    on_another_machine(monkeypatch, tmp_path)
    one = below(runs, "seed-1")
    capsys.readouterr()
    assert main(["report", one]) == 0
    assert capsys.readouterr().out == f"wrote s3://bucket/{tmp_path.name}/runs/seed-1/report.html\n"
    assert b"<html" in Storage(one).read("report.html")
    assert main(["evaluate", one]) == main(["evaluate", below(one, "model.safetensors")]) == 0
    assert (tmp_path / "evaluations" / "sample-test" / "evaluation.json").exists()
    assert [len(group.runs) for group in compare(runs).environments[0].groups] == [2]
    # a run that was removed there is not shown any more
    for name in Storage(one).names():
        Storage(one).delete(name)
    assert [len(group.runs) for group in compare(runs).environments[0].groups] == [1]
    # the URI of its configuration is enough to go on with a run
    other = below(runs, "seed-0")
    assert main(["run", below(other, "config.yaml"), "run.rounds=3"]) == 0
    assert json.loads(Storage(other).read("summary.json"))["rounds"] == 3
    nothing = s3.uri(f"{tmp_path.name}/nothing")
    assert refused(capsys, nothing, command="report", base=[]) == f"there is no run or sweep at {nothing.split('?')[0]}"


def test_a_server_that_stays_frozen_ends_the_run_after_a_round(s3, tmp_path, monkeypatch):
    uri = s3.uri(tmp_path.name)
    frozen = s3.frozen()

    def freeze(report):
        if report.round == 1:
            frozen.__enter__()

    # without end for this test, and not worth a compiler
    keys = {"run__name": "run", "run__checkpoint_every": 1, "run__rounds": 100_000, "engine__compile": False}
    try:
        with pytest.raises(OutputLost, match=rf"s3://bucket/{tmp_path.name}/run has not answered since"):
            run(uri, run__output_timeout=2, call={"callbacks": [freeze]}, **keys)
    finally:
        frozen.__exit__(None, None, None)
    (folder,) = (tmp_path / "one").glob("fedray/working/*/bucket/*/run")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    # the same machine goes on with what it has, and then everything is there
    rounds = summary["rounds"] + 1
    again = run(uri, **keys, call={"callbacks": [lambda report: report.round >= rounds]})
    assert f"round {summary['rounds']} reached before; resuming" in (again.folder / "log.txt").read_text()
    assert json.loads(Storage(below(uri, "run")).read("summary.json"))["rounds"] == rounds


def test_starting_over_keeps_the_old_run_beside_the_new_one(uri, tmp_path, monkeypatch):
    old = run(uri, run__name="run").summary["model_sha256"]
    on_another_machine(monkeypatch, tmp_path)
    new = run(uri, run__name="run", run__seed=5, run__resume=False).summary["model_sha256"]
    found = [json.loads(Storage(below(uri, name)).read("summary.json")) for name in ("run.bak-1", "run")]
    assert [each["model_sha256"] for each in found] == [old, new]


def test_the_working_copy_is_where_the_user_wants_it(uri, tmp_path, capsys):
    run(uri, run__name="run", run__working_copy=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "run" / "summary.json").exists()
    line = refused(capsys, f"run.working_copy={tmp_path}")
    assert line == "run.working_copy is for a run.output that is a URI, such as s3://bucket/runs"
    line = refused(capsys, f"run.output=file://{tmp_path}", f"run.working_copy={tmp_path}")
    assert line == "run.working_copy must be another folder than run.output"
    Path(tmp_path, "file").write_text("mine")
    line = refused(capsys, f"run.output={uri}", f"run.working_copy={tmp_path}/file")
    assert line.startswith(f"can't write to run.working_copy={tmp_path}/file")


def test_data_without_a_name_need_a_name_for_the_run(uri):
    with pytest.raises(ValueError, match=r"run.output=.* needs run.name, because the data have no name"):
        run(uri, run__name=None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_is_resumed_on_another_machine(s3: S3Server, tmp_path, monkeypatch, begin):
    """Ray's actors, killed together with the driver at a random moment; the bits are those of a calm run."""
    uri = s3.uri(tmp_path.name)
    keys = [
        *FAST,
        "engine.kind=ray",
        "engine.address=local",
        "algorithm.name=scaffold",
        "run.checkpoint_every=2",
        "engine.compile=false",
    ]
    command = [sys.executable, "-c", PROGRAM, "run", *keys, "run.rounds=2000", f"run.output={uri}"]
    first = begin(command, env=environment(), cwd=tmp_path)
    at, deadline = Storage(below(uri, "run")), time.monotonic() + 240
    while not any(
        "checkpoints/round" in name for name in (at.read_object(".mirror/manifest.json") or {"files": ()})["files"]
    ):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.kill()
    first.wait()
    on_another_machine(monkeypatch, tmp_path)
    state = at.read_object(".mirror/manifest.json")
    last = max(int(name.split("/")[1].removeprefix("round-")) for name in state["files"] if "checkpoints/round" in name)
    rounds = f"run.rounds={last + 3}"
    done(*keys[len(FAST) :], "engine.kind=local", rounds, f"run.output={uri}")
    done(*keys[len(FAST) :], "engine.kind=local", rounds, f"run.output={tmp_path}/calm")
    calm = json.loads((tmp_path / "calm" / "run" / "summary.json").read_text())
    assert json.loads(at.read("summary.json"))["model_sha256"] == calm["model_sha256"]
