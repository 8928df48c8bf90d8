"""Sweeps that are killed, stopped, or in each other's way."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.trial import TrialState
from processes import begun_at, descendants, environment, gone, kill_all, still_the_same
from sweeps_on_ray import described

import fedray
from fedray.tracking.tables import read_metrics
from fedray.tuning.report import state_of
from fedray.tuning.spec import read_sweeps
from fedray.tuning.storage import study_of

ROUNDS = 12


@pytest.fixture
def space(tmp_path: Path) -> Path:
    """Trials that last long enough to be killed in the middle, with a checkpoint in every second round."""
    base = {"data.source": "problem:source", "train.local_epochs": 8, "model.hidden": [64]}
    base |= {"run.rounds": ROUNDS, "run.checkpoint_every": 2}
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(described(**{key.replace(".", "__"): value for key, value in base.items()})))
    return path


def command(space: Path, *overrides: str) -> list[str]:
    program = Path(sys.modules["fedray"].__path__[0]) / "run.py"
    own = (f"tune.output={space.parent}", "tune.name=s", "tune.trials=6", "engine.address=local", *overrides)
    return [sys.executable, str(program), "tune", str(space), *own]


SHOWN: dict[str, Any] = {
    "stdout": subprocess.PIPE,
    "stderr": subprocess.STDOUT,
    "text": True,
    "start_new_session": True,
}
"""How a sweep is started that is watched."""


def until(process: subprocess.Popen[str], what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert process.poll() is None, f"the sweep ended before it could be killed: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "it never came so far"
        time.sleep(0.001)


def finished(arguments: list[str], seconds: float = 200) -> str:
    done = subprocess.run(
        arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def studied(folder: Path) -> list[Any]:
    return study_of(*read_sweeps(folder)).get_trials(deepcopy=False)


MOMENTS: dict[str, Callable[[Path], Any]] = {
    "before the first result": lambda folder: any(folder.glob("trials/*/seed-0/config.yaml")),
    "in the middle": lambda folder: any(folder.glob("trials/0002/seed-0/checkpoints/round-*")),
    "during a checkpoint": lambda folder: any(folder.glob("trials/000[1-9]/seed-0/checkpoints/.round-*")),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_sweep_goes_on_after_kill_9_of_everything(moment: str, space: Path, begin: Any) -> None:
    """Twice in a row: what has ended is not run again, the rest goes on; every trial is told once, none is missing."""
    folder = space.parent / "s"
    ended: dict[int, bytes] = {}
    for _ in range(2):
        process = begin(command(space), env=environment(), **SHOWN)
        try:
            until(process, lambda: MOMENTS[moment](folder))
            below = descendants(process.pid)
        finally:
            process.kill()
            process.communicate()
        kill_all(below)
        assert gone(below, 60), "processes were left behind"
        for trial in studied(folder):
            if trial.state == TrialState.COMPLETE:
                run = folder / f"trials/{trial.number:04d}/seed-0"
                ended.setdefault(trial.number, (run / "summary.json").read_bytes() + (run / "log.txt").read_bytes())
        params = {trial.number: trial.params for trial in studied(folder) if trial.state == TrialState.RUNNING}
    finished(command(space))
    trials = studied(folder)
    assert [state_of(trial) for trial in trials] == ["complete"] * 6
    assert len({str(trial.params) for trial in trials}) == 6
    for number, kept in params.items():
        assert trials[number].params == kept
    journal = [json.loads(line) for line in (folder / "study.journal").read_text().splitlines()]
    for trial in trials:
        run = folder / f"trials/{trial.number:04d}/seed-0"
        rows = read_metrics(run)
        assert rows["round"].tolist() == list(range(1, ROUNDS + 1))
        assert trial.value == rows["validation_accuracy"].iloc[-1]
        log = (run / "log.txt").read_text()
        assert log.count("completed after round") == 1
        if trial.number in ended:
            assert (run / "summary.json").read_bytes() + (run / "log.txt").read_bytes() == ended[trial.number]
        # one line that says how it ended
        told = [line["state"] for line in journal if line.get("trial_id") == trial.number and "state" in line]
        assert [state for state in told if state != TrialState.RUNNING] == [TrialState.COMPLETE]
    alone = fedray.simulate(
        yaml.safe_load((folder / "trials/0001/seed-0/config.yaml").read_text())
        | {"run.output": str(space.parent / "alone")}
    )
    assert alone.summary["model_sha256"] in (folder / "trials/0001/seed-0/summary.json").read_text()


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_that_goes_on_later(space: Path, begin: Any) -> None:
    folder = space.parent / "s"
    process = begin(command(space, "tune.trials=3"), env=environment(), **SHOWN)
    until(process, lambda: any(folder.glob("trials/*/seed-0/checkpoints/round-00000002")))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "to go on, give the same command again" in output
    assert "Traceback" not in output
    assert all(trial.state in (TrialState.RUNNING, TrialState.COMPLETE) for trial in studied(folder))
    # what was running has left a checkpoint of the round that it was in, and said so
    logs = [path.read_text() for path in folder.glob("trials/*/seed-0/log.txt")]
    assert any("interrupted after round" in log for log in logs)
    output = finished(command(space, "tune.trials=3"))
    assert "Traceback" not in output
    assert [state_of(trial) for trial in studied(folder)] == ["complete"] * 3


HEAD = """
import sys, ray
ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of two processors that is nobody's own."""
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert head.stdout is not None
    address = head.stdout.readline().strip()
    head_and_below = begun_at([head.pid, *descendants(head.pid)])
    try:
        yield address
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.communicate("", timeout=60)
        kill_all(still_the_same(head_and_below))


@pytest.mark.slow
def test_two_sweeps_on_one_cluster(space: Path, cluster: str, begin: Any) -> None:
    """Each in its declared slice, side by side; a third finds no room and says so."""
    shared = (f"engine.address={cluster}", "tune.max_concurrent_trials=1", "tune.trials=500")
    two = [begin(command(space, *shared, f"tune.name={name}"), env=environment(), **SHOWN) for name in ("a", "b")]
    for process, name in zip(two, ("a", "b"), strict=True):
        until(process, lambda name=name: any((space.parent / name).glob("trials/*/seed-0/metrics.csv")))
    third = subprocess.run(
        command(space, *shared, "tune.name=c", "engine.start_timeout=2"),
        env=environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert all(process.poll() is None for process in two), "the others should still be running"
    assert third.returncode == 2, third.stdout + third.stderr
    expected = r"fedray: no trial could be started in 2 s: a trial takes 1 CPU; the cluster has 2 CPU \(0 free\)"
    assert re.search(expected, third.stderr)
    assert "Traceback" not in third.stderr
    for process, name in zip(two, ("a", "b"), strict=True):
        until(process, lambda name=name: any(state_of(trial) == "complete" for trial in studied(space.parent / name)))
        process.send_signal(signal.SIGINT)
    for process in two:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 130, output
        assert "1 at once" in output
