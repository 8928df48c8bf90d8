"""Too little memory: one line with the sum, and what would fit; how many actors share a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedray import UserError
from fedray.config import load
from fedray.engine.memory import Footprint, activations, is_out_of_memory, processes_per_gpu
from fedray.engine.ray import gpu_sharing
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.gradients.loop import LoopNetwork
from fedray.testing.contracts import small_source

GB = 10**9
CARD = Footprint("a card", context=1 * GB, chunk=2 * GB, free=20 * GB, total=24 * GB)

# a chunk of clients that needs more memory than the process may have
HUNGRY = """
import resource, sys
from fedray.cli.main import main
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
import torch, fedray.api
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 1_500_000_000,) * 2)
sys.exit(main(["run", "algorithm.name=fedavg", "model.name=mlp", "model.hidden=[4096]", "data.clients=64",
    "engine.kind=local", "engine.device=cpu", "engine.vectorize=true", "engine.chunk=" + sys.argv[1],
    "train.local_steps=1", "run.rounds=1", "run.output=" + sys.argv[2], "run.resume=false"]))
"""


@pytest.mark.slow
def test_a_chunk_that_does_not_fit(tmp_path):
    """The sum is shown, and what is proposed does fit."""
    done = subprocess.run([sys.executable, "-c", HUNGRY, "64", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    found = re.search(
        r"out of memory on the CPU: 64 clients at once x about ([\d.]+) MB \(vectors ([\d.]+) MB, activations of \d+ "
        r"samples and their gradients ([\d.]+) MB\) = ([\d.]+) GB, and .* are free .*; engine.chunk=(\d+) may fit",
        line,
    )
    assert found, line
    each, vectors, kept, whole = (float(number) for number in found.groups()[:4])
    assert each == pytest.approx(vectors + kept, abs=2)
    assert whole == pytest.approx(64 * each / 1000, rel=0.02)
    # five vectors of 784 x 4096 + 4096 x 10 weights and biases
    assert vectors == pytest.approx(5 * 4 * (785 * 4096 + 4097 * 10) / 1e6, abs=1)
    assert int(found[5]) < 64
    smaller = subprocess.run([sys.executable, "-c", HUNGRY, found[5], str(tmp_path)], capture_output=True, text=True)
    assert smaller.returncode == 0, smaller.stderr


def test_activations_are_what_autograd_keeps():
    network = LoopNetwork(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4)))
    # the input, and the output of the ReLU, which the next layer keeps too
    assert activations(network, torch.zeros(8, 10)) == 4 * 8 * (10 + 32)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("footprint", "cpus", "expected"),
    [
        (CARD, 16, 4),
        (CARD, 2, 2),
        (CARD, 0.5, 1),
        (replace(CARD, chunk=8 * GB), 16, 2),
        # one is always tried: it says itself if it has too little
        (replace(CARD, chunk=40 * GB), 16, 1),
    ],
)
def test_as_many_actors_share_a_gpu_as_fit_and_help(footprint, cpus, expected):
    assert processes_per_gpu(footprint, cpus, 4) == expected


def experiment(**engine):
    keys = {"algorithm.name": "fedavg", "model.name": "logistic", "data.clients": 4, "engine.device": "cuda"}
    keys |= {f"engine.{key}": value for key, value in engine.items()}
    return resolve(load(keys), CustomObjects(source=small_source()))[0]


@pytest.fixture
def card(monkeypatch):
    """A GPU that there is not: what an actor on one would measure is given, and what Ray has."""
    monkeypatch.setattr(gpu_sharing, "_measured", lambda experiment, data: CARD)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 6, "GPU": 2})


def test_actors_share_a_gpu_by_themselves(card):
    said: list[str] = []
    found = gpu_sharing.shared_gpus(experiment(actors_per_gpu="auto"), None, said.append)
    assert found.config.engine.actors_per_gpu == 3
    assert said[-1] == (
        "engine.actors_per_gpu=3: 3 x 3 GB (context and data 1 GB, a chunk 2 GB) = 9 GB of 20 GB free on a card"
    )
    assert not any("busy" in line for line in said)


@pytest.mark.parametrize("engine", [{"actors_per_gpu": 8}, {"gpus_per_actor": 0.125}])
def test_more_actors_than_fit_are_refused_with_the_sum(engine, card):
    with pytest.raises(UserError) as caught:
        gpu_sharing.shared_gpus(experiment(**engine), None, lambda line: None)
    assert str(caught.value) == (
        "engine.actors_per_gpu=8 does not fit: 8 x 3 GB (context and data 1 GB, a chunk 2 GB) = 24 GB of 20 GB free on "
        "a card; engine.actors_per_gpu=6 does"
    )


def test_a_busy_gpu_is_noticed(monkeypatch, card):
    monkeypatch.setattr(gpu_sharing, "_measured", lambda experiment, data: replace(CARD, free=12 * GB))
    said: list[str] = []
    gpu_sharing.shared_gpus(experiment(actors_per_gpu=2), None, said.append)
    assert said[-1] == "warning: a card is busy: 12 GB of its 24 GB were taken before this run"


@pytest.mark.gpu
def test_what_an_actor_takes_of_a_gpu():
    """Device memory does not grow with rounds either."""
    from pathlib import Path

    from fedray.engine.clients import Clients
    from fedray.engine.process import computing_process
    from fedray.engine.ray.gpu_sharing import footprint_of
    from fedray.engine.state.states import StateFolder

    keys = {"algorithm.name": "fedavg", "model.name": "mlp", "engine.kind": "local", "engine.device": "cuda"}
    found, data = resolve(load(keys), CustomObjects(source=small_source()))
    with computing_process(1, False):
        clients = Clients(found, data, StateFolder(Path("unused")), "cuda")
        first = footprint_of(clients)
        again = footprint_of(clients)
    assert 0 < first.chunk < first.free < first.total
    assert again.chunk <= first.chunk
