"""fedray report: the page about a run. Those of sweeps and suites are tested where these are run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from pages import Page

import fedray
from fedray.cli.main import main
from fedray.pages.client_curves import draw_client_curves
from fedray.results.runs import RecordedRun, read_run
from fedray.tracking.tables import read_parts

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
    assert len(captions) == 8
    assert any("representation_accuracy" in caption for caption in captions)
    assert any("training samples of each class of 6 clients" in caption for caption in captions)
    assert any(caption.startswith("where the time of a round went") for caption in captions)
    assert "algorithm.gamma" in page.text


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> RecordedRun:
    """A run with personal, fine-tuned and global scores of all clients, the cohort's three and the others."""
    more = {
        "algorithm.name": "fedper", "run.eval_clients": "all", "run.finetune_steps": 1, "train.cohort_size": 3,
        "run.output": str(tmp_path_factory.mktemp("runs")),
    }  # fmt: skip
    found = read_run(fedray.simulate(SETTINGS | more).folder)
    assert isinstance(found, RecordedRun)
    return found


def test_curves_of_clients(scored):
    """A panel for each kind of model, in which each client has a line with its scores, below those of metrics.csv."""
    rows = read_parts(scored.folder / "evaluation.parquet")
    figure = draw_client_curves(scored, rows)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "personal models", "fine-tuned on each client", "global model",
    ]  # fmt: skip
    columns = {"personal": "personal_", "finetuned": "finetuned_", "global": ""}
    for axes, (model, prefix) in zip(figure.axes, columns.items(), strict=True):
        *clients, mean, weighted, worst = axes.lines
        expected = [list(100 * each[f"{model}_accuracy"]) for _, each in rows.groupby("client")]
        assert [list(line.get_ydata()) for line in clients] == expected
        assert len(expected) == 6
        for line, what in ((mean, "mean"), (weighted, "weighted_mean"), (worst, "worst_tenth")):
            assert list(line.get_ydata()) == list(100 * scored.rows[f"clients_{prefix}accuracy_{what}"])
            assert list(line.get_xdata()) == [1, 2, 3, 4]


def test_bands_of_many_clients(scored, monkeypatch):
    monkeypatch.setattr("fedray.pages.client_curves.MOST_CLIENTS", 5)
    rows = read_parts(scored.folder / "evaluation.parquet")
    axes = draw_client_curves(scored, rows).axes[0]
    assert len(axes.lines) == 3
    for band, (low, high) in zip(axes.collections, ((0.05, 0.95), (0.25, 0.75)), strict=True):
        ends = 100 * rows.groupby("round").personal_accuracy.quantile([low, high])
        found = {round(float(y), 6) for y in band.get_paths()[0].vertices[:, 1]}
        assert found == {round(float(y), 6) for y in ends}


def test_whom_nobody_scored_twice_has_no_curve(scored):
    rows = read_parts(scored.folder / "evaluation.parquet")
    assert draw_client_curves(scored, rows[rows["round"] == 4]) is None
    # of cohorts, where nobody else is scored
    cohorts = rows[rows["in_cohort"]].assign(in_eval_clients=False)
    lines = draw_client_curves(scored, cohorts).axes[0].lines
    assert sum(len(line.get_xdata()) for line in lines[:-3]) == 12


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
