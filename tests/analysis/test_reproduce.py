"""Published tables are data that fit the experiments, and what is measured is what runs wrote."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from published_tables import ASKED, EXPERIMENT, write_run
from reproduce import main
from reproducing import measure, published
from reproducing.accounting import gflops_of_a_round
from reproducing.costs import Costs
from reproducing.measure import frame, measured
from reproducing.provenance import made_by, sentence
from reproducing.published import known_tables, read_table
from reproducing.report import text_of

import fedray
from fedray.errors import UserError
from fedray.results.runs import read_run

PATH = os.pathsep.join(filter(None, [str(Path(published.__file__).parents[1]), os.environ.get("PYTHONPATH")]))


@pytest.mark.slow
def test_from_start_to_table(mine, ray_cluster, capsys):
    assert main(["paper/rounds", "--column", "a"]) == 0
    out = capsys.readouterr().out
    assert "| fedavg | " in out
    runs = sorted((mine / "reproduced/runs").glob("paper/small/*/seed-*/summary.json"))
    assert len(runs) == 4
    made = json.loads((mine / "reproduced/paper/rounds/made.json").read_text())
    assert (made["command"], made["seeds"], made["runs"]) == (
        "python analysis/reproduce.py paper/rounds --column 'a'",
        2,
        4,
    )
    assert made["versions"]["fedray"] == fedray.__version__
    assert f"4 runs of {made['hours']:.3g} h in all, on {made['processors']}; fedray " in out
    times = [path.stat().st_mtime_ns for path in runs]
    rows = pd.read_csv(mine / "reproduced/paper/rounds/table.csv").set_index("row")
    for name in ("fedavg", "fedprox"):
        firsts = []
        for seed in range(2):
            metrics = pd.read_csv(mine / f"reproduced/runs/paper/small/{name}_run.stop_at_0.3/seed-{seed}/metrics.csv")
            there = metrics[metrics["test_accuracy"] >= 0.3]["round"]
            firsts.append(there.iloc[0] if len(there) else math.inf)
        assert rows.loc[name, "measured"] == np.median(firsts)
        assert rows.loc[name, "deviation"] == pytest.approx(np.median(firsts) / rows.loc[name, "published"] - 1)
    # its algorithm's own settings, and the seed by which data are dealt as well
    config = yaml.safe_load(
        (mine / "reproduced/runs/paper/small/fedprox_run.stop_at_0.3/seed-1/config.yaml").read_text()
    )
    assert (config["algorithm"]["mu"], config["run"]["seed"], config["data"]["seed"]) == (0.5, 1, 1)
    for name in ("table.png", "table.svg", "curves.png", "curves.svg"):
        assert (mine / "reproduced/paper/rounds" / name).stat().st_size > 5000
    # another table uses the same runs, a second column makes only its own, and an accuracy needs all rounds
    assert main(["paper/ratio"]) == 0
    assert main(["paper/rounds"]) == 0
    assert main(["paper/accuracy"]) == 0
    assert [path.stat().st_mtime_ns for path in runs] == times
    assert len(list((mine / "reproduced/runs").glob("paper/small/*/seed-*"))) == 12
    capsys.readouterr()
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "paper/rounds: Paper, rounds\n    8 runs, 8 done\n" in listed
    # runs of a second, where half an hour was measured
    assert "paper/steps: Paper, steps\n    4 runs, 0 done; about 0.0 h\n" in listed
    assert "because the runs in reproduced/runs took so many times as long as expected." in listed


def test_data_that_are_missing_are_named_before_any_run(mine, capsys, monkeypatch):
    monkeypatch.setenv("FEDRAY_DATA", str(mine))
    path = published.EXPERIMENTS / "paper/published/rounds.yaml"
    table = yaml.safe_load(path.read_text())
    table["columns"]["b"]["with"] = {"data.source": "csv", "data.root": "nowhere", "data.target_column": "y"}
    path.write_text(yaml.safe_dump(table))
    assert main(["paper/rounds"]) == 2
    assert "nowhere" in capsys.readouterr().err.splitlines()[-1]
    assert not (mine / "reproduced").exists()


def test_cost_without_runs(mine, capsys):
    """Eight runs of the half hour that was measured, and four of twice the local steps."""
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "paper/rounds: Paper, rounds\n    8 runs, 0 done; at most about 4.0 h\n" in listed
    assert "paper/steps: Paper, steps\n    4 runs, 0 done; about 4.0 h\n" in listed
    assert main(["paper/steps", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["paper/rounds", "--column", "a", "--seeds", "3", "--list"]) == 0
    assert "\n    6 runs, 0 done; at most about 3.0 h\n" in capsys.readouterr().out
    # one seed and two of 20 rounds
    assert main(["paper/rounds", "--quick", "--list"]) == 0
    assert "\n    4 runs, 0 done; at most about 0.2 h\n" in capsys.readouterr().out
    assert listed.endswith("Hours are of 2 processors without a GPU (analysis/experiments/README.md).\n")


def test_cells_that_share_their_hours(monkeypatch):
    """What a run takes is found once for all cells of the same sizes, whatever else their algorithms set."""
    tables = map(read_table, known_tables())
    cells = {(each.file, each.settings["algorithm.name"]): each for table in tables for each in table.cells}
    shared = Costs(Path("none"), [])
    assert len(cells) > 300
    found = [shared._of_a_round(cell) for cell in cells.values()]
    monkeypatch.setattr("reproducing.costs.SIZES", {key for cell in cells.values() for key in cell.settings})
    alone = Costs(Path("none"), [])
    np.testing.assert_array_equal(found, [alone._of_a_round(cell) for cell in cells.values()])


def test_a_list_needs_neither_torch_nor_scipy():
    """It is there in seconds."""
    code = (
        "import sys, reproduce; reproduce.main(['fedtrip/table4', '--list']);"
        "print({'torch', 'scipy', 'ray', 'matplotlib'} & {*sys.modules})"
    )
    done = subprocess.check_output([sys.executable, "-c", code], text=True, env={**os.environ, "PYTHONPATH": PATH})
    assert done.endswith("\nset()\n")


@pytest.mark.parametrize(("processes", "slowness"), [(1, 2), (2, 2), (3, 4)])
def test_cost_follows_the_runs_that_have_ended(mine, processes, slowness):
    """Half of a run's rounds took an hour of one process, or of a server and client actors. A quarter of an hour of two
    processors was expected."""
    cells = read_table("paper/rounds").cells
    run = mine / "runs" / cells[0].name / "seed-0"
    write_run(run, [0.1] * 10, wall_seconds=3600.0)
    summary = {"status": "completed", "rounds": 10, "machine": {"processes": [{"pid": 1}] * processes}}
    (run / "summary.json").write_text(json.dumps(summary))
    # one that is damaged says nothing about the time
    write_run(run.parent / "seed-1", [0.1] * 10)
    (run.parent / "seed-1/metrics.csv").write_text("")
    found = Costs(mine / "runs", [(cell, 2) for cell in cells])
    assert found.slowness == pytest.approx(slowness)
    cost = found.of(cells, 2)
    assert (cost.runs, cost.done) == (8, 2)
    assert cost.hours == pytest.approx(6 * 0.5 * slowness)


def test_cost_of_another_reading(mine):
    """An experiment that was not measured takes as long as the one that it extends."""
    folder = mine / "experiments/paper"
    (folder / "other.yaml").write_text("extends: [small.yaml]\ntrain.lr: 0.1\n")
    table = {"title": "T", "measure": "final", "seeds": 2, "rows": ["fedavg"]}
    table |= {"columns": {"a": {"experiment": "paper/other"}}}
    (folder / "published/other.yaml").write_text(yaml.safe_dump(table))
    assert Costs(mine / "runs", []).of(read_table("paper/other").cells, 2).hours == pytest.approx(2 * 0.5)


def test_cost_of_local_epochs(mine):
    """Epochs are compared with those of the experiment's file, because the steps of an epoch are not known."""
    experiment = EXPERIMENT | {"train": {"cohort_size": 3, "local_epochs": 5, "lr": 0.05}}
    (mine / "experiments/paper/small.yaml").write_text(yaml.safe_dump(experiment))
    column = {"experiment": "paper/small", "with": {"train.local_epochs": 10, "run.rounds": 5}}
    table = {"title": "T", "measure": "final", "seeds": 1, "rows": ["fedavg"], "columns": {"a": column}}
    (mine / "experiments/paper/published/epochs.yaml").write_text(yaml.safe_dump(table))
    cells = read_table("paper/epochs").cells
    assert Costs(mine / "runs", []).of(cells, 1).hours == pytest.approx(0.5 * 2 / 4)


@pytest.mark.slow
def test_quick_runs_are_kept_apart(mine, ray_cluster):
    assert main(["paper/accuracy", "--quick"]) == 0
    (run, _) = sorted((mine / "reproduced/quick-runs").glob("paper/small/*/seed-0"))
    assert len(pd.read_csv(run / "metrics.csv")) == 2
    assert not (mine / "reproduced/runs").exists()
    assert "a tenth of these rounds" in (mine / "reproduced/paper/accuracy-quick/table.md").read_text().splitlines()[0]
    made = json.loads((mine / "reproduced/paper/accuracy-quick/made.json").read_text())
    assert (made["command"], made["seeds"]) == ("python analysis/reproduce.py paper/accuracy --quick", 1)


def test_runs_that_are_missing_or_lost(mine):
    runs = mine / "runs/paper/small"
    write_run(runs / "fedavg_run.stop_at_0.3/seed-0", [0.1, 0.4, 0.5])
    write_run(runs / "fedavg_run.stop_at_0.3/seed-1", [0.1, 0.2, 0.2])
    write_run(runs / "fedprox_run.stop_at_0.3/seed-0", [0.4, 0.4], "diverged")
    table = read_table("paper/rounds")
    rows = frame(table, measured(table, mine / "runs", 2)).set_index(["column", "row"])
    # 2 and more than 3: the median is above 2.5
    assert math.isinf(rows.loc[("a", "fedavg"), "measured"])
    assert math.isnan(rows.loc[("a", "fedavg"), "deviation"])
    assert rows.loc[("a", "fedprox"), ["runs", "diverged", "reached"]].tolist() == [1, 1, 0]
    assert rows.loc[("b", "fedavg"), "runs"] == 0
    text = text_of(table, measured(table, mine / "runs", 2), made_by(ASKED, []))
    assert "| fedavg | > 2.5, 1 of 2 reached it (4) | not run (4) |" in text
    assert "| fedprox | 1 of 1 diverged, 1 of 2 runs (8) |" in text


def test_there_is_no_ratio_to_what_was_not_reached(mine):
    runs = mine / "runs/paper/small"
    write_run(runs / "fedavg_run.stop_at_0.3/seed-0", [0.1, 0.2])
    write_run(runs / "fedprox_run.stop_at_0.3/seed-0", [0.1, 0.4])
    table = read_table("paper/ratio")
    text = text_of(table, measured(table, mine / "runs", 1), made_by(ASKED, []))
    assert "> 2, 0 of 1 reached it" in text
    assert "| fedprox | no ratio, 1 of 2 runs (8) |" in text


def test_a_missed_target_has_a_bound_in_the_unit_of_the_table(mine):
    runs = mine / "runs/paper/small"
    write_run(runs / "fedavg_run.stop_at_0.3/seed-0", [0.1, 0.4])
    write_run(runs / "fedprox_run.stop_at_0.3/seed-0", [0.1] * 5)
    table = read_table("paper/ratio")
    text = text_of(table, measured(table, mine / "runs", 1), made_by(ASKED, []))
    assert "| fedprox | > 2.5, 0 of 1 reached it" in text


def test_bytes_that_were_sent_until_the_mean_of_fedavgs_last_rounds(mine):
    """Those of both ways: two for each round in these runs. FedAvg's mean is 0.3; the last round alone has 0.5."""
    runs = mine / "runs/paper/small"
    write_run(runs / "fedavg/seed-0", [0.1, 0.2, 0.4, 0.5])
    write_run(runs / "fedprox/seed-0", [0.1, 0.35, 0.4, 0.3])
    found = measured(read_table("paper/sent"), mine / "runs", 1)
    assert [one.value for one in found] == pytest.approx([2 * 3 / 2**30, 2 * 2 / 2**30])


def test_ratios_and_accuracies(mine):
    runs = mine / "runs/paper/small"
    write_run(runs / "fedavg_run.stop_at_0.3/seed-0", [0.1, 0.4, 0.5], train_accuracy=0.6)
    write_run(runs / "fedprox_run.stop_at_0.3/seed-0", [0.1, 0.2, 0.2, 0.4], train_accuracy=0.7)
    write_run(runs / "fedavg/seed-0", [0.1, 0.4, 0.5], train_accuracy=0.6)
    write_run(runs / "fedprox/seed-0", [0.1, 0.2, 0.2, 0.4], train_accuracy=0.7)
    ratio = read_table("paper/ratio")
    values = [one.value for one in measured(ratio, mine / "runs", 1)]
    assert values == [2, 2]
    accuracy = read_table("paper/accuracy")
    assert [one.value for one in measured(accuracy, mine / "runs", 1)] == pytest.approx([60, 70])
    text = text_of(accuracy, measured(accuracy, mine / "runs", 1), made_by(ASKED, []))
    assert "| fedavg | 60.00, 1 of 2 runs (50) |" in text
    assert "| fedprox | 70.00, 1 of 2 runs (-) |" in text
    assert "Measured (published). Training accuracy at the end in percent, as the mean over seeds" in text
    # of two seeds both values, of three the interval
    write_run(runs / "fedavg/seed-1", [0.1, 0.4, 0.5], train_accuracy=0.5)
    write_run(runs / "fedprox/seed-1", [0.1, 0.2, 0.2, 0.4], train_accuracy=0.8)
    write_run(runs / "fedprox/seed-2", [0.1, 0.2, 0.2, 0.4], train_accuracy=0.9)
    found = measured(accuracy, mine / "runs", 3)
    text = text_of(accuracy, found, made_by(ASKED, []))
    assert "| fedavg | 60.00, 50.00 (50) |" in text
    assert f"| fedprox | 80.00 ± {found[1].margin:.2f} (-) |" in text


def test_a_row_of_another_accuracy_is_named():
    table = read_table("pfedmo/fig2b")
    text = text_of(table, measured(table, Path("nowhere"), 3), made_by(ASKED, []))
    assert "Training accuracy at the end in percent" in text
    assert "In the row 'representation model alone, test' it is the test accuracy." in text


def test_a_damaged_run_is_named(mine, capsys):
    run = mine / "runs/paper/small/fedavg/seed-0"
    write_run(run, [0.1, 0.4, 0.5], train_accuracy=0.6)
    (run / "metrics.csv").write_text("")
    table = read_table("paper/accuracy")
    text = text_of(table, measured(table, mine / "runs", 1), made_by(ASKED, []))
    assert "| fedavg | not run (50) |" in text
    assert f"Left out: {run}: metrics.csv is damaged: Empty CSV file." in text
    (run / "summary.json").write_text("{")
    with pytest.raises(UserError, match=re.escape(f"{run}/summary.json is damaged: remove {run}")):
        measured(table, mine / "runs", 1)


def test_how_a_table_was_made(mine):
    """The hours are a sum, and versions and processors that differ are all named."""
    folders = [mine / f"runs/seed-{seed}" for seed in range(2)]
    for seed, folder in enumerate(folders):
        write_run(folder, [0.1, 0.4])
        summary = {"status": "completed", "rounds": 2, "versions": {"fedray": f"0.{seed}", "torch": "2.8"}}
        processes = [{"device": "Xeon"}, {"device": ("Xeon", "EPYC")[seed]}]
        (folder / "summary.json").write_text(json.dumps(summary | {"machine": {"processes": processes}}))
    runs = [read_run(folder) for folder in folders]
    made = made_by(ASKED, [*runs, runs[0]])
    assert made["versions"]["fedray"] == "0.0 and 0.1"
    assert made["hours"] == pytest.approx(4 / 3600)
    said = "Made by `python analysis/reproduce.py x` with 2 seeds: 2 runs of 0.00111 h in all, on Xeon, EPYC"
    assert sentence(made) == f"{said}; fedray 0.0 and 0.1, torch 2.8."


@pytest.mark.skipif(not os.environ.get("FEDRAY_DATA"), reason="needs MNIST: FEDRAY_DATA is not set")
def test_gflops_are_those_of_table_v():
    """The paper's own rounds give the paper's own GFLOPs (5 of the cells; F = 79,400 and 422,944)."""
    table5 = {(c.row, c.column): c for c in read_table("fedtrip/table5").cells}
    rounds = {(c.row, c.column): c.published for c in read_table("fedtrip/table4").cells}
    for row, column in (
        ("fedtrip", "MLP MNIST 87 %"), ("moon", "MLP MNIST 87 %"), ("feddyn", "CNN MNIST 90 %"),
        ("fedavg", "CNN MNIST 90 %"), ("fedprox", "CNN FMNIST 75 %"),
    ):  # fmt: skip
        cell = table5[row, column]
        assert rounds[row, column] * gflops_of_a_round(cell) == pytest.approx(cell.published, abs=0.0006)


def test_costs_follow_from_rounds(mine, monkeypatch):
    """GFLOPs: rounds times those of a round. GiB: those of a run times the rounds over FedAvg's to its own accuracy."""
    runs = mine / "runs/paper/small"
    write_run(runs / "fedavg_run.stop_at_0.3/seed-0", [0.1, 0.2, 0.4, 0.4])
    write_run(runs / "fedprox_run.stop_at_0.3/seed-0", [0.1, 0.5, 0.5, 0.5])
    monkeypatch.setattr(measure, "gflops_of_a_round", lambda cell: 2.5)
    monkeypatch.setattr(measure, "gib_of_a_run", lambda cell: 12.0)
    table = read_table("paper/rounds")
    until = {"gflops": "target", "gib": "first row"}
    for unit, wanted in (("gflops", [7.5, 5.0]), ("gib", [12.0, 8.0])):
        found = measured(replace(table, measure=unit, until=until[unit], cells=table.cells[:2]), mine / "runs", 1)
        assert [one.value for one in found] == pytest.approx(wanted)
    # what never gets there costs as much as a whole run
    write_run(runs / "fedprox_run.stop_at_0.3/seed-1", [0.1, 0.1, 0.1, 0.1])
    write_run(runs / "fedavg_run.stop_at_0.3/seed-1", [0.1, 0.2, 0.4, 0.4])
    found = measured(replace(table, measure="gib", until="first row", cells=table.cells[:2]), mine / "runs", 2)
    assert [one.value for one in found] == pytest.approx([12.0, 12.0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the name of a table, such as fedtrip/table4"),
        (["paper/round"], "there is no published table 'paper/round' .did you mean 'paper/rounds'"),
        (["paper/rounds", "--column", "c"], "--column: paper/rounds has no column 'c'"),
        (["paper/rounds", "--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["--list", "paper/round"], "there is no published table 'paper/round' .did you mean 'paper/rounds'"),
        (["--list", "--column", "a"], "--column is one of a table: name the table"),
        (["--list", "paper/rounds", "--column", "c"], "--column: paper/rounds has no column 'c'"),
    ],
)
def test_mistakes(words, message, mine, capsys):
    assert main([*words]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert re.search(message, err)
    assert not (mine / "reproduced").exists()


def test_mistakes_in_a_file(mine):
    path = mine / "experiments/paper/published/rounds.yaml"
    said = yaml.safe_load(path.read_text())
    for change, message in (
        ({"measure": "round"}, "rounds.yaml: measure must be .*did you mean 'rounds'"),
        ({"rows": ["fedavg"]}, "rounds.yaml: a: there are 1 rows, but 2 published values"),
        ({"seed": 3}, "rounds.yaml: unknown key seed"),
    ):
        path.write_text(yaml.safe_dump(said | change))
        with pytest.raises(UserError, match=message):
            read_table("paper/rounds")
