"""The models of a cohort's clients, evaluated on the test set before they are averaged (``run.eval_local_models``)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from small_runs import run
from torch import nn

from fedray import FedrayWarning, UserError
from fedray.algorithms import Result, Upload
from fedray.algorithms.fedavg import FedAvg
from fedray.testing.contracts import small_source

KEYS = {"run__rounds": 4, "run__eval_every": 2, "run__eval_local_models": True, "train__cohort_size": 3}
PICKLED = {"engine__kind": "fedray.testing.pickling:PicklingPool"}
COLUMNS = ["local_loss", "local_accuracy"]


@pytest.mark.parametrize("algorithm", ["fedavg", "pfedmo", "scaffold", "fedper"])
def test_they_are_the_means_over_saved_models(tmp_path, algorithm):
    """The reference loads the saved models into a module of its own, and evaluates them in float64."""
    made = run(tmp_path, algorithm, **KEYS, run__local_models_of=list(range(9)), run__local_models_in=[4])
    files = sorted((made.folder / "local").rglob("*.safetensors"))
    assert len(files) == 3
    source = small_source()
    x, y = torch.as_tensor(source.x_test).double(), torch.as_tensor(source.y_test)
    losses, right = [], []
    for file in files:
        module = made.model().double()
        module.load_state_dict({name: value.double() for name, value in load_file(file).items()})
        with torch.no_grad():
            logits = module(x)
        losses.append(nn.functional.cross_entropy(logits, y).item())
        right.append((logits.argmax(1) == y).double().mean().item())
    assert len({*losses}) == 3
    assert made.metrics.iloc[-1][COLUMNS].tolist() == pytest.approx([np.mean(losses), np.mean(right)], rel=1e-5)
    assert made.metrics[COLUMNS].notna().all(axis=1).tolist() == [False, True, False, True]


@pytest.mark.parametrize("keys", [{"engine__vectorize": True, "engine__chunk": 2}, PICKLED], ids=["vmap", "workers"])
def test_they_change_nothing_else(tmp_path, keys):
    plain = run(tmp_path / "plain", **KEYS | keys | {"run__eval_local_models": False})
    made, alone = run(tmp_path / "made", **KEYS, **keys), run(tmp_path / "alone", **KEYS)
    assert plain.summary["model_sha256"] == made.summary["model_sha256"]
    assert not {*COLUMNS} & {*plain.metrics}
    pd.testing.assert_frame_equal(made.metrics[COLUMNS], alone.metrics[COLUMNS], check_exact=keys is PICKLED)


class Still(FedAvg):
    """Sends back what it has received, without any local step."""

    def train(self, client):
        return Result({"y": Upload.weighted_mean(client.start("x"))})


def test_an_algorithm_that_trains_no_models_is_told(tmp_path):
    with pytest.warns(FedrayWarning, match=r"run\.eval_local_models: Still trains no models"):
        made = run(tmp_path, f"{__file__}:Still", **KEYS)
    assert made.metrics[COLUMNS].isna().all(axis=None)


def test_without_a_test_set_they_are_not_evaluated(tmp_path):
    keys = {"run__eval_test": False, "run__finetune_steps": 2, "data__validation_samples": 20}
    with pytest.warns(FedrayWarning, match="eval_local_models=true and run.finetune_steps=2: not evaluated"):
        made = run(tmp_path, **KEYS, **keys)
    assert not {*COLUMNS} & {*made.metrics}


def test_asynchronous_rounds_have_none(tmp_path):
    with pytest.raises(UserError, match=r"run\.eval_local_models is for clients of the same round, and system\.mode"):
        run(tmp_path, **KEYS, system__mode="buffered", system__latency_ms=5)
