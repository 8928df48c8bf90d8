"""fedray report: the page about a run. Those of sweeps and suites are tested where these are run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from pages import Page

import fedray
from fedray.cli.main import main

SETTINGS = {
    "data.source": "sample", "data.clients": 6, "data.partition.kind": "dirichlet", "model.name": "logistic",
    "train.local_steps": 2, "run.rounds": 4, "run.checkpoint_every": 0, "engine.kind": "local",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    more = {"algorithm.name": "pfedmo", "run.finetune_steps": 1, "engine.profile": True, "run.output": str(folder)}
    return fedray.simulate(SETTINGS | more).folder


def test_a_run(made, capsys):
    assert main(["report", str(made)]) == 0
    assert capsys.readouterr().out == f"wrote {made / 'report.html'}\n"
    page = Page((made / "report.html").read_text())
    page.check()
    titles = ["What it reached", "Curves", "Who holds what", "Single clients", "Time of a round"]
    assert all(title in page.text for title in titles)
    assert "completed after 4 rounds" in page.text
    captions = [str(attrs["alt"]) for attrs in page.all("img")]
    assert len(captions) == 7
    assert any("representation_accuracy" in caption for caption in captions)
    assert any("training samples of each class of 6 clients" in caption for caption in captions)
    assert any(caption.startswith("where the time of a round went") for caption in captions)
    assert "algorithm.gamma" in page.text


def test_a_run_that_kept_less(tmp_path):
    """No profile, no rows of clients, and a folder of an early fedray without its partition."""
    run = fedray.simulate(
        SETTINGS | {"algorithm.name": "fedavg", "run.log_clients": False, "run.output": str(tmp_path)}
    )
    (run.folder / "partition.parquet").unlink()
    assert main(["report", str(run.folder), "--output", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text())
    page.check()
    assert len(page.all("img")) == 3
    assert "Who holds what" not in page.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is not there"),
        (["file"], "file is no folder"),
        (["."], r"\. is no folder of a run, a sweep or a suite; to compare several runs: fedray compare"),
        (["unfinished"], "there is nothing to report of unfinished: the run has not ended"),
        (["run", "--output", "run/metrics.csv"], r"--output: run/metrics.csv exists, and is no page: .* \.html"),
        (["run", "--output", "no/page.html"], "can't write no/page.html: No such file"),
        ([], "give the folder of a run, a sweep or a suite"),
    ],
)
def test_mistakes(words, message, made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    shutil.copytree(made, "run")
    shutil.copytree(made, "unfinished")
    (tmp_path / "unfinished/summary.json").unlink()
    assert main(["report", *words]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert re.search(message, err)
