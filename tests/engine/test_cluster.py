"""`ray up`, `ray submit` and `ray down` with cluster/config.yaml, as typed, on two machines of their own.

The machines are what the script in $FEDRAY_TEST_HOSTS makes: `up 2` prints their addresses and leaves their ssh key as
$TEST_HOSTS_DIR/id, `ssh I COMMAND` runs a command on one, `down` removes them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hosts import ROOT, Hosts, machines_up
from image_files import split

# connects to the address it is given, or says who refused
PROBE = """
import sys, ray
try:
    ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
    print("connected")
except ConnectionError as error:
    print("refused:", error)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with machines_up(3) as machines:
        yield machines


def edit(hosts: Hosts) -> str:
    """A copy of cluster/config.yaml with its first part edited, as a user would: these machines, and this Python."""
    config = yaml.safe_load((ROOT / "cluster" / "config.yaml").read_text())
    config["cluster_name"] = "fedray-test"
    config["provider"].update(head_ip=hosts.addresses[0], worker_ips=[hosts.addresses[1]])
    config["auth"].update(ssh_user="root", ssh_private_key=str(hosts.folder / "id"))
    [settings] = config["initialization_commands"]
    # nothing to install: the libraries are here, and the package is the synchronized copy
    for name, value in (("venv", sys.prefix), ("install", '""; export PYTHONPATH=~/.fedray/source')):
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


def check_up_again(hosts: Hosts, config: str) -> None:
    """Checks that `ray up` with a further setting gives a whole cluster, whose nodes have the setting once."""
    Path(config).write_text(Path(config).read_text().replace("install=", "export FEDRAY_AGAIN=1; install="))
    again = hosts.run("ray", "up", "-y", config)
    assert again.returncode == 0
    assert "1 of 1 workers joined" in again.stdout
    for host in (1, 2):
        assert hosts.ssh(host, "cat ~/.bashrc").count("settings") == 1
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


def check_down(hosts: Hosts, config: str) -> None:
    """Checks that `ray down` leaves no process of Ray or fedray on either machine."""
    assert hosts.run("ray", "down", "-y", config).returncode == 0
    assert not hosts.ray_processes(1)
    deadline = time.monotonic() + 60
    while left := hosts.ray_processes(2):
        assert time.monotonic() < deadline, left
        time.sleep(2)


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
@pytest.mark.timeout(900)
def test_up_submit_down(hosts: Hosts) -> None:
    config = edit(hosts)
    up = hosts.run("ray", "up", "-y", config)
    assert up.returncode == 0
    assert "1 of 1 workers joined" in up.stdout
    token = shared_token(hosts)
    assert token not in up.stdout
    check_strangers_are_refused(hosts, token)
    check_up_again(hosts, config)
    check_run(hosts, config)
    check_prepared_samples(hosts, config)
    check_sweep(hosts, config)
    wrong = hosts.run("ray", "submit", config, "fedray/run.py", "algorithm.name=fedavq")
    assert wrong.returncode == 1
    assert "fedavg" in wrong.stdout
    check_down(hosts, config)
