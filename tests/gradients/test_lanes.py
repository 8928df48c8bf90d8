"""Clients side by side on a GPU: the bits are those of one client after another.

Without a GPU the graphs are imitated by the recorded operations themselves, so that all but the capture is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedray
from fedray.algorithms.base import Result, Upload
from fedray.algorithms.fedavg import FedAvg
from fedray.core.batches import Batch
from fedray.engine.cutting import cut_into_tasks
from fedray.experiment.experiment import Experiment
from fedray.gradients.lanes import SideBySide
from fedray.gradients.loop import LoopNetwork
from fedray.gradients.network import Network
from fedray.gradients.rows import RowByRow

UNEVEN = (9, 20, 33, 12, 41, 28)


class Imitated:
    """Lanes without a GPU. ``sizes`` are the numbers of clients of the graphs that were captured."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def capture(self, function: Any, rows: Sequence[Any]) -> Any:
        self.sizes.append(len(rows))
        return lambda rows: tuple(map(torch.stack, zip(*(function(*row) for row in rows), strict=True)))


@pytest.fixture
def imitated(monkeypatch):
    """Makes runs on a CPU have ``lanes``, a number that a test sets, with imitated graphs."""
    lanes = Imitated()

    def replay(self: Network, count: int = 1, say: Any = print) -> None:
        changing = [*self._trainable, *self._buffers.values()]
        self.recorded = SideBySide(self.recordable_gradient, changing, lanes, say)  # type: ignore[arg-type]

    def begin(count: int) -> Imitated:
        monkeypatch.setattr(Experiment, "lanes", count)
        monkeypatch.setattr(Network, "replay", replay)
        return lanes

    return begin


def trained(tmp_path, device="cpu", algorithm=None, model=None, **settings) -> str:
    """Returns the sha256 of the model of a small run, with clients of different sizes."""
    rng = np.random.default_rng(0)
    count = sum(UNEVEN)
    x, y = rng.integers(0, 256, (count, 1, 28, 28)).astype(np.uint8), rng.integers(0, 10, count)
    keys = {
        "algorithm.name": "fedavg", "engine.kind": "local", "engine.device": device, "engine.vectorize": False,
        "engine.replay": True, "train.local_epochs": 2, "train.batch_size": 8, "run.rounds": 3,
        "run.eval_every": 0, "run.output": str(tmp_path / str(len(list(tmp_path.iterdir())))),
    }  # fmt: skip
    if model is None:
        keys["model.name"] = "lenet5"
    result = fedray.simulate(
        keys | {name.replace("__", "."): value for name, value in settings.items()},
        data=(x, y, np.repeat(np.arange(len(UNEVEN)), UNEVEN)), test=(x[:10], y[:10]), algorithm=algorithm,
        model=model,
    )  # fmt: skip
    return result.summary["model_sha256"]


CASES = {
    "fedavg": {},
    "scaffold": {"algorithm__name": "scaffold"},
    "fedtrip with momentum": {"algorithm__name": "fedtrip", "train__momentum": 0.9},
    "fedhbm": {"algorithm__name": "fedhbm", "algorithm__variant": "random"},
    "clipped": {"train__grad_clip": 0.1},
    "adam": {"train__optimizer": "adam", "train__lr": 0.001},
    "equal steps": {"train__local_epochs": None, "train__local_steps": 5},
    "fedper": {"algorithm__name": "fedper"},
    "fedrep": {"algorithm__name": "fedrep", "algorithm__head_steps": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_lanes_change_no_bit(case, tmp_path, imitated):
    alone = trained(tmp_path, **CASES[case])
    lanes = imitated(4)
    assert trained(tmp_path, **CASES[case]) == alone
    assert max(lanes.sizes) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_lanes_of_a_gpu_change_no_bit(case, tmp_path):
    shas = {trained(tmp_path, "cuda", engine__lanes=lanes, **CASES[case]) for lanes in (1, 3, 8)}
    assert len(shas) == 1
    assert trained(tmp_path, "cuda", engine__replay=False, **CASES[case]) in shas


class Normed(FedAvg):
    """It divides by a length of all clients' rows at once, whose bits may depend on how many they are."""

    name = "normed"

    def end(self, client: Any, carry: Any) -> Result:
        y = carry["y"]
        return Result(uploads={"y": Upload.weighted_mean(y - y.parameters / y.parameters.norm(dim=1, keepdim=True))})


def said(tmp_path: Path) -> list[str]:
    """Returns the lines of the last run's log."""
    return max(tmp_path.glob("*/*/log.txt"), key=lambda path: path.stat().st_mtime).read_text().splitlines()


def test_a_rule_that_mixes_a_row_is_computed_client_by_client(tmp_path, imitated):
    alone = trained(tmp_path, algorithm=Normed)
    imitated(4)
    assert trained(tmp_path, algorithm=Normed) == alone
    (line,) = [line for line in said(tmp_path) if "engine.lanes: one client after another is trained on " in line]
    assert line.endswith(
        " from now on, because the algorithm's rule computes linalg_vector_norm of all their rows at once "
        "(fedray.gradients.rows.by_rows computes it of each row)"
    )


class Looking(nn.Module):
    """Its operations depend on values."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(784, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


def test_a_model_that_can_not_be_captured_is_told(tmp_path, imitated):
    alone = trained(tmp_path, model=Looking)
    imitated(4)
    assert trained(tmp_path, model=Looking) == alone
    assert any("can't be captured" in line and "looks at values" in line for line in said(tmp_path))


def test_too_many_lanes_for_the_memory_become_fewer(tmp_path, imitated, monkeypatch):
    alone = trained(tmp_path)
    lanes = imitated(4)
    capture = lanes.capture

    def small(function: Any, rows: Sequence[Any]) -> Any:
        if len(rows) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return capture(function, rows)

    monkeypatch.setattr(lanes, "capture", small)
    assert trained(tmp_path) == alone
    assert max(lanes.sizes) == 2


def test_a_recording_that_is_wrong_is_given_up(tmp_path, imitated, monkeypatch):
    alone = trained(tmp_path)
    lanes = imitated(4)

    def wrong(function: Any, rows: Sequence[Any]) -> Any:
        return lambda rows: tuple(2 * torch.stack(each) for each in zip(*(function(*row) for row in rows), strict=True))

    monkeypatch.setattr(lanes, "capture", wrong)
    assert trained(tmp_path) == alone


def test_what_keeps_rows_apart():
    def found(rule: Any) -> str | None:
        from fedray.core.stopwatch import Stopwatch

        watch = RowByRow(3, Stopwatch())
        x = torch.randn(3, 64)
        with watch:
            rule(x)
        return watch.found

    assert found(lambda x: torch.where(x > 0, x * 2, x[:, :1]) - x.mean()[None]) == "mean"
    assert found(lambda x: (x.lerp(x + 1, 0.5).sqrt() / torch.ones(3, 1)).clone().view(-1)) is None
    assert found(lambda x: x.norm(dim=1)) == "linalg_vector_norm"
    assert found(lambda x: x @ torch.ones(64, 2)) == "mm"
    assert found(lambda x: torch.cat([row.norm(dim=1) for row in x.split(1)])) is None


def test_no_block_is_smaller_than_the_lanes():
    sizes = [stop - start for blocks in cut_into_tasks([1.0] * 64, 2, together=8) for start, stop in blocks]
    assert sum(sizes) == 64
    assert min(sizes) == 8


@pytest.mark.parametrize("through", ["gradients", "training_pass"])
def test_a_client_that_has_made_its_steps_keeps_its_buffers(through):
    # a single sample has six values for each channel, which change the statistics
    network = LoopNetwork(nn.Sequential(nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(18, 3)))
    at = network.loaded().rows(2)
    before = at.row.clone()
    batch = Batch(torch.randn(2, 5, 4, 6), torch.zeros(2, 5, dtype=torch.long), 3, [5, 0])
    getattr(network, through)(at, batch)
    assert torch.equal(at.row[1], before[1])
    assert not torch.equal(at.row[0], before[0])
