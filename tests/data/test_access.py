"""Samples in memory, mapped from files, and read when they are used: the same bits, wherever they are."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import python
from torch import Tensor, nn

from fedray import UserError, simulate
from fedray.core.samples import Samples
from fedray.tracking.result import RunResult

CLIENTS, SAMPLES, TESTS = 9, 180, 60
SETTINGS = {
    "algorithm.name": "scaffold", "run.rounds": 4, "engine.kind": "local", "train.batch_size": 5,
    "train.local_steps": 6, "train.cohort_size": 5, "run.checkpoint_every": 1, "run.eval_clients": "all",
}  # fmt: skip


class Images:
    """A Dataset of small images of bytes, each made from its number when it is read."""

    def __init__(self, start: int, count: int, noise: bool = False, fail_at: int | None = None) -> None:
        self.start, self.count, self.noise, self.fail_at = start, count, noise, fail_at
        self.targets = np.arange(start, start + count) % 4
        self.clients = [f"phone {i % CLIENTS}" for i in range(count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if i == self.fail_at:
            raise OSError("the disk is gone")
        drawn = np.random.default_rng(self.start + i).integers(0, 200, (1, 6, 6))
        drawn += 10 * int(self.targets[i])
        if self.noise:
            drawn += random.randrange(10) + np.random.randint(10) + int(torch.randint(10, ()))  # noqa: NPY002
        return drawn.astype(np.uint8), int(self.targets[i])


class Dropping(nn.Module):
    """Draws from torch's global generator while the next samples are read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def run(folder: Path, access: str, noise: bool = False, callbacks: Any = (), **keys: Any) -> RunResult:
    settings = {**SETTINGS, "run.output": str(folder), "data.access": access, "run.name": "run"}
    settings |= {key.replace("__", "."): value for key, value in keys.items()}
    data, test = Images(0, SAMPLES, noise), Images(SAMPLES, TESTS, noise)
    return simulate(settings, data=data, test=test, model=Dropping, callbacks=callbacks)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """An unbroken run with all samples in memory."""
    return run(tmp_path_factory.mktemp("whole"), "memory")


def assert_same(a: RunResult, b: RunResult) -> None:
    assert a.summary["model_sha256"] == b.summary["model_sha256"]
    times = ["round_seconds", "wall_seconds"]
    assert a.metrics.drop(columns=times).equals(b.metrics.drop(columns=times))
    assert a.evaluation.equals(b.evaluation)


@pytest.mark.parametrize("access", ["mapped", "lazy"])
def test_the_same_bits_as_in_memory(access, whole, tmp_path):
    assert_same(whole, run(tmp_path, access))


QUICK = {("lazy", 2)}
"""What is tested on actors every time; the contract tests have samples in memory."""


@pytest.mark.parametrize(
    ("access", "actors"),
    [
        pytest.param(access, actors, marks=() if (access, actors) in QUICK else pytest.mark.slow)
        for access in ("memory", "mapped", "lazy")
        for actors in (1, 2, 3)
    ],
)
def test_on_actors(access, actors, whole, tmp_path, ray_cluster):
    found = run(tmp_path, access, engine__kind="ray", engine__actors=actors, engine__cpus_per_actor=0.5)
    assert_same(whole, found)


@pytest.mark.slow
@pytest.mark.parametrize("access", [pytest.param("mapped", marks=pytest.mark.slow), "lazy"])
def test_actors_that_are_killed(access, whole, tmp_path, ray_cluster):
    """After each of two rounds: what an actor read, or held mapped, is with it gone."""
    killed: list[int] = []

    def kill(report: Any) -> None:
        if report.round in (1, 2):
            log = (tmp_path / "run" / "log.txt").read_text()
            killed.append(next(p for p in map(int, re.findall(r"client actor: pid (\d+)", log)) if p not in killed))
            os.kill(killed[-1], signal.SIGKILL)

    onray = {"engine__kind": "ray", "engine__actors": 2, "engine__cpus_per_actor": 0.5}
    assert_same(whole, run(tmp_path, access, callbacks=[kill], **onray))
    assert len(set(killed)) == 2
    assert "a client actor died" in (tmp_path / "run" / "log.txt").read_text()


KILLED = """
import os, signal, sys
from pathlib import Path
from test_access import run

def die(report):
    if report.round == 2:
        os.kill(os.getpid(), signal.SIGKILL)

run(Path(sys.argv[1]), sys.argv[2], callbacks=[die])
"""


@pytest.mark.parametrize("access", ["mapped", "lazy"])
def test_killed_by_sigkill_and_resumed(access, whole, tmp_path):
    assert python(KILLED, str(tmp_path), access).returncode == -signal.SIGKILL
    resumed = run(tmp_path, access)
    assert "resuming" in (resumed.folder / "log.txt").read_text()
    assert_same(whole, resumed)


def test_random_transforms_differ_from_round_to_round_and_repeat_exactly(tmp_path, capsys):
    one, other = (run(tmp_path / name, "auto", noise=True) for name in ("one", "other"))
    assert_same(one, other)
    frozen = run(tmp_path / "frozen", "lazy")
    assert frozen.summary["model_sha256"] != one.summary["model_sha256"]
    assert (
        run(tmp_path / "seed", "auto", noise=True, run__seed=1).summary["model_sha256"] != one.summary["model_sha256"]
    )


def test_random_items_are_not_frozen(tmp_path):
    with pytest.raises(UserError, match=r"item \d+ of data differs when it is read again.*use data.access=lazy"):
        run(tmp_path, "memory", noise=True)


def folders(tmp_path: Path) -> list[Path]:
    """The cache's folders of mapped arrays, whole or not."""
    return [path for path in (tmp_path / "cache" / "fedray" / "mapped").iterdir() if path.is_dir()]


def test_mapped_arrays_are_written_once(whole, tmp_path):
    run(tmp_path / "one", "mapped")
    (folder,) = folders(tmp_path)
    files = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {"x.npy", "y.npy", "x_test.npy", "y_test.npy"} < set(files)
    assert_same(whole, run(tmp_path / "other", "mapped"))
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == files


@pytest.mark.parametrize("spoil", ["cut", "byte", "version", "nothing", "list"])
def test_a_damaged_cache(spoil, tmp_path):
    run(tmp_path / "one", "mapped")
    (folder,) = folders(tmp_path)
    if spoil == "cut":
        (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes()[:-10])
    elif spoil == "byte":
        content = bytearray((folder / "x.npy").read_bytes())
        content[-1] ^= 1
        (folder / "x.npy").write_bytes(content)
    elif spoil == "list":
        (folder / "columns.json").write_text('{"format": 2}')
    elif spoil == "version":
        (folder / "columns.json").write_text('{"format": 0}')
    else:
        (folder / "x.npy").unlink()
    wanted = {
        "cut": "is not as it was made", "byte": "is not as it was made", "version": "another version of fedray",
        "nothing": r"x\.npy is not on", "list": "is damaged",
    }[spoil]  # fmt: skip
    with pytest.raises(UserError, match=wanted):
        run(tmp_path / "other", "mapped")


def test_a_full_disk(tmp_path, monkeypatch):
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    with pytest.raises(UserError, match=r"data.access=mapped needs .* GB in .*, where 0 GB are free"):
        run(tmp_path, "mapped")
    assert not folders(tmp_path)


def test_an_item_that_can_not_be_read_names_itself(tmp_path):
    settings = {**SETTINGS, "run.output": str(tmp_path), "data.access": "lazy", "train.cohort_size": CLIENTS}
    with pytest.raises(Exception, match=r"item 100 of data can't be read: OSError: the disk is gone"):
        simulate(settings, data=Images(0, SAMPLES, fail_at=100), test=Images(SAMPLES, TESTS), model=Dropping)


class Uneven(Images):
    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        x, y = super().__getitem__(i)
        return (x[:, :5] if i == 100 else x), y


def test_an_item_of_another_shape_names_itself(tmp_path):
    settings = {**SETTINGS, "run.output": str(tmp_path), "data.access": "lazy", "train.cohort_size": CLIENTS}
    with pytest.raises(Exception, match=r"item 100 of data has shape \[1, 5, 6\] \(uint8\), the first one \[1, 6, 6\]"):
        simulate(settings, data=Uneven(0, SAMPLES), test=Images(SAMPLES, TESTS), model=Dropping)


def test_clients_of_a_dataset_are_the_runs(whole):
    assert set(whole.evaluation["client_name"]) == {f"phone {i}" for i in range(CLIENTS)}


def test_other_items_are_another_run(tmp_path):
    run(tmp_path, "lazy")
    settings = {**SETTINGS, "run.output": str(tmp_path), "data.access": "lazy", "run.name": "run"}
    with pytest.raises(UserError, match=r"holds another run \(training data differs"):
        simulate(settings, data=Images(7, SAMPLES), test=Images(SAMPLES, TESTS), model=Dropping)


def test_where_samples_lie_does_not_make_another_run(whole, tmp_path):
    run(tmp_path, "memory", run__rounds=2)
    assert_same(whole, run(tmp_path, "mapped"))
    with pytest.raises(UserError, match=r"data.access=lazy is for a torch Dataset"):
        simulate({**SETTINGS, "run.output": str(tmp_path / "b"), "data.access": "lazy"})


def test_samples_that_stay_where_they_are_go_to_another_device_when_they_are_chosen():
    """The device `meta` has shapes without numbers, so that it stands for a GPU where there is none."""
    x, y, scale = torch.zeros(20, 3, 4, dtype=torch.uint8), torch.arange(20), torch.ones(3, device="meta")
    samples = Samples(x, y, scale, scale, torch.device("meta"))
    assert samples.slow
    inputs, targets = samples.gather(np.arange(6).reshape(2, 3))
    assert (inputs.device.type, inputs.shape, inputs.dtype) == ("meta", (2, 3, 3, 4), torch.float32)
    assert (targets.device.type, targets.shape) == ("meta", (2, 3))
    assert not Samples(x, y, None, None, torch.device("cpu")).slow


class OfItsOwnGenerator(Images):
    """A Dataset whose transform draws from a generator that nobody can seed."""

    def __init__(self, start: int, count: int) -> None:
        super().__init__(start, count)
        self.rng = np.random.default_rng(1)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        x, y = super().__getitem__(i)
        return x + self.rng.integers(0, 9, x.shape, dtype=np.uint8), y


@pytest.mark.parametrize("access", ["auto", "memory", "mapped", "lazy"])
def test_items_that_draw_from_a_generator_of_their_own_are_refused(tmp_path, access):
    with pytest.raises(UserError, match=r"item 0 of data differs when it is read again with the same random numbers"):
        simulate(
            SETTINGS | {"data.access": access, "run.output": str(tmp_path)},
            data=OfItsOwnGenerator(0, SAMPLES), test=Images(SAMPLES, TESTS),
        )  # fmt: skip
