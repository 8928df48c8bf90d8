"""cluster/slurm.sbatch on a real Slurm, of two machines of their own: a job that is queued again, to the same bits."""

from __future__ import annotations

import json
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


def test_the_script_is_bash() -> None:
    for script in ("slurm.sbatch", "node.sh"):
        assert subprocess.run(["bash", "-n", str(ROOT / "cluster" / script)], check=False).returncode == 0
