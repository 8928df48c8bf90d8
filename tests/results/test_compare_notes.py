"""fedray compare tells in which ways a comparison is unequal, and what it is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import yaml
from compared_runs import change, cut, diverge, other_input, write_metrics

import fedray
from fedray.cli.main import main


def test_other_processors_are_told(runs):
    for seed in range(3):
        path = runs / f"fedavg-5.0-{seed}/summary.json"
        machine = {"processes": [{"device": "another"}]}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": machine}))
    notes = fedray.compare(runs).environments[1].notes
    assert any(note.startswith("the processors differ, on which seconds depend: another in fedavg") for note in notes)


def test_what_makes_groups_unequal_is_told(runs):
    for seed in range(3):
        folder = runs / f"fedprox-5.0-{seed}"
        change(folder / "config.yaml", train__weighting="uniform", train__batch_size=16)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"parameters": 99}))
    shutil.rmtree(runs / "fedavg-5.0-2")
    alike, unequal = fedray.compare(runs, targets=[0.1]).environments
    assert alike.notes == []
    assert unequal.notes == [
        "the models differ in their parameters: 7,850 in fedavg; 99 in fedprox",
        "clients are weighted differently (train.weighting): samples in fedavg; uniform in fedprox",
        "the batches differ in size: 64 in fedavg; 16 in fedprox",
        "the seeds differ: 0 1 in fedavg; 0 1 2 in fedprox",
    ]


def test_cohorts_are_compared_as_they_were_asked_for(runs):
    """Where each client takes part by chance, the largest of a run differs between seeds."""
    metrics = pd.read_csv(runs / "fedavg-0.1-0/metrics.csv")
    write_metrics(runs / "fedavg-0.1-0", metrics.assign(cohort_size=metrics.cohort_size + 1))
    for seed in range(3):
        change(runs / f"fedprox-5.0-{seed}/config.yaml", train__cohort_size=2)
    random, other = fedray.compare(runs, targets=[0.1]).environments
    assert random.notes == []
    assert other.notes == ["the cohorts differ in size: 4 in fedavg; 2 in fedprox"]


def test_runs_without_the_axis(runs):
    """A group without virtual seconds was missing in the picture without a word."""
    for path in runs.glob("fedprox-*/metrics.csv"):
        write_metrics(path.parent, pd.read_csv(path).assign(virtual_seconds=1.5))
    for environment in fedray.compare(runs, x="virtual_seconds").environments:
        assert "fedavg has runs without virtual_seconds, so that there is no curve of it" in environment.notes
        assert not any("fedprox has" in note for note in environment.notes)


def test_what_is_said_of_the_baseline(runs):
    """One that is missing, one of several, and one that does not reach the target itself."""
    for seed in range(3):
        change(runs / f"fedavg-0.1-{seed}/config.yaml", algorithm__name="scaffold")
        change(runs / f"fedprox-5.0-{seed}/config.yaml", algorithm__name="fedavg", train__lr=0.5)
    first, second = fedray.compare(runs, targets=[0.99]).environments
    missing = "there is no fedavg here, so that there are no differences and speed-ups"
    assert missing in first.notes
    assert (
        f"{missing}, and the target is the mean of the group that ends worst"
        in fedray.compare(runs).environments[0].notes
    )
    best = max(second.rows, key=lambda row: row["final"])["group"]
    assert second.baseline.label == best
    assert f"the baseline is {best}, the best of 2 groups of fedavg" in second.notes
    assert f"{best} reached 99.00 % in 0 of 3 runs, so that there are no speed-ups to it" in second.notes


def test_settings_and_data_that_differ_are_told(runs):
    """Another rate and another loss of one algorithm, and within a group another start."""
    for seed in range(3):
        change(runs / f"fedprox-5.0-{seed}/config.yaml", train__lr=0.5)
        other_input(runs / f"fedprox-5.0-{seed}", loss="4567")
    other = Path(shutil.copytree(runs / "fedavg-5.0-1", runs / "fedavg-5.0-1-again"))
    other_input(other, **{"initialisation of the model": "0123"})
    notes = notes_of(runs)
    assert "the losses differ: the task's in fedavg; 4567 in fedprox" in notes
    assert "fedavg has 2 runs with seed 1: initialisation of the model differ" in notes
    shutil.rmtree(other)
    found = fedray.compare(*(runs / f"{name}-5.0-{seed}" for name in ("fedavg", "fedprox") for seed in range(3)))
    assert "train.lr differs: 0.05 in fedavg; 0.5 in fedprox" in found.environments[0].notes


def notes_of(runs: Path, **options) -> list[str]:
    found = fedray.compare(runs, **options)
    return [*(note for each in found.environments for note in each.notes), *found.notes]


def test_scores_of_other_clients_are_told(runs):
    for seed in range(3):
        change(runs / f"fedprox-0.1-{seed}/config.yaml", run__eval_clients=2)
    assert "different clients were scored one by one (run.eval_clients): all in fedavg; 2 in fedprox" in notes_of(runs)


def test_settings_that_differ_between_environments_are_told(runs, capsys):
    for folder in runs.glob("f*-5.0-*"):
        change(folder / "config.yaml", train__lr=0.5)
    line = "train.lr differs: 0.05 in alpha=0.1; 0.5 in alpha=5"
    assert fedray.compare(runs).notes == [line]
    assert main(["compare", str(runs), "--output", str(runs.parent / "out")]) == 0
    assert line in capsys.readouterr().out
    assert line in (runs.parent / "out/report.html").read_text()
    assert line in (runs.parent / "out/comparison.md").read_text()


def test_settings_of_an_algorithm_that_differ_together_are_told(runs):
    for folder in runs.glob("fedavg-*"):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["algorithm"] = {"name": "slowmo", "beta": 0.5, "alpha": 1.0}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        copy = Path(shutil.copytree(folder, folder.with_name(folder.name.replace("fedavg", "other"))))
        change(copy / "config.yaml", algorithm__beta=0.25, algorithm__alpha=0.5)
    lines = [note for note in notes_of(runs) if "alpha differs" in note or "beta differs" in note]
    assert len(lines) == 2
    assert all("slowmo" in line for line in lines)


def test_curves_of_a_part_of_the_rounds_are_told(runs):
    cut(runs / "fedprox-0.1-0", 4)
    line = "the curve of fedprox has 2 of its 3 evaluated rounds: those in which all its runs were evaluated"
    assert line in notes_of(runs)


def test_without_a_baseline_that_ended_there_is_no_target(runs):
    for seed in range(3):
        diverge(runs / f"fedavg-0.1-{seed}")
    assert any(note.startswith("there is no target, because none of the runs has ended") for note in notes_of(runs))


def test_seeds_of_the_data_alone_are_told(runs):
    for seed in range(3):
        change(runs / f"fedprox-0.1-{seed}/config.yaml", data__seed=100 + seed)
    (line,) = [note for note in notes_of(runs) if note.startswith("the seeds differ")]
    assert "0 (data.seed=100) 1 (data.seed=101) 2 (data.seed=102) in fedprox" in line
