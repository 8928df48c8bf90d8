"""cluster/slurm.sbatch on a real Slurm, of two machines of their own: a job that is queued again, to the same bits."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import ROOT, Hosts, machines_up

from fedray import simulate

CONF = """
ClusterName=test
SlurmctldHost={head}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=10
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=10
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""

RUN = {
    "algorithm.name": "fedavgm", "data.clients": 8, "model.name": "logistic", "engine.actors": 2,
    "engine.cpus_per_actor": 1, "engine.compile": "false", "run.name": "slurm",
}  # fmt: skip


def start_slurm(hosts: Hosts) -> None:
    folder = hosts.folder
    (folder / "key").write_bytes(b"a key for munge on these machines alone" * 2)
    (folder / "key").chmod(0o600)
    names = [hosts.ssh(host, "hostname").strip() for host in (1, 2)]
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={address} CPUs=2" for name, address in zip(names, hosts.addresses, strict=True)
    )
    (folder / "slurm.conf").write_text(CONF.format(head=names[0], folder=folder, nodes=nodes))
    # version 2 would be Slurm's choice here, and needs systemd
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    Path("/run/munge").mkdir(exist_ok=True)
    for host in (1, 2):
        (folder / f"munge{host}").mkdir()
        (folder / f"home{host}" / "fedray-venv").symlink_to(sys.prefix)
        own = f"{folder}/munge{host}"
        hosts.ssh(
            host,
            f"mount --bind {own} /run/munge && munged --force --key-file={folder}/key --pid-file={own}/pid"
            f" --seed-file={own}/seed --log-file={own}/log --socket=/run/munge/munge.socket.2",
        )
    hosts.ssh(1, f"mkdir -p {folder}/state && slurmctld -c -f {folder}/slurm.conf")
    for host in (1, 2):
        hosts.ssh(host, f"slurmd -f {folder}/slurm.conf -N {names[host - 1]}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if not shutil.which("slurmctld") or not shutil.which("munged"):
        pytest.skip("no Slurm: Debian's packages slurm-wlm and munge")
    with machines_up(2) as machines:
        start_slurm(machines)
        yield machines


def until(found: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, what()
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_queued_again_gives_the_same_bits(hosts: Hosts) -> None:
    work = hosts.folder / "work"
    work.mkdir()
    before = {*Path("/tmp").glob("fedray-??????")}

    def slurm(command: str) -> str:
        begin = f"cd {work} && SLURM_CONF={hosts.folder}/slurm.conf PYTHONPATH={ROOT}"
        return hosts.ssh(1, f"{begin} {command}", timeout=240)

    settings = RUN | {"run.rounds": 600}
    words = " ".join(f"{key}={value}" for key, value in settings.items())
    submitted = slurm(f"sbatch --cpus-per-task=2 --mem=0 {ROOT}/cluster/slurm.sbatch {words}")
    [job] = re.findall(r"^Submitted batch job (\d+)$", submitted, re.MULTILINE)
    log = work / f"fedray-{job}.log"

    def said(text: str) -> Callable[[], bool]:
        return lambda: log.exists() and text in log.read_text(errors="replace")

    def state() -> str:
        return slurm("squeue --all") + (log.read_text(errors="replace") if log.exists() else "")

    until(said("round 1/600"), 120, state)
    # what Slurm itself sends some time before the limit
    slurm(f"scancel --batch --signal=USR1 {job}")
    until(said("queued again"), 60, state)
    until(said("completed after 600 rounds"), 300, state)
    until(lambda: not slurm("squeue --noheader").strip(), 60, state)
    shown = log.read_text(errors="replace")
    assert re.search(r"round \d+ reached before; going on", shown)
    names = [hosts.ssh(host, "hostname").strip() for host in (1, 2)]
    summary = json.loads((work / "runs" / "slurm" / "summary.json").read_text())
    assert len({process["node"] for process in summary["machine"]["processes"]}) == 2
    options = "--wait --cpus-per-task=2 --mem=0 --output=doctor.log"
    slurm(f"sbatch {options} {ROOT}/cluster/slurm.sbatch doctor --cluster || true")
    examined = (work / "doctor.log").read_text()
    assert re.findall(r"^(\S+) +2 ", examined, re.MULTILINE) == names, examined
    alone = simulate(settings | {"engine.kind": "local", "run.output": str(hosts.folder / "alone")})
    assert summary["model_sha256"] == alone.summary["model_sha256"]
    for host in (1, 2):
        assert not hosts.ray_processes(host)
    assert not {*Path("/tmp").glob("fedray-??????")} - before


AS_IF_INSTALLED = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

class Finder:
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, "{root}/fedray/__init__.py") if name == "fedray" else None

sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Finder)
"""
"""What `pip install -e .` does: the package is found where Python's path has nothing of its name, not even a folder."""

COMMANDS = {
    "srun": "cd $RAY_TMPDIR && mkdir ray && echo x > ray/ray_current_cluster && sleep 1.5; rm -r $RAY_TMPDIR",
    "scontrol": "echo here", "scancel": "true",
}  # fmt: skip


def test_a_job_beside_the_checkout_runs_the_package(tmp_path: Path) -> None:
    """As the README says: the checkout is ~/fedray, and the job is submitted from ~. Here without Slurm and Ray."""
    (tmp_path / "fedray/cluster").mkdir(parents=True)
    (tmp_path / "fedray-venv").symlink_to(sys.prefix)
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/sitecustomize.py").write_text(AS_IF_INSTALLED.format(root=ROOT))
    (tmp_path / "ray.py").write_text("def init(**_): pass\ndef nodes(): return [{'Alive': True}]\n")
    (tmp_path / "commands").mkdir()
    for name, what in COMMANDS.items():
        (tmp_path / "commands" / name).write_text(f"#!/bin/sh\n{what}\n")
        (tmp_path / "commands" / name).chmod(0o755)
    changes = {
        "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path / "installed"),
        "PATH": f"{tmp_path}/commands:{os.environ['PATH']}", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "here", "SLURMD_NODENAME": "here",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", ROOT / "cluster/slurm.sbatch", "train.lr=fast"],
        cwd=tmp_path, env=os.environ | changes, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stdout + done.stderr
    assert done.stderr.startswith("fedray: train.lr")


def test_the_script_is_bash() -> None:
    for script in ("slurm.sbatch", "node.sh"):
        assert subprocess.run(["bash", "-n", str(ROOT / "cluster" / script)], check=False).returncode == 0
