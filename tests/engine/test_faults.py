"""Processes that die: the run goes on, or resumes, to the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_runs import TIMED, slow_rounds
from small_runs import needs_compiler
from variants import BESIDE_A_RULE

from fedray import ClientError, Report, simulate
from fedray.algorithms import known_algorithms
from fedray.results.runs import LeftOut, read_run
from fedray.testing.contracts import SETTINGS, assert_same, small_source
from fedray.tracking.result import RunResult

KILLED_WITH = {"pfedmo": (2,)}
"""Numbers of client actors with which an algorithm's actors are killed every time; the other numbers, and the other
algorithms, are slow."""
GATHERED: dict[str, dict[str, Any]] = {"all uploads at the server": {"algorithm.name": "gathered:Gathered"}}
"""An algorithm whose server gets uploads one by one, which goes with a rule of no other."""


def data_of(config: dict[str, Any]) -> Any:
    """The small data set, unless ``config`` names another."""
    return None if "data.source" in config else small_source()


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
