"""FedNova's count of steps, FedExP's rate and q-FedAvg's weights, beyond their references."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from references_rules import sum_of_factors
from small_runs import run

from fedray import UserError, simulate
from fedray.algorithms.fednova import FedNova
from fedray.core.local_training import LocalTraining
from fedray.testing.contracts import small_source


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.99])
def test_what_steps_with_momentum_are_worth(rho, nesterov):
    steps = [1, 2, 7, 50]
    training = LocalTraining(0, momentum=rho, nesterov=nesterov)
    client = SimpleNamespace(J=torch.tensor(steps)[:, None].float(), optimizer=SimpleNamespace(training=training))
    expected = [sum_of_factors(count, rho, nesterov and rho > 0) for count in steps]
    assert FedNova().worth(client).flatten().tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["fedexp", "qfedavg"])
def test_lengths_of_uploads_do_not_go_with_steps_that_change_them(name, tmp_path):
    (tmp_path / "sending.py").write_text("def half(rows, upload):\n    return rows / 2\n")
    with pytest.raises(UserError, match=f"clients of {name} send numbers besides models and vectors"):
        run(tmp_path, algorithm=name, train__upload=[f"{tmp_path}/sending.py:half"])


def test_clients_that_agree_are_not_extrapolated(tmp_path):
    """If all move alike, FedExP's ratio is a half, and its step is FedAvg's."""
    source = small_source()
    keys = {"train__batch_size": "full", "train__local_epochs": None, "train__local_steps": 2, "data__clients": None}
    keys |= {"data__partition__kind": None, "train__cohort_size": 3, "data__public_samples": None}
    alike = {"data": [(source.x_train, source.y_train)] * 3, "call": {"test": (source.x_test, source.y_test)}}
    fedexp = run(tmp_path / "fedexp", algorithm="fedexp", algorithm__average_last=False, **keys, **alike)
    fedavg = run(tmp_path / "fedavg", **keys, **alike)
    assert fedexp.metrics.test_loss.tolist() == pytest.approx(fedavg.metrics.test_loss.tolist(), rel=1e-6)


def test_a_loss_to_a_high_power_does_not_vanish(tmp_path):
    made = run(tmp_path, algorithm="qfedavg", algorithm__q=15.0, train__weighting="uniform")
    assert np.isfinite(made.metrics.test_loss).all()


def test_a_client_of_many_steps_does_not_count_more(tmp_path):
    """Two clients whose gradients are constant, of opposite directions and one and nine steps: FedNova stays where it
    is, and FedAvg does not."""
    x, y = np.ones((10, 1), np.float32), np.array([1.0] + [-1.0] * 9, np.float32)
    keys = {
        "data.partition.kind": "natural", "task.kind": "regression", "model.name": "linear", "model.init": "zeros",
        "train.batch_size": 1, "train.local_steps": None, "train.local_epochs": 1, "train.weighting": "uniform",
        "train.lr": 1e-4, "run.rounds": 1, "run.output": str(tmp_path), "engine.kind": "local",
    }  # fmt: skip
    data = (x, y, np.array([0] + [1] * 9))
    moved = {}
    for name in ("fedavg", "fednova"):
        made = simulate(keys | {"algorithm.name": name}, data=data, test=(x, y))
        moved[name] = float(sum(abs(each).sum() for each in made.model().parameters()))
    assert 0 < moved["fednova"] < 0.02 * moved["fedavg"]


@pytest.mark.parametrize(("name", "weighting"), [("qfedavg", "samples"), ("fedproto", "uniform")])
def test_weights_that_the_rule_does_not_use_are_told(name, weighting, tmp_path):
    plain = run(tmp_path / "plain", algorithm=name)
    told = run(tmp_path / "told", algorithm=name, train__weighting=weighting)
    assert f"train.weighting={weighting} changes nothing: the rule of {name}" in (told.folder / "log.txt").read_text()
    assert told.summary["model_sha256"] == plain.summary["model_sha256"]
