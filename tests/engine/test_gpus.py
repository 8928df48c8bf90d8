"""GPUs where there are none: what is chosen, what is said, and what becomes of a GPU that torch can't use."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from fedray import UserError, simulate
from fedray.config import EngineConfig, load
from fedray.engine.determinism import deterministic, nondeterministic_operations
from fedray.engine.environment import PROCESS, environment
from fedray.experiment.custom import CustomObjects
from fedray.experiment.placement import Surroundings, device_of_cluster, place
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import small_source
from fedray.tracking.folder import device_of, keys_that_differ

FOLDER = Path("runs/run")
CHOSEN = "engine.device=auto: client actors share the GPUs of the cluster; engine.device=cpu trains on CPUs"

SETTINGS = {
    "algorithm.name": "fedavg",
    "model.name": "logistic",
    "data.clients": 3,
    "run.rounds": 1,
    "run.name": "run",
}


@pytest.mark.parametrize(
    ("keys", "has", "expected", "notes"),
    [
        ({}, "cpu", {"device": "cpu"}, ()),
        ({}, "cuda", {"device": "cuda", "actors_per_gpu": "auto"}, (CHOSEN,)),
        ({"device": "cpu"}, "cuda", {"device": "cpu"}, ()),
        ({"device": "cuda"}, "cpu", {"device": "cuda", "actors_per_gpu": "auto"}, ()),
        ({"actors_per_gpu": 2}, "cpu", {"device": "cuda"}, ()),
        ({"gpus_per_actor": 1}, "cuda", {"device": "cuda"}, ()),
        ({"actors_per_gpu": "auto"}, "cuda", {"device": "cuda"}, ()),
        ({"kind": "local"}, "cpu", {"device": "cpu"}, ()),
        ({"kind": "local", "device": "cpu"}, "cuda", {"device": "cpu"}, ()),
    ],
)
def test_where_clients_are_trained(keys, has, expected, notes):
    """``has``: what the cluster, or this machine, has."""
    device, chosen, said = place(EngineConfig(**keys), FOLDER, lambda folder: has)
    assert (device, chosen, said) == (expected["device"], expected, notes)


@pytest.mark.cpu
def test_a_local_gpu_that_is_not_there():
    with pytest.raises(UserError, match=r"engine\.device=cuda: there is no usable GPU here; use cpu"):
        place(EngineConfig(kind="local", device="cuda"), FOLDER, lambda folder: "cpu")


def test_on_a_cluster_with_gpus_all_is_resolved_for_them():
    experiment, _ = resolve(load(SETTINGS), CustomObjects(small_source()), Surroundings(lambda folder: "cuda"))
    assert experiment.device == "cuda"
    assert experiment.server_device == "cpu"
    assert experiment.vectorize
    assert experiment.config.engine.actors_per_gpu == "auto"
    assert CHOSEN in experiment.notes


@pytest.mark.parametrize(
    ("gpus", "is_this_machine", "usable", "device"),
    [
        (0, True, True, "cpu"),
        (1, True, True, "cuda"),
        (1, True, False, "cpu"),
        (0, False, True, "cpu"),
        (0.5, False, False, "cuda"),
        (8, False, True, "cuda"),
    ],
)
def test_what_auto_is_on_a_cluster(gpus, is_this_machine, usable, device, monkeypatch):
    """``usable``: what torch says of this machine, which may be a head without a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: usable)
    assert device_of_cluster(gpus, is_this_machine) == device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which torch can use")
@pytest.mark.slow
def test_a_gpu_that_ray_counts_and_torch_cannot_use(tmp_path):
    """It is on a node that is not the driver's, and asked for as one that works, up to where CUDA is needed."""
    program = [sys.executable, str(Path(__file__).parents[1] / "support" / "gpu_cluster.py"), str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if not line.startswith(("fedavg on", "round", "starting"))]
    refusal = (
        r"refused: engine.device=cuda: torch .* can't use a GPU on .*, though Ray counts one there: use .*=cpu, .*"
    )
    assert lines[:2] == [CHOSEN, "measuring what a client actor takes of a GPU ..."]
    assert len(lines) == 4
    assert all(re.fullmatch(refusal, line) for line in lines[2:])


def test_a_run_goes_on_where_it_began(tmp_path, monkeypatch):
    """A GPU that has come meanwhile is left alone, as its bits are others."""
    keys = SETTINGS | {"run.output": str(tmp_path), "engine.kind": "local"}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    simulate(keys, data=small_source())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    longer = simulate(keys | {"run.rounds": 2}, data=small_source())
    assert longer.summary["rounds"] == 2
    assert device_of(longer.folder) == "cpu"
    assert device_of(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("device", "before", "now", "differ"),
    [
        ("cuda", 0, 0.2, ["engine.server_gpus"]),
        ("cuda", 1, 0, ["engine.server_gpus"]),
        ("cuda", 0.2, 1, []),
        ("cpu", 0, 1, []),
    ],
)
def test_a_run_goes_on_with_the_server_where_it_was(device, before, now, differ):
    """A GPU may round the server's rule otherwise; how large its share is does not matter."""
    old, new = ({"engine": {"device": device, "server_gpus": share}} for share in (before, now))
    assert keys_that_differ(old, new) == differ


def switches():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        matmul.allow_tf32,
        cudnn.allow_tf32,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        warnings.showwarning,
        list(warnings.filters),
    )


def test_kernels_of_gpus_are_deterministic_while_a_run_lasts():
    before = switches()
    with deterministic():
        assert switches()[:6] == (":4096:8", False, False, False, True, True)
    assert switches() == before
    assert json.loads(environment(1, False)[PROCESS])["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="an older torch")
def test_settings_in_torchs_newer_words_are_put_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with deterministic():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


PUT = "put_ does not have a deterministic implementation"


def test_operations_without_a_deterministic_kernel_are_noted():
    x = torch.zeros(3)
    with warnings.catch_warnings(record=True) as others:
        with deterministic():
            x.put_(torch.tensor([1]), torch.tensor([1.0]))
            warnings.warn("something else", UserWarning, stacklevel=1)
        assert nondeterministic_operations() == (PUT,)
        assert nondeterministic_operations() == ()
    assert [str(other.message) for other in others] == ["something else"]


def put_loss(logits, targets):
    """Cross-entropy, with an operation that torch has no deterministic kernel for."""
    torch.zeros(3).put_(torch.tensor([1]), torch.tensor([1.0]))
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


@pytest.mark.parametrize("kind", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_run_that_meets_one_promises_no_bits(kind, tmp_path, ray_cluster):
    keys = {**SETTINGS, "run.output": str(tmp_path), "engine.kind": kind, "engine.cpus_per_actor": 0.1}
    plain = simulate(keys | {"run.name": "plain", "engine.actors": 1}, data=small_source())
    assert plain.summary["machine"]["bits_promised"]
    assert "nondeterministic" not in plain.summary["machine"]
    met = simulate(keys | {"engine.vectorize": False, "engine.actors": 2}, data=small_source(), loss=put_loss)
    assert not met.summary["machine"]["bits_promised"]
    assert met.summary["machine"]["nondeterministic"] == [PUT]
    assert f"warning: bits are not promised: {PUT}" in (met.folder / "log.txt").read_text()
