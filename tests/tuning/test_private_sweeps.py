"""Sweeps of private runs: epsilon as an environment, as an objective, and in the table."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from small_sweeps import opened
from sweeps_on_ray import described

from fedray import UserError
from fedray.config import flat, read_file
from fedray.privacy.accountant import noise_for
from fedray.testing.contracts import small_source
from fedray.tuning import tune
from fedray.tuning.report import trial_table, write_report
from fedray.tuning.spec import read_sweeps

pytestmark = pytest.mark.filterwarnings("ignore::fedray.FedrayWarning")


@pytest.mark.slow
def test_epsilon_as_an_environment(tmp_path: Path, ray_cluster: None) -> None:
    """A sweep for each epsilon, whose trials have the noise that it needs; the table says what was spent."""
    space = described({"privacy.clip": {"loguniform": [0.1, 1.0]}}, privacy__clip=0.5)
    space["environments"] = {"privacy.epsilon": [2, 8]}
    found = tune(space, [f"tune.output={tmp_path}", "tune.name=s", "tune.trials=1"], data=small_source())
    for result, epsilon in zip(found, (2, 8), strict=True):
        assert result.folder.name == f"epsilon-{epsilon}"
        table = trial_table(result.folder)
        assert table.state.tolist() == ["complete"]
        assert table.epsilon.tolist() == pytest.approx([epsilon], rel=0.01)
        assert (table.epsilon <= epsilon).all()
        assert flat(read_file(result.best[0]))["privacy.epsilon"] == epsilon
        made = flat(read_file(result.folder / "trials/0000/seed-0/config.yaml"))
        assert made["privacy.noise"] == noise_for(epsilon, 5 / 9, 1e-5, "pld", 5)
        write_report(*read_sweeps(result.folder))
        shown = pd.read_csv(result.folder / "report/trials.csv")
        assert shown.epsilon.tolist() == table.epsilon.tolist()


@pytest.mark.slow
def test_epsilon_as_an_objective(tmp_path: Path, ray_cluster: None) -> None:
    """Less of it is better: a front of accuracy and privacy over the noise."""
    space = described({"privacy.noise": {"grid": [0.6, 1.2, 2.4]}}, privacy__clip=0.5, privacy__noise=1.0)
    words = ["tune.objective={validation_accuracy: max, epsilon: null}", f"tune.output={tmp_path}", "tune.name=s"]
    (result,) = tune(space, words, data=small_source())
    table = result.trials.sort_values("privacy.noise")
    assert len(table) == 3
    assert table.epsilon.is_monotonic_decreasing
    for row in table.itertuples():
        summary = json.loads((result.folder / f"trials/{row.trial:04d}/seed-0/summary.json").read_text())
        assert row.epsilon == pytest.approx(summary["epsilon"])
    assert json.dumps(read_file(result.folder / "sweep.yaml")["tune"]["objective"]["epsilon"]) == '"min"'
    # nobody beats the trial with the most noise in epsilon
    assert any(flat(read_file(path))["privacy.noise"] == 2.4 for path in result.best)


def test_less_epsilon_is_better(tmp_path: Path) -> None:
    words = ["tune.objective={validation_accuracy: null, epsilon: null}", "privacy.noise=1", "privacy.clip=1"]
    with opened(tmp_path, *words) as sweep:
        assert sweep.spec.tune.objective == {"validation_accuracy": "max", "epsilon": "min"}
    with (
        pytest.raises(UserError, match=r"tune\.objective: epsilon is not recorded without privacy"),
        opened(tmp_path / "other", "tune.objective={epsilon: min}"),
    ):
        pass
