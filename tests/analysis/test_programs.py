"""What single programs of analysis/ say of wrong input, and make of stored results."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ANALYSIS = Path(__file__).parents[2] / "analysis"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(ANALYSIS)
    return importlib.import_module


def test_the_stored_table_of_faults_is_that_of_the_stored_runs(program):
    faults = program("cluster_faults")
    stored = ANALYSIS / "results/cluster_faults"
    assert faults.table(faults.read(stored / "faults.csv")) in (stored / "faults.md").read_text()


def test_a_run_that_failed_has_no_bits_to_compare(program):
    """The first undisturbed run failed, too. The one that ended took 30 s, and a run with an event of 5 s 40 s."""
    faults = program("cluster_faults")

    def row(event, seconds, code=0, sha256="a"):
        spent = 5.0 if event == "cut 5 s" else 0.0
        return faults.Outcome(event, "fedavg", code, sha256, seconds, spent, 3.0, "" if code else "completed", "", "")

    rows = [row("calm", 1, 1, "None"), row("calm", 30), row("cut 5 s", 40), row("cut 5 s", 1, 1, "None")]
    text = faults.table(rows)
    assert "| undisturbed | 2 | 1 | 0, 0, 0 | 0 | 3 | 0 |" in text
    assert "| cut 5 s | 2 | 1 | 5, 5, 5 | 0 | 3 | 0 |" in text
    assert "| cut 5 s | 1 | 0 |  | 0 | 3 | 0 |" in faults.table([rows[0], rows[3]])


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("cluster_faults", ["out", "--only", "cut 5s"], "--only: there is no event 'cut 5s' (did you mean 'cut 5 s'?)"),
        ("all_algorithms", ["out", "--only", "fedavgg"], "unknown algorithm 'fedavgg' (did you mean 'fedavg'?)"),
        ("all_algorithms", ["out", "--only"], "argument --only: expected at least one argument"),
        ("fedtrip_readings", ["nowhere", "0.9", "out.csv"], "nowhere has no fedtrip/seed-*/metrics.csv"),
        ("paper_costs", ["ghbm", "a.yaml", "b.yaml"], "one config file at most, not a.yaml and b.yaml"),
        ("private_cifar10", ["out", "--every", "0"], "--rounds, --every and --seeds must be at least 1"),
    ],
)
def test_bad_input_gets_one_line(program, tmp_path, monkeypatch, capsys, name, words, said):
    monkeypatch.chdir(tmp_path)
    assert program(name).main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedray: {said}")
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_curves_of_other_rounds_are_refused(program, tmp_path, capsys):
    private = program("private_cifar10")
    rows = [{"system": "fedray", "seed": 1, "round": each, "accuracy": 0.5} for each in (50, 100, 120)]
    pd.DataFrame(rows).to_csv(tmp_path / "points.csv", index=False)
    assert len(private.points_of(tmp_path / "points.csv", 120, 50)) == 3
    for words in (["--rounds", "150"], ["--rounds", "120", "--every", "10"]):
        assert private.main([str(tmp_path), *words]) == 2
        said = "is of another --rounds or --every (fedray, seed 1 has 3 points up to round 120)"
        assert said in capsys.readouterr().err


def test_diverged_runs_are_counted_beside_the_mean(program):
    robust = program("robust")
    assert robust.cell(pd.Series([0.5, np.nan, 0.52])) == "50.0, 52.0, 1 of 3 diverged"
    assert robust.cell(pd.Series([np.nan, np.nan])) == "2 of 2 diverged"
    assert robust.cell(pd.Series([0.5, 0.5, 0.5])) == "50.0 ± 0.0"


def test_the_page_of_robust_rules_says_how_strong_attacks_are(program):
    robust = program("robust")
    assert "`centered_clip` with tau = 0.3. Attacks: `sign_flip` with scale = 5, `noise`" in robust.strengths()
    page = (ANALYSIS / "results/robust/robust.md").read_text()
    assert f"{robust.SETTING} {robust.strengths()} Seeds 1, 2, 3; " in " ".join(page.split())
