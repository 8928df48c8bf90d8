"""fedray tensorboard: the runs that TensorBoard shows, and under which names."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

import fedray
from fedray.cli.main import main
from fedray.pages.board import link, names_of

SETTINGS = {
    "algorithm.name": "fedavg", "data.source": "sample", "data.clients": 4, "model.name": "logistic",
    "train.local_steps": 1, "run.rounds": 2, "run.checkpoint_every": 0, "engine.kind": "local",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return fedray.simulate(SETTINGS | {"run.output": str(tmp_path_factory.mktemp("runs")), "run.name": "one"}).folder


def copy(made: Path, folder: Path, **settings) -> Path:
    """A copy of a run with other settings."""
    shutil.copytree(made, folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for key, value in settings.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_names_say_what_differs(made, tmp_path):
    folders = {
        copy(made, tmp_path / "a"): "fedavg, lr=0.01, seed 0",
        copy(made, tmp_path / "b", run__seed=3): "fedavg, lr=0.01, seed 3",
        copy(made, tmp_path / "c", train__lr=0.5): "fedavg, lr=0.5",
        copy(made, tmp_path / "d", algorithm__name="mine.py:Near"): "mine.py:Near, lr=0.01",
        copy(made, tmp_path / "e.bak-1"): "e.bak-1",
        copy(made, tmp_path / "f"): "f",
    }
    # a run that goes on has no summary yet
    (tmp_path / "a/summary.json").unlink()
    (tmp_path / "f/config.yaml").write_text("run: [")
    assert names_of(list(folders)) == folders


def test_links_stay_and_new_runs_are_added(made, tmp_path):
    runs, links = tmp_path / "runs", tmp_path / "links"
    links.mkdir()
    copy(made, runs / "a")
    link(runs, links)
    assert [path.name for path in links.iterdir()] == ["fedavg"]
    copy(made, runs / "b", train__lr=0.5)
    copy(made, runs / "deep/c", train__lr=0.5)
    no_events = copy(made, runs / "d", train__lr=0.7)
    for path in no_events.glob("events.*"):
        path.unlink()
    link(runs, links)
    found = {path.name: path.resolve().name for path in links.iterdir()}
    assert found["fedavg"] == "a"
    assert sorted(found.values()) == ["a", "b", "c"]
    assert len(found) == 3


def test_tensorboard_shows_them(made, tmp_path):
    """Runs under names, and beside them the trials of a sweep under their numbers, behind links too."""
    copy(made, tmp_path / "a", run__seed=1)
    copy(made, tmp_path / "b", run__seed=2)
    for number in range(40):
        copy(made, tmp_path / f"sweeps/lr/trials/{number:04}")
    (tmp_path / "sweeps/lr/sweep.yaml").write_text("")
    (tmp_path / "links").mkdir()
    for name in ("a", "b", "sweeps"):
        (tmp_path / "links" / name).symlink_to(tmp_path / name)
    command = [
        sys.executable,
        str(Path(fedray.__path__[0]) / "run.py"),
        "tensorboard",
        str(tmp_path / "links"),
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://\S+", line)
        assert address, line
        layout = json.load(urllib.request.urlopen(f"{address[0]}data/plugin/custom_scalars/layout", timeout=60))
        titles = [chart["title"] for category in layout["category"] for chart in category["chart"]]
        assert "test accuracy" in titles
        runs = set(json.load(urllib.request.urlopen(f"{address[0]}data/runs", timeout=60)))
        assert "more than 40 runs" in process.stdout.readline()
        assert {"fedavg, seed 1", "fedavg, seed 2", "sweeps_lr/trials/0001"} <= runs
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is not there: give one with runs"),
        (["empty"], "there are no events of a run in empty"),
        (["one", "--port", "99999"], "TensorBoard can't be started: .*99999"),
        (["one", "--host", "999.1.1.1"], "TensorBoard can't be started at 999.1.1.1: "),
        ([], "runs is not there"),
    ],
)
def test_mistakes(words, message, made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, "one")
    (tmp_path / "empty").mkdir()
    assert main(["tensorboard", *words]) == 2
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1
    assert re.search(message, err)
