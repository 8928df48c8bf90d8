"""A run that can't be started, gone on with or ended says why in one line, and harms nothing that is written."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import yaml
from command_runs import FAST, done, refused

from fedray import UserError
from fedray.cli.main import main
from fedray.config import load
from fedray.engine.ray.cluster import why_waiting
from fedray.engine.ray.start import RayStart
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.testing.contracts import small_source
from fedray.tracking.folder import RunFolder
from fedray.tracking.tables import read_metrics

pytestmark = pytest.mark.usefixtures("own_folder", "no_real_data")

PROGRAM = Path(sys.modules["fedray"].__path__[0]) / "run.py"


def hashes(folder):
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def test_unwritable_output(tmp_path, capsys):
    Path("file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "below", "/proc/fedray", "/dev/null"):
        assert f"can't write to run.output={output}" in refused(capsys, f"run.output={output}")
    Path("runs").mkdir()
    Path("runs/run").write_text("mine")
    assert "exists and is not a run folder" in refused(capsys)
    Path("runs/other").mkdir()
    Path("runs/other/notes.txt").write_text("mine")
    assert "exists and is not a run folder" in refused(capsys, "run.name=other")
    assert (
        Path("runs/run").read_text() == Path("file").read_text() == Path("runs/other/notes.txt").read_text() == "mine"
    )


def test_a_run_in_which_no_round_was_finished_gives_way_to_another(capsys):
    mistake = "import fedray.algorithms.fedavg as f\nclass Mine(f.FedAvg):\n    def begin(self, client): raise KeyError"
    Path("mine.py").write_text(mistake)
    done("algorithm.name=mine.py:Mine", code=1)
    Path("mine.py").write_text(mistake.replace("def begin(self, client): raise KeyError", "pass"))
    capsys.readouterr()
    assert "holds another run (code of the algorithm" in refused(
        capsys, "algorithm.name=mine.py:Mine", "run.resume=true"
    )
    done("algorithm.name=mine.py:Mine")
    place = Path("runs/run").absolute()
    line = f"warning: no round of the run in {place} was finished, and code of the algorithm differs: starting over"
    assert line in capsys.readouterr().out
    assert line in Path("runs/run/log.txt").read_text()
    assert len(read_metrics(Path("runs/run"))) == 2
    # nothing of the old one is in the new one, not even what its loggers knew it by
    assert "KeyError" in Path("runs/run.bak-1/log.txt").read_text()
    assert "KeyError" not in Path("runs/run/log.txt").read_text()
    # from now on there is something to lose
    assert "holds another run" in refused(capsys, "algorithm.name=fedavg")


def test_resume(capsys, monkeypatch):
    assert "run.resume=true, but there is no run" in refused(capsys, "run.resume=true")
    done()
    before = hashes("runs/run")
    with monkeypatch.context() as patched:
        patched.setattr("ray.init", None)
        started: list[RayStart] = []
        patched.setattr(RayStart, "_connected", started.append)
        done("engine.kind=ray")
        done("engine.kind=ray", "run.resume=true")
        assert not started
    assert "is finished already" in capsys.readouterr().out
    line = refused(capsys, "train.lr=0.5", "train.momentum=0.5")
    assert "holds another run (train.lr, train.momentum differ): use run.resume=false" in line
    assert "run.rounds differs" in refused(capsys, "run.rounds=1")
    assert hashes("runs/run") == before
    done("run.rounds=4")
    done("run.rounds=4", "run.output=straight")
    extended, straight = (read_metrics(Path(folder)) for folder in ("runs/run", "straight/run"))
    assert list(extended["test_loss"]) == list(straight["test_loss"])
    model = "run/model.safetensors"
    assert Path("runs", model).read_bytes() == Path("straight", model).read_bytes()
    before = hashes("runs/run")
    done("train.lr=0.5", "run.resume=false")
    assert list(hashes("runs/run.bak-1").values()) == list(before.values())
    assert len(read_metrics(Path("runs/run"))) == 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Makes a run of four rounds with checkpoints of the last two, and returns its folder."""
    output = tmp_path_factory.mktemp("finished")
    assert main(["run", *FAST, "run.rounds=4", "run.checkpoint_every=1", f"run.output={output}"]) == 0
    return output / "run"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


EXTEND = ["run.rounds=6", "run.checkpoint_every=1"]
DAMAGES = [
    lambda last: flip(last / "server.safetensors"),
    lambda last: flip(last / "record.json"),
    lambda last: (last / "server.safetensors").unlink(),
    lambda last: (last / "checksums.json").write_text("{}"),
    lambda last: (last / "checksums.json").write_text("[]"),
    lambda last: (shutil.rmtree(last), last.mkdir()),
]


def test_damaged_checkpoints(finished, capsys):
    shutil.copytree(finished, "runs/run")
    done(*EXTEND)
    whole = Path("runs/run/model.safetensors").read_bytes()
    for damage in DAMAGES:
        shutil.rmtree("runs/run")
        shutil.copytree(finished, "runs/run")
        damage(Path("runs/run/checkpoints/round-00000004"))
        capsys.readouterr()
        done(*EXTEND)
        for text in (Path("runs/run/log.txt").read_text(), capsys.readouterr().out):
            assert re.search(r"checkpoint \S*round-00000004 is damaged \(.*\); trying the one before it", text)
        assert Path("runs/run/model.safetensors").read_bytes() == whole
        assert len(read_metrics(Path("runs/run"))) == 6
    shutil.rmtree("runs/run")
    shutil.copytree(finished, "runs/run")
    for path in Path("runs/run/checkpoints").glob("round-*"):
        flip(path / "server.safetensors")
    before = hashes("runs/run")
    capsys.readouterr()
    line = refused(capsys, *EXTEND)
    assert "is damaged" in line
    assert "no other is left: use run.resume=false to start over" in line
    assert hashes("runs/run") == before
    shutil.rmtree("runs/run/checkpoints")
    assert "has no checkpoint to go on from" in refused(capsys, *EXTEND)


def test_other_damage_in_a_run_folder(finished, capsys):
    for name, content, message in (
        ("config.yaml", b"a: [", "config.yaml is damaged: use run.resume=false"),
        ("config.yaml", b"run: 3", "config.yaml is damaged"),
        ("config.yaml", b"\xff\xfe", "config.yaml is damaged"),
        ("summary.json", b"{", "summary.json is damaged"),
        ("summary.json", b"[]", "summary.json is damaged"),
        ("summary.json", b'{"status": "completed", "rounds": 4}', "summary.json is damaged"),
    ):
        shutil.rmtree("runs/run", ignore_errors=True)
        shutil.copytree(finished, "runs/run")
        Path("runs/run", name).write_bytes(content)
        before = hashes("runs/run")
        assert message in refused(capsys, *EXTEND)
        assert hashes("runs/run") == before
    shutil.rmtree("runs/run")
    shutil.copytree(finished, "runs/run")
    Path("runs/run/metrics.csv").write_bytes(b"\xff\xfe garbage")
    done(*EXTEND)
    for text in (Path("runs/run/log.txt").read_text(), capsys.readouterr().out):
        assert "warning: metrics.csv lacks 4 of the rows" in text


def test_two_runs_in_one_folder():
    folder = RunFolder(load({"run.name": "run"}), {})
    said: list[str] = []
    again = RunFolder(folder.config, {}).lock(said.append, patience=0.3)
    ours = rf"process {os.getpid()} on .*"
    with (
        folder.lock(said.append),
        pytest.raises(UserError, match=rf"is being written by another run; choose another run\.name \({ours}\)"),
        again,
    ):
        pass
    (line,) = said
    assert re.fullmatch(rf"runs/run is in use by {ours}; waiting up to 0\.3 s for it to end \.\.\.", line)


def test_divergence_keeps_what_there_is(capsys):
    done("model.name=linear", "train.lr=1e6", "run.rounds=20", code=3)
    assert "diverged after" in capsys.readouterr().out
    metrics = read_metrics(Path("runs/run"))
    assert 1 <= len(metrics) < 20
    assert yaml.safe_load(Path("runs/run/summary.json").read_text())["status"] == "diverged"
    done("model.name=linear", "train.lr=1e6", "run.rounds=20", code=3)
    assert len(read_metrics(Path("runs/run"))) == len(metrics)
    # losses beyond what TensorBoard can draw are still finite
    done("run.name=huge", "train.lr=1e25")


def test_what_the_cluster_lacks(capsys, ray_cluster):
    ray = ["engine.kind=ray", "engine.start_timeout=2"]
    line = refused(capsys, *ray, "engine.actors=2", "engine.cpus_per_actor=50")
    assert re.search(
        "engine.actors=2 of 50 CPU each; the cluster has 4 CPU .*did not start in engine.start_timeout=2 s", line
    )
    assert "engine.server_cpus=64" in refused(capsys, *ray, "engine.server_cpus=64", "engine.cpus_per_actor=0.1")
    line = refused(capsys, *ray, "engine.device=cuda")
    assert re.search("1 CPU and 1 GPU each; the cluster has 4 CPU .*, 0 GPU .*in 2 s; engine.device=cpu needs no", line)
    assert not Path("runs/run").exists()


@pytest.mark.slow
def test_a_cluster_that_nobody_can_join_is_not_waited_for(capsys, ray_cluster, tmp_path, monkeypatch):
    """Ray's launcher leaves on the head which hosts it has; here there is none besides the head, and it is there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    record = tmp_path / "ray_bootstrap_config.yaml"
    ray = ["engine.kind=ray", "engine.start_timeout=3", "engine.actors=2", "engine.cpus_per_actor=3"]
    record.write_text("provider: {type: local, head_ip: 10.0.0.1, worker_ips: []}")
    assert "with nothing for the server, 6 CPU are wanted" in refused(capsys, *ray)
    record.write_text("provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2]}")
    assert "did not start in engine.start_timeout=3 s" in refused(capsys, *ray)
    record.write_text("provider: [")
    assert "did not start in engine.start_timeout=3 s" in refused(capsys, *ray)


def test_why_an_actor_has_to_wait(ray_cluster):
    keys = {"algorithm.name": "fedavg", "model.name": "logistic", "data.clients": 2, "engine.cpus_per_actor": 3}
    experiment = resolve(load(keys), CustomObjects(source=small_source()))[0]

    def becomes(expected):
        deadline = time.monotonic() + 120
        while (found := [why_waiting(experiment, actors) for actors in (1, 2)]) != expected:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    actor = ray.remote(num_cpus=3)(dict)
    becomes(["", ""])
    first, second = actor.remote(), actor.remote()
    becomes([": other jobs use the cluster's CPUs", ": the cluster has 4 CPU, and 6 are wanted"])
    ray.kill(first)
    becomes(["", ""])
    ray.kill(second)


def command(*arguments):
    given = {word.partition("=")[0] for word in arguments}
    return [sys.executable, str(PROGRAM), *(word for word in FAST if word.partition("=")[0] not in given), *arguments]


@pytest.mark.slow
def test_no_gpu():
    """A run with a Ray of its own says at once what that lacks."""
    ours = command("engine.kind=ray", "engine.gpus_per_actor=1000", "engine.address=local")
    ended = subprocess.run(ours, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert re.fullmatch(r"fedray: engine.actors=1 of 1 CPU and 1000 GPU each; the cluster has .*\n", ended.stderr)


def test_no_cluster():
    """A run does not wait where nobody listens, as it does for a cluster that is busy (engine.start_timeout=120)."""
    ended = subprocess.run(
        command("engine.kind=ray", "engine.address=127.0.0.1:1"), capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 2
    assert re.fullmatch("fedray: no Ray cluster answers at engine.address=127.0.0.1:1: .*\n", ended.stderr)


HOLD = """
import time
from pathlib import Path

def hold(report):
    while report.round == 1 and not Path("go").exists():
        time.sleep(0.01)
"""
"""A callback that holds a run in its first round until it may go on."""

LOADED = """
import sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            print("torch is loaded", flush=True)

sys.meta_path.insert(0, Finder)
"""
"""What each Python does at first: it says when torch is imported."""


def test_something_is_shown_before_torch_is_loaded(tmp_path):
    """This takes seconds."""
    (tmp_path / "sitecustomize.py").write_text(LOADED)
    path = os.pathsep.join([str(tmp_path), str(PROGRAM.parents[1])])
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    shown = subprocess.run(command("run.rounds=1"), capture_output=True, text=True, timeout=200, env=environment)
    assert shown.stdout.splitlines()[:2] == ["fedray: loading ...", "torch is loaded"], shown.stderr


LONG = ["run.rounds=30", "run.eval_every=15", "data.clients=4", "run.checkpoint_every=1000", "train.local_steps=40"]


def one_signal(process):
    process.send_signal(signal.SIGINT)


def as_timeout_does(process):
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)


@pytest.mark.parametrize(("kind", "send"), [("local", one_signal), ("ray", as_timeout_does)])
def test_interrupted(kind, send, capsys, begin):
    """Ctrl-C, or a signal to Ray's processes, too, ends a run after its round; the same command then ends with the bits
    of an unbroken run."""
    done(*LONG, "run.output=whole")
    engine = [f"engine.kind={kind}", "engine.address=local", "engine.actors=1"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    Path("hold.py").write_text(HOLD)
    held = [*LONG, *engine, "run.callbacks=[hold.py:hold]"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = begin(command(*held), **pipes, env=environment, start_new_session=True)
    shown = ""
    while "round 1/30" not in shown:
        line = process.stdout.readline()
        assert line, shown
        shown += line
    send(process)
    Path("go").touch()
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert errors == ""
    assert shown.startswith("fedray: loading ...")
    assert "interrupted after" in output
    assert "to go on, give the same command again" in output
    assert yaml.safe_load(Path("runs/run/summary.json").read_text())["status"] == "interrupted"
    assert list(Path("runs/run/checkpoints").glob("round-*"))
    assert len(read_metrics(Path("runs/run"))) < 30
    done(*LONG)
    sums = [yaml.safe_load(Path(f, "run/summary.json").read_text())["model_sha256"] for f in ("runs", "whole")]
    assert sums[0] == sums[1]


AT_A_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY); os.execv(sys.executable, sys.argv[1:])"
)


def test_the_terminal_is_closed(begin):
    """As it is when an SSH connection breaks."""
    Path("hold.py").write_text(HOLD)
    ours, theirs = os.openpty()
    run = command(*LONG, "engine.kind=local", "run.callbacks=[hold.py:hold]")
    at_it = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    process = begin([sys.executable, "-c", AT_A_TERMINAL, *run], **at_it)
    os.close(theirs)
    shown = b""
    while b"1/30" not in shown:
        shown += os.read(ours, 1 << 16)
    os.close(ours)
    Path("go").touch()
    assert process.wait(200) == 130
    assert yaml.safe_load(Path("runs/run/summary.json").read_text())["status"] == "interrupted"
    assert list(Path("runs/run/checkpoints").glob("round-*"))
