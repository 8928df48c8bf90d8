"""Virtual seconds and joules where results are compared, shown and searched for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_runs import done, refused

from fedray import simulate
from fedray.cli.main import main
from fedray.config import load
from fedray.experiment.cohorts import rehearsed
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.experiment.system import clock_of, schedule_of
from fedray.experiment.usual_round import usual_length, usual_round
from fedray.testing.contracts import SETTINGS, small_source
from fedray.tuning.axis import budget_of

pytestmark = pytest.mark.usefixtures("own_folder", "no_real_data")

TIMED = ["system.devices=raspberry_pi_4", "system.networks=mobile_4g"]
SPACE = """
base: {algorithm.name: fedavg, model.name: logistic, data.clients: 6, run.rounds: 4, data.validation_samples: 500}
spaces: {mine: {train.local_steps: {int: [1, 40]}}}
tune: {trials: 3, sampler: random}
"""


def test_comparisons_and_pages(capsys):
    done("run.name=fast", *TIMED, "run.targets=[0.3]")
    done("run.name=slow", *TIMED, "run.targets=[0.3]", "system.flops_per_second=1e8")
    capsys.readouterr()
    assert main(["compare", "runs", "--output", "compared", "--x", "virtual_seconds", "--target", "0.3"]) == 0
    shown = capsys.readouterr().out
    assert "virtual" in shown
    assert "joules" in shown
    table = pd.read_csv("compared/comparison.csv").set_index("group")
    metrics = {name: pd.read_csv(f"runs/{name}/metrics.csv").iloc[-1] for name in ("fast", "slow")}
    assert sorted(table["virtual_seconds"]) == sorted(row.virtual_seconds for row in metrics.values())
    assert sorted(table["joules"]) == sorted(row.joules for row in metrics.values())
    target = json.loads(Path("runs/slow/summary.json").read_text())["targets"]["0.3"]
    assert target["virtual_seconds"] > 0.5
    assert main(["report", "runs/slow", "--output", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert "accuracy, % over virtual seconds: test_accuracy" in page
    assert "accuracy, % over joules: test_accuracy" in page
    assert main(["compare", "runs", "--output", "energy", "--x", "joules"]) == 0


def test_without_a_clock_there_is_no_column(capsys):
    done()
    capsys.readouterr()
    assert main(["compare", "runs", "--output", "compared"]) == 0
    assert "virtual" not in capsys.readouterr().out
    line = refused(capsys, "runs", "--output", "other", "--x", "virtual_seconds", command="compare", base=[])
    assert "virtual_seconds" in line


@pytest.mark.slow
def test_a_sweep_may_search_for_fast_runs(capsys):
    Path("mine.yaml").write_text(SPACE)
    words = ["engine.kind=local", "tune.objective={validation_accuracy: max, virtual_seconds: min}"]
    line = refused(capsys, "mine.yaml", *words, command="tune", base=[])
    assert "virtual_seconds is not recorded without a virtual clock" in line
    assert main(["tune", "mine.yaml", *words, *TIMED]) == 0
    assert main(["tune", "mine.yaml", *words, *TIMED, "--report"]) == 0
    trials = pd.read_csv("sweeps/mine/report/trials.csv")
    assert trials["virtual_seconds"].notna().all()
    assert trials["joules"].notna().all()
    # more local steps take longer
    steps = trials.sort_values("train.local_steps")
    assert steps["virtual_seconds"].is_monotonic_increasing


def test_trials_are_compared_at_equal_virtual_seconds(capsys):
    Path("mine.yaml").write_text(SPACE)
    words = ["engine.kind=local", "tune.pruner={kind: median, axis: virtual_seconds}", "tune.name=pruned"]
    assert "needs a virtual clock" in refused(capsys, "mine.yaml", *words, command="tune", base=[])
    assert main(["tune", "mine.yaml", *words, *TIMED]) == 0
    assert main(["tune", "mine.yaml", *words, *TIMED, "--report"]) == 0
    assert Path("sweeps/pruned/report/curves.png").exists()


def test_energy_that_is_not_known_is_no_objective(capsys):
    Path("mine.yaml").write_text(SPACE)
    words = ["engine.kind=local", "tune.objective={validation_accuracy: max, joules: min}", "system.down_mbps=1"]
    line = refused(capsys, "mine.yaml", *words, command="tune", base=[])
    assert "tune.objective: joules are not known, because system.watts is not" in line


EVENINGS = {"from": 20, "to": 23}


@pytest.mark.parametrize(
    ("hours", "rounds", "deadline", "near"),
    [
        (None, 20, None, 0.01), (EVENINGS, 20, None, 0.01), (EVENINGS, 2500, None, 0.1), (EVENINGS, 2500, 8000, 0.5),
        (EVENINGS | {"shift": {"uniform": [0, 24]}}, 500, None, 0.5),
    ],
)  # fmt: skip
def test_how_long_a_run_will_take(hours, rounds, deadline, near):
    """Against all of its rounds: from the first moment on at which a client is there, and with nights in between."""
    keys = {"system.availability": hours, "system.latency_ms": 5000, "run.rounds": rounds, "algorithm.name": "fedavg"}
    timed = {"system.deadline_seconds": deadline}
    experiment, data = resolve(load(SETTINGS | keys | timed), CustomObjects(small_source()))
    clock, now = clock_of(experiment, data), 0.0
    for number in range(1, rounds + 1):
        now += clock.ask(number, rehearsed(number, data.sizes(), experiment), now).duration
    assert budget_of(experiment, data, "virtual_seconds") == pytest.approx(now, rel=near)
    buffered = {"system.mode": "buffered", "system.concurrency": 5}
    experiment, data = resolve(load(SETTINGS | keys | buffered), CustomObjects(small_source()))
    end = schedule_of(clock_of(experiment, data), np.flatnonzero(data.sizes())).update(rounds).time
    assert usual_length(experiment, data) == pytest.approx(end, rel=near)
    if hours in (None, EVENINGS):
        assert usual_round(experiment, data)["virtual_seconds"] == pytest.approx(10)


def test_a_usual_round_is_what_rounds_take():
    """But for the samples of the server's steps, which are a mean."""
    keys = {
        "system.flops_per_second": {"lognormal": [1e6, 1.0]}, "system.dropout": 0.2, "system.watts": 3,
        "system.deadline_seconds": 1, "system.server_flops_per_second": 1e6, "algorithm.name": "pfedmo",
    }  # fmt: skip
    experiment, data = resolve(load(SETTINGS | keys), CustomObjects(source=small_source()))
    usual = usual_round(experiment, data)
    rows = simulate(SETTINGS | keys | {"run.rounds": 20}, data=small_source()).metrics
    assert usual["virtual_seconds"] == pytest.approx(rows.virtual_seconds.iloc[-1] / 20, rel=0.05)
    assert usual["joules"] == pytest.approx(rows.joules.iloc[-1] / 20)
