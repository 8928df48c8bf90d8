"""Processes that die: the run goes on, or resumes, to the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import begun_at, descendants, environment, gone, kill_all, loaded, still_the_same, wait_for_rounds
from slow_runs import SLOW_ROUNDS, TIMED, slow_rounds
from small_runs import needs_compiler
from variants import BESIDE_A_RULE

from fedray import ClientError, Report, simulate
from fedray.algorithms import known_algorithms
from fedray.results.runs import LeftOut, read_run
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.result import RunResult
from fedray.tracking.tables import read_metrics

FOUR = ("fedavg", "scaffold", "fedsiam_da", "pfedmo")
"""No state, vectors of state, whole models and two phases, training of the server's own."""
KILLED_WITH = {"pfedmo": (2,)}
"""Numbers of client actors with which an algorithm's actors are killed every time; the other numbers, and the other
algorithms, are slow."""
KILLED_AND_RESUMED = ("pfedmo",)
"""What is killed and resumed locally every time: states, models, and a queue of models at the server."""
GATHERED: dict[str, dict[str, Any]] = {"all uploads at the server": {"algorithm.name": "gathered:Gathered"}}
"""An algorithm whose server gets uploads one by one, which goes with a rule of no other."""


def data_of(config: dict[str, Any]) -> Any:
    """The small data set, unless ``config`` names another."""
    return None if "data.source" in config else small_source()


def every(quick: Iterable[str]) -> list[Any]:
    """All algorithms as parameters, of which those that are not ``quick`` are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in known_algorithms()]


def actor_pids_of(folder: Path) -> list[int]:
    """The client actors that a run has had."""
    return [int(pid) for pid in re.findall(r"client actor: pid (\d+)", (folder / "log.txt").read_text())]


def actor_pids(folder: Path) -> list[int]:
    """Those that it has now."""
    return [pid for pid in actor_pids_of(folder) if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("algorithm", "actors"),
    [
        pytest.param(name, actors, marks=() if actors in KILLED_WITH.get(name, ()) else pytest.mark.slow)
        for name in known_algorithms()
        for actors in (1, 2, 3)
    ],
)
def test_actors_killed_in_the_middle_of_rounds(algorithm: str, actors: int, tmp_path: Path, ray_cluster: None) -> None:
    """The bits of the local engine from 1, 2 and 3 actors, of which three are killed."""
    config = slow_rounds(algorithm)
    whole = simulate({**config, "run.output": str(tmp_path / "local")}, data=small_source())
    assert_same(whole, killing(config, actors, tmp_path / "ray"))


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2, 3])
@pytest.mark.parametrize("mode", TIMED)
def test_actors_killed_beside_the_virtual_clock(mode: str, actors: int, tmp_path: Path, ray_cluster: None) -> None:
    whole = simulate({**TIMED[mode], "run.output": str(tmp_path / "local")}, data=small_source())
    assert len(set(whole.clients.outcome)) > 1
    assert_same(whole, killing(TIMED[mode], actors, tmp_path / "ray"))


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2, 3])
@pytest.mark.parametrize("settings", (BESIDE_A_RULE | GATHERED).values(), ids=BESIDE_A_RULE | GATHERED)
def test_actors_killed_beside_what_goes_with_a_rule(
    settings: dict[str, Any], actors: int, tmp_path: Path, ray_cluster: None
) -> None:
    config = {**slow_rounds("fedavg"), **settings}
    whole = simulate({**config, "run.output": str(tmp_path / "local")}, data=data_of(config))
    assert_same(whole, killing(config, actors, tmp_path / "ray"))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", known_algorithms())
def test_actors_with_compiled_gradients_killed(algorithm: str, tmp_path: Path, ray_cluster: None) -> None:
    """A new actor finds on the disk what was compiled, and computes the same bits with it."""
    config = {**slow_rounds(algorithm), "engine.compile": True}
    whole = simulate({**config, "run.output": str(tmp_path / "local")}, data=small_source())
    assert_same(whole, killing(config, 2, tmp_path / "ray"))


def killing(config: dict[str, Any], actors: int, output: Path) -> RunResult:
    """The run on Ray, one of its actors killed in the middle of rounds 3, 6 and 9."""
    killed: list[int] = []
    timers: list[threading.Timer] = []

    def kill_one() -> None:
        # one that was killed before may not have been replaced yet
        deadline = time.monotonic() + 60
        while not (alive := [pid for pid in actor_pids(folder) if pid not in killed]) and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(alive[-1], signal.SIGKILL)
            killed.append(alive[-1])

    def callback(report: Report) -> None:
        if report.round in (2, 5, 8):
            # some way into the round that begins when this returns
            timers.append(threading.Timer(report.metrics["round_seconds"] * 0.4, kill_one))
            timers[-1].start()

    folder = output / "run"
    ray_config = {
        **config,
        "run.output": str(output),
        "run.name": "run",
        "engine.kind": "ray",
        "engine.actors": actors,
        "engine.cpus_per_actor": 0.1,
    }
    run = simulate(ray_config, data=data_of(config), callbacks=[callback])
    for timer in timers:
        timer.join()
    assert len(killed) == 3
    assert (folder / "log.txt").read_text().count("a client actor died") >= 2
    return run


@pytest.mark.slow
def test_a_slow_actor_gets_less_to_do(tmp_path: Path, ray_cluster: None) -> None:
    """And the bits are those of actors alike."""
    calls, slow, driver = tmp_path / "calls", tmp_path / "slow", os.getpid()

    def is_ahead() -> bool:
        """Whether this actor has made more than a third of the other's calls."""
        made = [pid for pid in (calls.read_text() if calls.exists() else "").split() if pid != str(driver)]
        mine = made.count(str(os.getpid()))
        return len(made) - mine < 3 * (mine + 1)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # the first actor to come here is the slow one; the other may have nothing to do at the end of a round
        if os.getpid() != driver:
            with contextlib.suppress(FileExistsError), slow.open("x") as file:
                file.write(str(os.getpid()))
            end = time.monotonic() + (1 if calls.exists() else 60)
            while slow.read_text() == str(os.getpid()) and is_ahead() and time.monotonic() < end:
                time.sleep(0.01)
        with calls.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return F.cross_entropy(logits, targets, reduction="none")

    config = {**SETTINGS, "data.clients": 60, "data.partition.kind": "iid", "train.cohort_size": 60, "run.rounds": 3}
    config |= {"algorithm.name": "fedavg", "run.eval_every": 0}
    ray = {"engine.kind": "ray", "engine.actors": 2, "engine.cpus_per_actor": 0.1}
    found = simulate({**config, **ray, "run.output": str(tmp_path / "ray")}, data=small_source(), loss=loss)
    pids = actor_pids_of(found.folder)
    counts = sorted(calls.read_text().split().count(str(pid)) for pid in pids)
    assert len(counts) == 2
    assert 0 < counts[0] < 0.5 * counts[1]
    alike = simulate({**config, "run.output": str(tmp_path / "local")}, data=small_source())
    assert_same(alike, found)


def test_server_killed(tmp_path: Path, ray_cluster: None) -> None:
    """The driver starts the server again, once, from the last checkpoint."""
    config = slow_rounds("pfedmo")
    whole = simulate({**config, "run.output": str(tmp_path / "local")}, data=small_source())
    folder = tmp_path / "ray" / "pfedmo-small"
    killed = []

    def callback(report: Report) -> None:
        if report.round == 5 and not killed:
            killed.append(int(re.findall(r"server: pid (\d+)", (folder / "log.txt").read_text())[-1]))
            os.kill(killed[0], signal.SIGKILL)

    changes = {"engine.kind": "ray", "engine.actors": 2, "engine.cpus_per_actor": 0.1}
    output = {"run.output": str(tmp_path / "ray")}
    run = simulate({**config, **changes, **output}, data=small_source(), callbacks=[callback])
    assert killed
    assert "resuming" in (folder / "log.txt").read_text()
    assert_same(whole, run)


@pytest.mark.slow
def test_an_actor_that_hangs(tmp_path: Path, ray_cluster: None) -> None:
    """Others do its tasks, to the same bits, and it gets tasks again when it answers again."""
    config = {**slow_rounds("scaffold"), "run.rounds": 40}
    whole = simulate({**config, "run.output": str(tmp_path / "local")}, data=small_source())
    folder, stopped = tmp_path / "ray" / "scaffold-small", []

    def callback(report: Report) -> None:
        if report.round == 2:
            stopped.append(actor_pids(folder)[0])
            os.kill(stopped[0], signal.SIGSTOP)
        if report.round == 4:
            os.kill(stopped[0], signal.SIGCONT)
        if report.round > 4 and " answers again" not in (folder / "log.txt").read_text():
            # the driver asks between rounds, every few seconds
            time.sleep(0.3)

    # a task is late after 2 s, and is then done elsewhere, too: the silence has to be noticed before that
    changes = {"engine.kind": "ray", "engine.actors": 2, "engine.cpus_per_actor": 0.1, "engine.answer_timeout": 1}
    output = {"run.output": str(tmp_path / "ray")}
    run = simulate({**config, **changes, **output}, data=small_source(), callbacks=[callback])
    log = (folder / "log.txt").read_text()
    assert re.search(r"no answer from \S+ for \d+ s; doing \d+ clients? elsewhere", log)
    assert re.search(r"\S+ answers again", log)
    assert len(actor_pids_of(folder)) == 2
    assert_same(whole, run)


DYING = """
import os
from pathlib import Path
from torch import nn

class Net(nn.Linear):
    def __init__(self, input_shape, classes):
        super().__init__(input_shape[0], classes)
        if b"ClientActor" in Path("/proc/self/cmdline").read_bytes():
            first = Path(__file__).with_name("first")
            try:
                with first.open("x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                if first.read_text() != str(os.getpid()):
                    os._exit(1)
"""
"""A model with which one client actor alone can start."""


@pytest.mark.slow
def test_with_actors_that_can_not_start_a_run_goes_on_without_them(tmp_path: Path, ray_cluster: None) -> None:
    (tmp_path / "net.py").write_text(DYING)
    config = {**SETTINGS, "model.name": f"{tmp_path}/net.py:Net", "run.name": "run"}
    config = {key: value for key, value in config.items() if not key.startswith("model.") or key == "model.name"}
    whole = simulate({**config, "run.output": str(tmp_path / "whole")}, data=small_source())
    config |= {"run.output": str(tmp_path), "engine.kind": "ray", "engine.actors": 2, "engine.cpus_per_actor": 0.1}
    found = simulate({**config, "engine.max_retries": 1}, data=small_source())
    assert "2 times in a row; going on with 1" in (found.folder / "log.txt").read_text()
    assert_same(whole, found)


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_a_run_that_fails_says_so_in_its_folder(kind: str, tmp_path: Path, ray_cluster: None) -> None:
    """Reason and host are in summary.json and log.txt, it is not compared with others, and the same call goes on."""
    broken = tmp_path / "broken"

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if broken.exists():
            raise RuntimeError("no more losses")
        return F.cross_entropy(logits, targets, reduction="none")

    def at_round_3(report: Report) -> None:
        if report.round == 3:
            broken.touch()

    config = {**SETTINGS, "algorithm.name": "scaffold", "run.checkpoint_every": 2, "run.name": "run"}
    whole = simulate({**config, "run.output": str(tmp_path / "whole")}, data=small_source(), loss=loss)
    config |= {"run.output": str(tmp_path), "engine.kind": kind, "engine.actors": 1, "engine.cpus_per_actor": 0.1}
    with pytest.raises(ClientError, match="no more losses"):
        simulate(config, data=small_source(), loss=loss, callbacks=[at_round_3])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["host"]) == ("failed", 3, platform.node())
    reason = "failed in phase train of round 4 on"
    assert reason in summary["reason"]
    assert summary["reason"].endswith("RuntimeError: no more losses")
    assert f"failed on {platform.node()} after round 3: client" in (tmp_path / "run" / "log.txt").read_text()
    left_out = read_run(tmp_path / "run")
    assert isinstance(left_out, LeftOut)
    assert reason in left_out.reason
    broken.unlink()
    assert_same(whole, simulate(config, data=small_source(), loss=loss))


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_a_run_that_a_callback_fails_says_so_in_its_folder(kind: str, tmp_path: Path, ray_cluster: None) -> None:
    def at_round_3(report: Report) -> None:
        if report.round == 3:
            raise ZeroDivisionError("not in this round")

    config = {**SETTINGS, "algorithm.name": "scaffold", "run.name": "run", "run.output": str(tmp_path)}
    config |= {"engine.kind": kind, "engine.actors": 1, "engine.cpus_per_actor": 0.1}
    with pytest.raises(ZeroDivisionError, match="not in this round"):
        simulate(config, data=small_source(), callbacks=[at_round_3])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("failed", 3)
    assert "not in this round" in summary["reason"]


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
