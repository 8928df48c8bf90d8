"""`ray up`, `ray submit` and `ray down` with cluster/config.yaml, as typed, on machines of their own."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from hosts import ROOT, Hosts, machines_up
from image_files import split

from fedray import simulate

# connects to the address it is given, or says who refused
PROBE = """
import sys, ray
try:
    ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
    print("connected")
except ConnectionError as error:
    print("refused:", error)
"""


GRPC_METHODS = (
    "NodeManagerService/GetNodeStats", "ObjectManagerService/Pull", "CoreWorkerService/GetCoreWorkerStats",
    "NodeInfoGcsService/GetAllNodeInfo", "ReporterService/GetTraceback", "RayletDriver/ListNamedActors",
)  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Three machines, of which two know no way out of their network, as many nodes of clusters."""
    with machines_up(3) as machines:
        for host in (1, 2):
            machines.ssh(host, "ip route del default || true")
        yield machines


def edit(hosts: Hosts) -> str:
    """A copy of cluster/config.yaml with its first part edited, as a user would: these machines, and this Python."""
    config = yaml.safe_load((ROOT / "cluster" / "config.yaml").read_text())
    config["cluster_name"] = "fedray-test"
    config["provider"].update(head_ip=hosts.addresses[0], worker_ips=[hosts.addresses[1]])
    config["auth"].update(ssh_user="root", ssh_private_key=str(hosts.folder / "id"))
    [settings] = config["initialization_commands"]
    # nothing to install: the libraries are here
    for name, value in (("venv", sys.prefix), ("install", '""')):
        settings, count = re.subn(rf"^{name}=.*$", f"{name}={value}", settings, flags=re.MULTILINE)
        assert count == 1
    config["initialization_commands"] = [settings]
    path = hosts.folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def shared_token(hosts: Hosts) -> str:
    """Returns the cluster's token, which both machines must have, and which nobody else may read."""
    tokens = {hosts.ssh(host, "cat ~/.ray/auth_token; stat -c ' %a' ~/.ray/auth_token") for host in (1, 2)}
    assert len(tokens) == 1
    token, mode = tokens.pop().split()
    assert len(token) >= 32
    assert mode == "600"
    return token


def check_strangers_are_refused(hosts: Hosts, token: str) -> None:
    """Checks that nobody gets in without the token, not even on a node, and that the network sees no dashboard."""
    (hosts.folder / "probe.py").write_text(PROBE)
    probe = f"HOME=/nowhere timeout 100 {sys.executable} {hosts.folder}/probe.py {hosts.addresses[0]}:6379 2>&1"
    for mode in ("RAY_AUTH_MODE=disabled", f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN={'0' * len(token)}"):
        answer = hosts.ssh(2, f"{mode} {probe}")
        assert "refused" in answer
        assert "InvalidAuthToken" in answer
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((hosts.addresses[0], 8265), timeout=10)


def answer(address: str, port: int) -> set[str]:
    """Returns what a port says to requests of several protocols without a token."""
    answers = set()
    for path in ("/", "/metrics", "/api/version"):
        try:
            urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=10).close()
            answers.add(f"answers {path}")
        except urllib.error.HTTPError as error:
            answers.add(str(error.code))
        except (OSError, http.client.HTTPException):
            pass  # not the protocol of this port
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        for method in GRPC_METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=10)
                answers.add(f"answers {method}")
            except grpc.RpcError as error:
                answers.add(error.code().name)
    return answers


def check_others_get_nothing(hosts: Hosts) -> None:
    """Checks that each port of the nodes asks this machine for the token, and that other users of a node can't read
    Ray's files there."""
    for host, address in ((1, hosts.addresses[0]), (2, hosts.addresses[1])):
        listening = [line.split()[3].rsplit(":", 1) for line in hosts.ssh(host, "ss -ltnH").splitlines()]
        ports = {int(port) for name, port in listening if name not in ("127.0.0.1", "[::1]")} - {22}
        assert len(ports) >= 5
        for port in ports:
            answers = answer(address, port)
            assert answers & {"401", "UNAUTHENTICATED"}, (host, port, answers)
            assert not [each for each in answers if each.startswith("answers")], (host, port, answers)
        folder = f"/tmp/fedray-{os.getuid()}"
        assert "session_latest" in hosts.ssh(host, f"ls {folder}/ray")
        other = hosts.ssh(host, f"setpriv --reuid=65534 --regid=65534 --clear-groups ls {folder}/ray/ 2>&1 || true")
        assert "Permission denied" in other


def check_up_again(hosts: Hosts, config: str) -> None:
    """Checks that `ray up` leaves a cluster that is up to date as it is, and that with a further setting it gives a
    whole cluster, whose nodes have the setting once."""
    gcs = hosts.ssh(1, "pgrep gcs_server")
    assert "the head runs and is up to date: it goes on" in hosts.run("ray", "up", "-y", config).stdout
    assert hosts.ssh(1, "pgrep gcs_server") == gcs
    Path(config).write_text(Path(config).read_text().replace("install=", "export FEDRAY_AGAIN=1; install="))
    # as if it had been there before the last change of the code
    gone = "~/.fedray/source/fedray/algorithms/gone.py"
    hosts.ssh(1, f"echo 'import nothing_of_this_name' > {gone}")
    again = hosts.run("ray", "up", "-y", config)
    for host in (1, 2):
        assert hosts.ssh(host, f"ls {gone} 2>/dev/null || true") == ""
    assert again.returncode == 0
    assert "1 of 1 workers joined" in again.stdout
    assert hosts.ssh(1, "pgrep gcs_server") != gcs
    assert hosts.ssh(1, "cat ~/.bashrc").count("settings") == 1
    for host in (1, 2):
        assert hosts.ssh(host, "cat ~/.fedray/settings").count("FEDRAY_AGAIN") == 1


def check_run(hosts: Hosts, config: str) -> None:
    """Checks that a submitted run has processes on both machines, and its record on the head."""
    run = ["algorithm.name=fedavg", "data.clients=8", "run.rounds=2", "model.name=logistic"]
    run += ["engine.actors=2", "engine.cpus_per_actor=1"]
    submit = hosts.run("ray", "submit", config, "fedray/run.py", *run)
    assert submit.returncode == 0
    assert "completed after 2 rounds" in submit.stdout
    down = hosts.run("ray", "rsync-down", config, "runs/", f"{hosts.folder}/runs/")
    assert down.returncode == 0
    summary = json.loads((hosts.folder / "runs" / "fedavg-sample" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert len({process["node"] for process in summary["machine"]["processes"]}) == 2


def check_prepared_samples(hosts: Hosts, config: str) -> None:
    """Checks that both machines read photographs and get the files, and that a run finds out if one has other files."""
    photographs = split(hosts.folder / "photographs")
    data = [f"data.root={photographs}", "data.image_size=16"]

    def submitted(*words: str) -> str:
        return hosts.run("ray", "submit", config, "fedray/run.py", *words).stdout

    def run(name: str) -> str:
        fast = ["algorithm.name=fedavg", "run.rounds=2", "model.name=logistic", f"run.name={name}", "engine.actors=2"]
        return submitted("data.source=federated_csv", *data, "data.access=mapped", *fast, "engine.cpus_per_actor=1")

    names = [hosts.ssh(host, "hostname").strip() for host in (1, 2)]
    prepared = submitted("data", "prepare", "federated_csv", *data)
    assert f"{names[1]} reads samples too" in prepared
    assert f"copying the files to {names[1]}" in prepared
    assert "prepared 50 training and 10 test samples" in prepared
    sums = [hosts.ssh(host, "cd ~/.cache/fedray/mapped/*/ && sha256sum *.npy columns.json") for host in (1, 2)]
    assert sums[0] == sums[1]
    assert sums[0].count(".npy") == 4
    assert "copying" not in submitted("data", "prepare", "federated_csv", *data)
    assert "completed after 2 rounds" in run("both")
    hosts.ssh(2, "cd ~/.cache/fedray/mapped/*/ && printf x | dd of=x.npy bs=1 seek=500 conv=notrunc")
    assert f"x.npy on {names[1]} is not as it was made" in run("other").replace("\n", " ")
    hosts.ssh(2, "rm -r ~/.cache/fedray/mapped")
    missing = run("missing").replace("\n", " ")
    assert f"is not on {names[1]}" in missing
    assert "completed" not in missing
    assert f"copying the files to {names[1]}" in submitted("data", "prepare", "federated_csv", *data)
    assert "completed after 2 rounds" in run("mended")


def check_sweep(hosts: Hosts, config: str) -> None:
    """Checks that a submitted sweep uses both machines, and has the records of all trials on the head."""
    space = ["data.source=sample", "data.partition.kind=iid", "data.augment=none", "model.name=logistic"]
    sweep = ["tune", "fedprox", *space, "data.clients=8", "train.cohort_size=4", "run.rounds=3", "tune.trials=4"]
    submit = hosts.run("ray", "submit", config, "fedray/run.py", *sweep)
    assert submit.returncode == 0
    # the remote end is a terminal: a table
    assert re.search(r"fedprox +4/4", submit.stdout)
    down = hosts.run("ray", "rsync-down", config, "sweeps/", f"{hosts.folder}/sweeps/")
    assert down.returncode == 0
    summaries = [json.loads(path.read_text()) for path in hosts.folder.glob("sweeps/fedprox/trials/*/*/summary.json")]
    assert [summary["status"] for summary in summaries] == ["completed"] * 4
    assert len({process["node"] for summary in summaries for process in summary["machine"]["processes"]}) == 2


def until(found: Callable[[], bool], seconds: float, what: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, what()
        time.sleep(1)


def check_a_run_outlives_changes_of_the_cluster(hosts: Hosts, config: str) -> None:
    """Checks that a run goes on to the same bits while a machine is added that is off at first and while the Ray of a
    worker is killed, and that both workers are there in the end."""
    run = {"algorithm.name": "fedavg", "data.clients": 8, "run.rounds": 1500, "model.name": "logistic",
           "run.name": "long", "engine.compile": "false"}  # fmt: skip
    words = " ".join(f"{key}={value}" for key, value in run.items())
    job = f"ray job submit --no-wait -- python ~/run.py {words} engine.actors=2 engine.cpus_per_actor=1"
    assert hosts.run("ray", "exec", config, job).returncode == 0
    log = hosts.folder / "home1" / "runs" / "long" / "log.txt"

    def last() -> str:
        return log.read_text().splitlines()[-1] if log.exists() else ""

    until(lambda: log.exists() and "client actor" in log.read_text(), 120, last)
    hosts.run(hosts.script, "cut", "3")
    Path(config).write_text(Path(config).read_text().replace(
        f"- {hosts.addresses[1]}\n", f"- {hosts.addresses[1]}\n  - {hosts.addresses[2]}\n"))  # fmt: skip
    with subprocess.Popen(
        ["ray", "up", "-y", config], cwd=ROOT, env=hosts.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as up:  # fmt: skip
        assert up.stdout is not None
        shown = ""
        for line in up.stdout:
            shown += line
            if f"{hosts.addresses[2]}: ssh: connect to host" in line:
                hosts.run(hosts.script, "mend", "3")
    assert "1 of 2 workers joined" in shown
    assert "2 of 2 workers joined" in shown, shown
    raylet = hosts.ssh(2, "pgrep -x raylet")
    hosts.ssh(2, "pkill -9 -x raylet")
    until(lambda: hosts.ssh(2, "pgrep -x raylet || true").strip() not in ("", raylet.strip()), 120, last)
    assert "2 of 2 workers joined" in hosts.run("ray", "up", "-y", config).stdout
    until(lambda: (log.parent / "summary.json").exists(), 240, last)
    alone = simulate(run | {"engine.kind": "local", "run.output": str(hosts.folder / "alone")})
    summary = json.loads((log.parent / "summary.json").read_text())
    assert summary["model_sha256"] == alone.summary["model_sha256"]


def check_down(hosts: Hosts, config: str) -> None:
    """Checks that `ray down` leaves no process of Ray or fedray on either machine."""
    assert hosts.run("ray", "down", "-y", config).returncode == 0
    for host in (1, 2, 3):
        until(lambda: not hosts.ray_processes(host), 60, lambda: hosts.ray_processes(host))  # noqa: B023 - called here


def test_the_files_that_travel_are_whole(tmp_path: Path) -> None:
    """A link to a file that does not travel stops Ray's launcher on the head, without a word on this machine."""
    mounts = yaml.safe_load((ROOT / "cluster" / "config.yaml").read_text())["file_mounts"]
    for target, source in mounts.items():
        copy = tmp_path / target.removeprefix("~/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, copy, symlinks=True)
        else:
            shutil.copy(ROOT / source, copy)
    assert [path for path in tmp_path.rglob("*") if path.is_symlink() and not path.exists()] == []
    (package,) = tmp_path.rglob("fedray/__init__.py")
    spaces = "import fedray.tuning.spec as spec; print(spec.SPACES)"
    done = subprocess.run(
        [sys.executable, "-c", spaces], cwd=package.parent.parent, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(package.parent.parent)},
    )  # fmt: skip
    assert (Path(done.stdout.strip()) / "fedavg.yaml").is_relative_to(tmp_path)
    assert (Path(done.stdout.strip()) / "fedavg.yaml").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_up_submit_down(hosts: Hosts) -> None:
    config = edit(hosts)
    up = hosts.run("ray", "up", "-y", config)
    assert up.returncode == 0
    assert "1 of 1 workers joined" in up.stdout
    token = shared_token(hosts)
    assert token not in up.stdout
    check_strangers_are_refused(hosts, token)
    check_others_get_nothing(hosts)
    check_up_again(hosts, config)
    check_run(hosts, config)
    check_prepared_samples(hosts, config)
    check_sweep(hosts, config)
    check_a_run_outlives_changes_of_the_cluster(hosts, config)
    wrong = hosts.run("ray", "submit", config, "fedray/run.py", "algorithm.name=fedavq")
    assert wrong.returncode == 1
    assert "fedavg" in wrong.stdout
    check_down(hosts, config)
