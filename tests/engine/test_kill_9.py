"""Runs whose processes are killed with SIGKILL: the same command ends with the bits of an unbroken run."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import begun_at, descendants, environment, gone, kill_all, loaded, still_the_same, wait_for_rounds
from slow_runs import SLOW_ROUNDS, TIMED, every, slow_rounds
from small_runs import needs_compiler
from variants import BESIDE_A_RULE

from fedray import simulate
from fedray.testing.contracts import assert_same, small_source
from fedray.tracking.tables import read_metrics

FOUR = ("fedavg", "scaffold", "fedsiam_da", "pfedmo")
"""No state, vectors of state, whole models and two phases, training of the server's own."""
KILLED_AND_RESUMED = ("pfedmo",)
"""What is killed and resumed locally every time: states, models, and a queue of models at the server."""


def own_settings(folder: Path, algorithm: str, kind: str) -> list[str]:
    """The command that runs this file's problem as a program of its own."""
    settings = {**slow_rounds(algorithm), "run.output": str(folder), "engine.kind": kind}
    settings |= {"data.source": "problem:source", "data.partition.kind": "dirichlet", "run.name": "run"}
    if kind == "ray":
        settings |= {"engine.actors": 2, "engine.cpus_per_actor": 0.1, "engine.address": "local"}
    program = Path(sys.modules["fedray"].__path__[0]) / "run.py"
    return [sys.executable, str(program), *(f"{key}={value}" for key, value in settings.items())]


@pytest.fixture(scope="module")
def fresh() -> Any:
    """Starts processes that have fedray loaded and nothing else going on."""
    return loaded()


@pytest.mark.parametrize(
    ("algorithm", "compiled"),
    [
        *(pytest.param(*each.values, False, marks=each.marks) for each in every(KILLED_AND_RESUMED)),
        *(pytest.param(*each.values, True, marks=[*each.marks, needs_compiler]) for each in every([])),
    ],
)
def test_local_engine_resumed_after_kill_9(algorithm: str, compiled: bool, fresh: Any, tmp_path: Path) -> None:
    goes_on_after_kill_9({**slow_rounds(algorithm), "engine.compile": compiled}, fresh, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", TIMED)
def test_the_virtual_clock_goes_on_after_kill_9(mode: str, fresh: Any, tmp_path: Path) -> None:
    goes_on_after_kill_9(TIMED[mode], fresh, tmp_path)


@pytest.mark.slow
def test_what_a_robust_rule_gave_before_outlives_kill_9(fresh: Any, tmp_path: Path) -> None:
    settings = BESIDE_A_RULE["a rule that goes on from the round before, and wrong labels"]
    goes_on_after_kill_9({**slow_rounds("fedavg"), **settings}, fresh, tmp_path)


def goes_on_after_kill_9(config: dict[str, Any], fresh: Any, tmp_path: Path) -> None:
    config = {**config, "run.name": "run"}
    whole = simulate({**config, "run.output": str(tmp_path / "whole")}, data=small_source())
    config["run.output"] = str(tmp_path / "killed")
    process = fresh.Process(target=simulate, args=(config,), kwargs={"data": small_source()})
    process.start()
    try:
        wait_for_rounds(lambda: process.exitcode, tmp_path / "killed" / "run" / "metrics.csv", 5)
    finally:
        process.kill()
        process.join()
    assert not (tmp_path / "killed" / "run" / "summary.json").exists()
    resumed = simulate(config, data=small_source())
    assert "resuming" in (resumed.folder / "log.txt").read_text()
    assert_same(whole, resumed)


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        pytest.param("local", "pfedmo", marks=pytest.mark.slow),
        *(pytest.param("ray", *p.values, marks=p.marks) for p in every([])),
    ],
)
@pytest.mark.timeout(600)
def test_resumed_after_kill_9(algorithm: str, kind: str, tmp_path: Path) -> None:
    """Driver, server and client actors killed alike; the same command then ends with the bits of an unbroken run."""
    local = {**slow_rounds(algorithm), "run.name": "run", "run.output": str(tmp_path / "whole")}
    whole = simulate({**local, "data.source": "problem:source"})
    command = own_settings(tmp_path / "killed", algorithm, kind)
    folder = tmp_path / "killed" / "run"
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for_rounds(process.poll, folder / "metrics.csv", 5)
        below = descendants(process.pid)
    finally:
        process.kill()
        process.wait()
    computing = [pid for pid in below if b"ray::" in _command_line(pid)]
    assert kind == "local" or len(computing) >= 3
    kill_all(below)
    assert not (folder / "summary.json").exists()
    assert gone(below, 60), "processes were left behind"
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "resuming" in (folder / "log.txt").read_text()
    resumed = type(whole)(folder, whole.module)
    assert_same(whole, resumed)
    assert len(read_metrics(folder)) == SLOW_ROUNDS["run.rounds"]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


MNIST = {
    "data.source": "mnist", "data.clients": 10, "data.public_samples": 600, "data.samples_per_client": 300,
    "data.partition.kind": "label_skew", "data.partition.classes_per_client": 3, "model.name": "lenet5",
    "train.local_steps": 10, "train.cohort_size": 7, "run.rounds": 30, "run.eval_every": 10, "run.checkpoint_every": 2,
    "run.name": "run",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not os.environ.get("FEDRAY_DATA"), reason="needs MNIST: FEDRAY_DATA is not set")
@pytest.mark.parametrize("algorithm", FOUR)
def test_mnist_same_bits(algorithm: str, tmp_path: Path) -> None:
    """LeNet-5 on MNIST: the local engine's bits from 1, 2, 3 actors, each run killed three times at random moments."""
    settings = {**MNIST, "algorithm.name": algorithm}
    expected = simulate({**settings, "engine.kind": "local", "run.output": str(tmp_path / "local")})
    moments, orphans = random.Random(algorithm), dict[int, str]()
    for actors in (1, 2, 3):
        folder = tmp_path / str(actors)
        ray = {"engine.kind": "ray", "engine.actors": actors, "engine.cpus_per_actor": 0.5, "engine.address": "local"}
        program = Path(sys.modules["fedray"].__path__[0]) / "run.py"
        everything = {**settings, **ray, "run.output": str(folder)}
        command = [sys.executable, str(program), *(f"{key}={value}" for key, value in everything.items())]
        for _ in range(3):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
            metrics = folder / "run" / "metrics.csv"
            rows = metrics.read_text().count("\n") if metrics.exists() else 1
            try:
                wait_for_rounds(process.poll, metrics, rows)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(moments.uniform(0, 1.5))
                orphans |= begun_at(descendants(process.pid))
            finally:
                process.kill()
                process.wait()
        # the server of the last one may still be ending: the next run waits for it, and Ray's own agents take a minute
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert_same(expected, type(expected)(folder / "run", expected.module))
    kill_all(still_the_same(orphans))
