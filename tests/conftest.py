"""Shared fixtures: one Ray for all tests that need one, gone when they end."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# what .ci/nightly asks for, where .ci/run has the same hundred examples every time; in a CI every night would, too
hypothesis.settings.register_profile("nightly", max_examples=1000, deadline=None, derandomize=False)

# without this, a failing assert in these helpers would not show its values
pytest.register_assert_rewrite("client_stacks", "partition_checks", "reference_runs", "traced_runs")
pytest.register_assert_rewrite("reference_problems", "representation_problems")
pytest.register_assert_rewrite("command_runs", "sweeps_on_ray")


RAY_FILES = tempfile.mkdtemp(prefix="fedray-")
"""Where Ray keeps its files, among them the address of the cluster that this node belongs to. Each pytest process has a
folder of its own, so that no test joins the cluster of another process, or one that the user has running."""

os.environ["RAY_TMPDIR"] = RAY_FILES


def pytest_unconfigure() -> None:
    shutil.rmtree(RAY_FILES, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files with most tests on Ray first. They are the slow ones; if they came last, one of two processes
    would wait for the other."""
    of_ray = Counter(item.path for item in items if "ray_cluster" in getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: -of_ray[item.path])


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """On a busy machine, threads that wait for each other make small steps ten times slower."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power, and waiting until files are on the disk is a quarter of the time of a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr("fedray.engine.state.checkpoint._flush", lambda folder: None)
        yield


@pytest.fixture(autouse=True)
def device_of_the_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips a test that is marked ``gpu`` where there is no GPU. Hides the GPUs from one that is marked ``cpu``, as it
    tells of what is so on CPUs, and from the processes that it starts."""
    import torch

    marks = {mark.name for mark in request.node.iter_markers()}
    if "gpu" in marks and not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    if "cpu" in marks and torch.cuda.is_available():
        # CUDA and torch read the variable once, and later tests of this process want their GPU back
        torch.cuda.init()
        torch.cuda.device_count()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def batches() -> Any:
    """Small batches of CIFAR-10, of different sizes."""
    from cifar_files import small_batches

    return small_batches()


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test's temporary folder the current one, so that `runs/` is made there."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_real_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the real data sets of this machine from the test."""
    monkeypatch.setenv("FEDRAY_DATA", str(tmp_path / "nowhere"))


@pytest.fixture
def without_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test's temporary folder the current one, with a cache of its own, and without a hub of Hugging Face."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # as without a network, but without waiting for one
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """Starts processes as ``subprocess.Popen`` does, and ends them, and what they have started, with the test."""
    from processes import end

    begun: list[subprocess.Popen[Any]] = []

    def popen(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        begun.append(subprocess.Popen(command, **options))
        return begun[-1]

    yield popen
    for process in begun:
        end(process)


def _toy(folder: Path, **changes: Any) -> Any:
    from reference_runs import make_data
    from references_momentum import Logistic

    data = make_data(folder / "toy.npz", **changes)
    return replace(data, problem=Logistic(**vars(data.problem)))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The problem that fedray and its references are compared on."""
    return _toy(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whichever samples of a client make a mini-batch, its gradient is that of all."""
    return _toy(tmp_path_factory.mktemp("alike"), alike=True)


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Everybody has one sample."""
    from reference_runs import SIZES

    return _toy(tmp_path_factory.mktemp("single"), sizes=[1] * len(SIZES))


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders that are compared: two algorithms at two alphas over three seeds."""
    from compared_runs import two_algorithms

    return two_algorithms(tmp_path_factory.mktemp("compared"))


@pytest.fixture
def runs(compared: Path, tmp_path: Path) -> Path:
    """A copy of ``compared`` that a test may change."""
    return Path(shutil.copytree(compared, tmp_path / "runs"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of this test session's own, with room for small fractions of two processors."""
    import ray

    from fedray.engine.environment import given_to_cluster

    with pytest.MonkeyPatch.context() as patch:
        # at Ray's default, a busy machine would starve the tests; and none uses processes that are started in advance
        for name in {"RAY_worker_niceness", "RAY_prestart_worker_first_driver"} - os.environ.keys():
            patch.setenv(name, "0")
        # as fedray starts one, so that actors start fast
        with given_to_cluster(1, False):
            ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
