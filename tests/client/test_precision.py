"""train.precision on GPUs, as far as a machine without one can tell: what is set, refused, decided and said."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from fedray import UserError, evaluate, simulate
from fedray.config import load
from fedray.core.precision import autocast
from fedray.core.task import Task
from fedray.core.torch_state import neutral
from fedray.engine.process import computing_process, require_device
from fedray.experiment.custom import CustomObjects
from fedray.experiment.experiment import Experiment
from fedray.experiment.placement import Surroundings
from fedray.experiment.resolve import resolve
from fedray.gradients.direct_linear import LEAST
from fedray.gradients.loop import LoopNetwork
from fedray.models.precision import DOCUMENTED, faster_precision
from fedray.testing.contracts import small_source

KEYS = {"algorithm.name": "fedavg", "model.name": "mlp", "data.clients": 3, "run.rounds": 1, "engine.vectorize": False}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def on(device: str, **changes: Any) -> Experiment:
    """Returns an experiment that is made for a cluster that has ``device``."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return resolve(load(KEYS | named), CustomObjects(small_source()), Surroundings(lambda folder: device))[0]


def switches() -> tuple[Any, ...]:
    general: str | None = None
    with contextlib.suppress(RuntimeError):
        general = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn
    newer = [getattr(getattr(cudnn, unit, None), "fp32_precision", None) for unit in ("conv", "rnn")]
    return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, general, newer


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_products_are_rounded_while_a_run_in_tf32_lasts(before, precision):
    torch.set_float32_matmul_precision(before)
    try:
        former = switches()
        with computing_process(1, False, precision):
            assert switches()[:2] == (precision == "tf32",) * 2
            # as beside a callback
            with neutral():
                assert switches()[:2] == (precision == "tf32",) * 2
        assert switches() == former
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_pass_in_tf32_is_one_in_float32():
    module = nn.Sequential(nn.Linear(LEAST, 1))
    assert isinstance(autocast(torch.device("cpu"), "tf32"), contextlib.nullcontext)
    assert autocast(torch.device("cpu"), "bf16").fast_dtype is torch.bfloat16
    # large layers write their gradients where these are wanted, as in fp32
    pays = {each: LoopNetwork(module, Task(), precision=each)._direct is not None for each in ("tf32", "bf16")}
    assert pays == {"tf32": True, "bf16": False}


REFUSED = "train.precision=tf32 is for GPUs, and clients are trained on a CPU here: use fp32 or bf16"


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_a_cpu_has_no_tf32(kind, tmp_path):
    keys = {"train.precision": "tf32", "engine.kind": kind, "engine.device": "cpu", "run.output": str(tmp_path)}
    with pytest.raises(UserError, match=REFUSED):
        simulate(KEYS | keys, data=small_source())
    assert not list(tmp_path.iterdir())


def test_an_evaluation_of_a_model_from_a_gpu_says_what_a_cpu_takes(tmp_path):
    """The evaluation is in the precision of the run, as the run's own."""
    run = simulate(KEYS | {"engine.kind": "local", "run.output": str(tmp_path)}, data=small_source())
    resolved = run.folder / "config.yaml"
    resolved.write_text(resolved.read_text().replace("precision: fp32", "precision: tf32"))
    with pytest.raises(UserError, match=REFUSED):
        evaluate(run.folder, data=small_source(), overrides=["engine.device=cpu"])
    found = evaluate(run.folder, data=small_source(), overrides=["engine.device=cpu", "train.precision=fp32"])
    assert found.model_sha256 == run.summary["model_sha256"]


def test_a_gpu_without_tf32_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "V100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 0))
    require_device("cuda", "fp16")
    with pytest.raises(UserError, match=r"tf32: V100 on .* has no TF32, .*: use fp32 or fp16"):
        require_device("cuda", "tf32")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    require_device("cuda", "tf32")


def test_tf32_is_part_of_the_result():
    found = on("cuda", train__precision="tf32")
    assert found.config.train.precision == "tf32"
    assert "train.precision" in found.hyper_parameters


def line_of(found: Experiment) -> list[str]:
    return [note for note in found.notes if "train.precision=fp32" in note]


def test_what_a_gpu_could_do_faster_is_told():
    large = {"model__hidden": [4000], "train__batch_size": 512}
    (line,) = line_of(on("cuda", **large))
    assert "tf32 or bf16" in line
    assert DOCUMENTED in line
    assert not line.startswith("warning: ")
    # it has been chosen, it would not matter, and there is no GPU
    assert line_of(on("cuda", **large, train__precision="fp32")) == []
    assert line_of(on("cuda", model__name="logistic")) == []
    assert line_of(on("cpu", **large)) == []


def test_a_gpu_of_this_machine_that_has_no_other_precision(monkeypatch):
    train = load(KEYS).train
    assert faster_precision(train, "cuda", 1e9)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 0))
    assert faster_precision(train, "cuda", 1e9) is None


@NO_GPU
def test_a_gpu_that_is_not_there_is_told_first(tmp_path):
    keys = {"train.precision": "tf32", "engine.kind": "local", "engine.device": "cuda", "run.output": str(tmp_path)}
    with pytest.raises(UserError, match=r"engine\.device=cuda: there is no usable GPU here"):
        simulate(KEYS | keys, data=small_source())
