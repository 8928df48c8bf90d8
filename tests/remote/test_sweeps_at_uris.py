"""Sweeps whose output is a URI: trials keep their own parts of it up to date, and another machine goes on there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import PROGRAM, environment
from sweeps_on_ray import described

from fedray.cli.main import main
from fedray.remote.fetching import fetched
from fedray.remote.storage import Storage
from fedray.tuning.report import state_of, trial_table
from fedray.tuning.spec import read_sweeps
from fedray.tuning.storage import study_of
from fedray.util.uris import below


@pytest.fixture
def tune(space: Path, begin: Any) -> Callable[..., subprocess.Popen[str]]:
    """Starts a sweep of four trials on a Ray of its own, on a machine whose cache is the folder ``machine``."""

    def sweep(output: str, machine: Path, *overrides: str) -> subprocess.Popen[str]:
        words = ["tune", str(space), f"tune.output={output}", "tune.name=s", "tune.trials=4", "engine.address=local"]
        return begin(
            [sys.executable, "-c", PROGRAM, *words, *overrides],
            env={**environment(), "XDG_CACHE_HOME": str(machine)},
            cwd=space.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return sweep


def wait_for_state(of: subprocess.Popen[str], trial: Storage) -> None:
    """Returns once the sweep has sent a whole state of its trial."""
    deadline = time.monotonic() + 240
    while trial.read_object(".mirror/manifest.json") is None:
        assert of.poll() is None, of.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def space(tmp_path: Path) -> Path:
    keys = {"data__source": "problem:source", "run__rounds": 12, "run__checkpoint_every": 2, "train__local_epochs": 8}
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(described(**keys)))
    return path


def hashes(trials: Path) -> list[str]:
    return [json.loads((run / "summary.json").read_text())["model_sha256"] for run in sorted(trials.glob("*/seed-0"))]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_sweep_goes_on_from_another_machine(s3, tune, tmp_path, monkeypatch, capsys):
    uri = s3.uri(tmp_path.name)
    first = tune(uri, tmp_path / "one")
    trial = Storage(below(uri, "s", "trials", "0001", "seed-0"))
    wait_for_state(first, trial)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = tune(uri, tmp_path / "another")
    out = second.communicate(timeout=240)[0]
    assert second.returncode == 0, out
    assert "fetching" in out
    calm = tune(str(tmp_path / "calm"), tmp_path / "calm-cache")
    out = calm.communicate(timeout=240)[0]
    assert calm.returncode == 0, out
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    there = fetched(below(uri, "s"))
    assert hashes(there / "trials") == hashes(tmp_path / "calm" / "s" / "trials")
    study = study_of(*read_sweeps(there))
    assert [state_of(each) for each in study.get_trials()] == ["complete"] * 4
    assert len(trial_table(there)) == 4
    names = Storage(uri).names()
    assert not any("checkpoints" in name or "owner.json" in name for name in names)
    monkeypatch.chdir(tmp_path)
    # the sweep is found there without its space file
    assert main(["tune", below(uri, "s"), "--report"]) == 0
    assert f"wrote s3://bucket/{tmp_path.name}/s/report/trials.csv" in capsys.readouterr().out
    assert Storage(below(uri, "s")).read("report/trials.csv").count(b"\n") == 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_stays_frozen_puts_the_trials_off(s3, tune, tmp_path):
    uri, machine = s3.uri(tmp_path.name), tmp_path / "one"
    first = tune(uri, machine, "run.rounds=3000", "run.output_timeout=5", "engine.compile=false")
    trial = Storage(below(uri, "s", "trials", "0000", "seed-0"))
    wait_for_state(first, trial)
    with s3.frozen():
        out = first.communicate(timeout=200)[0]
    assert first.returncode == 2, out
    assert f"fedray: s3://bucket/{tmp_path.name}/s has not answered since" in out.splitlines()[-1], out
    (folder,) = machine.glob("fedray/working/*/bucket/*/s")
    states = [state_of(each) for each in study_of(*read_sweeps(folder)).get_trials()]
    assert "failed" not in states, out
    assert "running" in states, out
