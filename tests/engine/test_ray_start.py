"""Ray's start where it fails, takes long or is not needed: another try, no Ray, or one line; nothing is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from own_process import SETTINGS, model_of, run
from own_process import refused as refused_line

from fedray import simulate
from fedray.cli.main import main
from fedray.config import EngineConfig
from fedray.engine.ray.local_cluster import private_folder
from fedray.engine.ray.tokens import authentication

psutil = pytest.importorskip("psutil", reason=f"it comes with Ray {ray.__version__}")

FAILING = {"RAY_GCS_SERVER_PORT": "none"}
"""Ray can't start with this, and finds out at once."""

ENDS_SLOWLY = """
import time

import ray
import psutil

from fedray.config import EngineConfig
from fedray.engine.ray.start import RayStart

kill = psutil.Process.kill
psutil.Process.kill = lambda process: (time.sleep(0.5), kill(process))
with RayStart(EngineConfig(), print, at_once=True) as start:
    start.ready()
"""


def left_of(process: int) -> list[Any]:
    """Returns the processes of clusters that this process has started."""
    ours = re.compile(rf"/session_[\d_-]+_{process}(/|\b)")
    return [
        each for each in psutil.process_iter(["cmdline"]) if ours.search(" ".join(each.info["cmdline"] or ()) + "/")
    ]


def test_nothing_is_said_about_processes_that_end_one_after_another() -> None:
    """As on a busy machine."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_SLOWLY], capture_output=True, text=True, timeout=100, check=True
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("starting Ray on this machine ...\n", "")


@pytest.mark.slow
def test_a_run_that_did_not_ask_for_ray_goes_on_without(tmp_path: Path) -> None:
    done = run(tmp_path, change=FAILING)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Ray did not start \(.*\); trying once more, in ", done.stdout)
    assert "going on without Ray, as with engine.kind=local: the bits are the same" in done.stdout
    assert yaml.safe_load((tmp_path / "runs/fedavg-sample/config.yaml").read_text())["engine"]["kind"] == "local"
    # it goes on with Ray where there is one
    longer = {**SETTINGS, "run.rounds": 3}
    sessions = {*private_folder().glob("session_*")}
    resumed = run(tmp_path, "run.rounds=3", "engine.kind=ray")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.index("round 2 reached before; going on") < resumed.stdout.index("round 3/3")
    # the files of a Ray that was of use are not kept
    assert {*private_folder().glob("session_*")} <= sessions
    whole = simulate({**longer, "engine.kind": "local", "run.output": str(tmp_path / "whole")})
    assert model_of(tmp_path / "runs") == whole.summary["model_sha256"]


@pytest.mark.parametrize("asked", ["engine.kind=ray", "engine.address=local"])
def test_a_run_that_asked_for_ray_says_why_it_has_none(tmp_path: Path, asked: str) -> None:
    line = refused_line(run(tmp_path, asked, change=FAILING))
    assert re.match(r"Ray did not start on this machine: .* \(Ray's logs are in .*\)", line)
    assert line.endswith("engine.kind=local needs no Ray, and computes the same bits")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_second_try_is_made_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path, "engine.kind=ray", change={"RAY_TMPDIR": str(tmp_path / "file" / "below")})
    assert done.returncode == 0, done.stderr
    said = re.search(r"Ray did not start \(.*Not a directory.*\); trying once more, in (\S+) \.\.\.", done.stdout)
    assert said
    # it may leave its logs there
    shutil.rmtree(Path(said[1]).parent, ignore_errors=True)


@pytest.mark.slow
def test_a_start_that_hangs_is_tried_once_more_and_leaves_nothing(begin: Any) -> None:
    program = (
        "import sys; from fedray.config import EngineConfig; from fedray.engine.ray.start import RayStart\n"
        "with RayStart(EngineConfig(address='local'), lambda line: print(line, flush=True), at_once=True) as start:\n"
        "    print(start.ready(), flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "RAY_raylet_start_wait_time_s": "1"}
    child = begin(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout.readline().startswith("starting Ray")
    stopped = None
    while stopped is None:
        assert child.poll() is None
        stopped = next((each for each in psutil.Process(child.pid).children() if each.name() == "raylet"), None)
        time.sleep(0.001)
    stopped.send_signal(signal.SIGSTOP)
    assert child.stdout.readline().startswith("Ray has not started for 15 s; waiting for its processes (")
    assert "timed out during startup); trying once more, in " in child.stdout.readline()
    assert not stopped.is_running()
    assert child.stdout.readline() == "True\n"
    child.stdin.close()
    assert child.wait(100) == 0
    assert not left_of(child.pid)


def test_an_error_does_not_wait_for_ray(begin: Any) -> None:
    """Nor does the next start: it comes after the end of the one that nobody needed, which says nothing any more."""
    program = (
        "from fedray.config import EngineConfig; from fedray.engine.ray.start import RayStart\n"
        "first = RayStart(EngineConfig(address='local'), print, at_once=True)\n"
        "try:\n"
        "    with first: raise ValueError\n"
        "except ValueError: print(first._thread.is_alive())\n"
        "with RayStart(EngineConfig(address='local'), print, at_once=True) as second:\n"
        "    print(second.ready(), first._thread.is_alive())\n"
        "try:\n"
        "    with RayStart(EngineConfig(address='local'), print, at_once=True): raise ValueError\n"
        "except ValueError: pass\n"
    )
    child = begin([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = child.communicate(timeout=200)
    assert child.returncode == 0, err
    # on a busy machine a line says how long it has been waiting
    said = [line for line in out.splitlines() if not line.startswith("Ray has not started for")]
    assert said[:3] == ["True", "starting Ray on this machine ...", "True False"]
    assert not err
    psutil.wait_procs(left_of(child.pid), timeout=30)
    assert not left_of(child.pid)


@pytest.mark.timeout(600)
def test_runs_at_the_same_time_share_the_connection(tmp_path: Path, begin: Any) -> None:
    """Whoever has made it may end first; the last one closes it."""
    keys = {**SETTINGS, "run.rounds": 2, "engine.kind": "ray", "engine.actors": 1}
    keys |= {"engine.cpus_per_actor": 0.1, "engine.server_cpus": 0.1, "engine.start_timeout": 300}
    program = (
        "import ray; from fedray import Simulation, simulate\n"
        f"keys = {keys}\n"
        "first, second = (Simulation(keys | {'run.name': name}) for name in ('first', 'second'))\n"
        "first.step()\n"
        "simulate(keys | {'run.name': 'elsewhere', 'engine.address': '10.1.2.3:6379'})\n"
        "port = ray.get_runtime_context().gcs_address.rpartition(':')[2]\n"
        "simulate(keys | {'run.name': 'here', 'engine.address': 'localhost:' + port})\n"
        "second.step()\n"
        "first.step()\n"
        "first.close()\n"
        "print(ray.is_initialized())\n"
        "second.step()\n"
        "second.close()\n"
        "print(ray.is_initialized(), first.result.summary['model_sha256'] == second.result.summary['model_sha256'])\n"
    )
    of_python = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = begin([sys.executable, "-c", program], cwd=tmp_path, **of_python)
    out, err = child.communicate(timeout=280)
    assert out.split() == ["True", "False", "True"], err
    assert "FedrayWarning: engine.address=10.1.2.3:6379 is not used: this process is connected to the Ray" in err
    assert "localhost" not in err
    assert not left_of(child.pid)


@pytest.mark.parametrize(
    "wrong",
    [
        "data.source=mnits", "data.source=none.py:load", "data.variant=letters", "data.normalization=often",
        "algorithm.name=fedavgg", "algorithm.name=none.py:Mine", "model.name=lenet6", "model.name=none.py:Mine",
        "model.head=mone", "model.head=none.py:Mine", "model.weights=none.pt", "run.output=/proc/1/runs",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("own_folder")
def test_what_is_wrong_with_a_name_is_found_before_ray_starts(capsys, wrong: str) -> None:
    base = [f"{key}={value}" for key, value in SETTINGS.items() if not wrong.startswith(f"{key}=")]
    sources = {"run": base, "tune": ["space.yaml"]}
    Path("space.yaml").write_text(
        yaml.safe_dump({"base": SETTINGS, "spaces": {"small": {"train.lr": {"uniform": [0.1, 0.2]}}}})
    )
    for command, given in sources.items():
        key, _, value = wrong.partition("=")
        if command == "tune" and key.startswith("run."):
            continue
        assert main([command, *given, f"{key}={value}"]) == 2
        said = capsys.readouterr()
        (line,) = said.err.splitlines()
        assert re.search(rf"{key}|{value}", line)
        assert "Ray" not in said.out


def test_a_token_is_shown_to_clusters_of_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks for it where `ray start` has made the cluster; whoever is named by an address gets none unasked."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    here, named = EngineConfig(), EngineConfig(address="10.0.0.1:6379")
    assert authentication(here) == {}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 32)
    for config in (here, EngineConfig(address="auto"), EngineConfig(address="local")):
        assert authentication(config) == {"RAY_AUTH_MODE": "token"}
    assert authentication(named) == {}
    # it has read the variable by then, and only its daemons would
    monkeypatch.setitem(sys.modules, "ray", sys)
    assert authentication(here) == {}
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert authentication(here) == {}


@pytest.mark.slow
def test_a_program_that_has_imported_ray_and_has_a_token(tmp_path: Path) -> None:
    """As in a notebook: Ray's daemons and the program agree on whether a token is shown."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    program = "import ray, sys; from fedray.cli.main import main; raise SystemExit(main(['run', *sys.argv[1:]]))"
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", program, *settings, "engine.kind=ray", "engine.actors=1"],
        capture_output=True, text=True, cwd=tmp_path, env={**environment, "HOME": str(tmp_path)}, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
