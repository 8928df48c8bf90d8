"""`fedray doctor`: what it finds out about this machine, and what would go wrong on made-up ones."""

from __future__ import annotations

import copy
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from fedray.cli import doctor
from fedray.cli.main import main
from fedray.engine.machines import facts, ports
from fedray.engine.machines.cluster import clocks_of_cluster, facts_of_cluster
from fedray.engine.machines.facts import Facts, gather, store_size
from fedray.engine.machines.findings import Finding, findings

GB = 10**9


def sound(host: str = "host1") -> Facts:
    """A machine on which nothing would go wrong."""
    disk: Any = {"size": 100 * GB, "free": 50 * GB, "system": "ext4", "runs": True, "writable": True}
    purposes = {"temporary files": "/tmp", "Ray's files": "/tmp/fedray-1/ray", "cache": "/home/a/.cache/fedray"}
    return {
        "host": host,
        "cpus": {"machine": 8, "affinity": 8, "cgroup": None, "slurm": None, "ray": 8},
        "memory": {"machine": 32 * GB, "available": 30 * GB, "cgroup": None, "slurm": None, "ray": 32 * GB},
        "shm": {"size": 16 * GB, "free": 16 * GB},
        "store": 9 * GB,
        "disks": [{**disk, "purpose": purpose, "path": path} for purpose, path in purposes.items()],
        "files": 65536,
        "versions": {"python": "3.11.7", "fedray": "0.2.0 (48893dd4)", "ray": "2.60.0", "torch": "2.15.0"},
        "processor": {"model": "AMD EPYC", "instructions": "AVX2"},
        "gpus": {"driver": [("H100", 80 * GB, 0, "550.1")], "torch": [("H100", "sm_90")], "reason": "",
                 "made_for": ["sm_80", "sm_90"]},
        "access": [{"what": "Ray's token", "path": "/home/a/.ray/auth_token", "others": ""},
                   {"what": "temporary files", "path": "/tmp", "others": "r"}],
        "ports": [],
        "data": {"/data/x.npz": "aa"},
        "slurm": {},
    }  # fmt: skip


class InSeconds(int):
    """A time in so many seconds from now, which the name of a test does not depend on."""

    def text(self) -> str:
        return f"{time.time() + self:.0f}"


def changed(path: str, value: Any, host: str = "host1") -> Facts:
    """A sound machine of which one fact is another: ``cpus.slurm``, say."""
    found: Any = sound(host)
    value = value.text() if isinstance(value, InSeconds) else value
    *parents, last = path.split(".")
    place = found
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    place[int(last) if isinstance(place, list) else last] = value
    return copy.deepcopy(found)  # type: ignore[no-any-return]


def lines(nodes: list[Facts], clocks: dict[str, float] | None = None) -> list[str]:
    return [f"{each.trouble} -> {each.remedy}" for each in findings(nodes, clocks)]


PORT = {"program": "raylet", "address": "::", "port": 4000, "token": False, "metrics": False}


@pytest.mark.parametrize(
    ("path", "value", "trouble", "remedy"),
    [
        ("cpus.slurm", 2, "Ray counts 8 CPUs, but Slurm allows 2", "--num-cpus=2"),
        ("cpus.cgroup", 2.5, "but its cgroup allows 2.5", "--num-cpus=2"),
        ("cpus.affinity", 1, "but its CPU set allows 1", "--num-cpus=1"),
        ("memory.cgroup", 8 * GB, "but its cgroup allows 8 GB", "--object-store-memory=2400000000"),
        ("memory.available", GB, "only 1 GB of 32 GB of memory are free", "end other programs"),
        ("shm.size", 1 << 26, "object store does not fit into /dev/shm, which has 0.0671 GB", "size=10G /dev/shm"),
        ("disks.0.writable", False, "temporary files (/tmp): you can't write there", "TMPDIR"),
        ("disks.1.free", 4 * GB, "the disk is 96.0% full", "fedray clean"),
        ("disks.2.free", 1000, "cache (/home/a/.cache/fedray): only 1e-06 GB are free", "name another folder"),
        ("disks.1.system", "nfs4", "on a network disk (nfs4)", "a local disk"),
        ("disks.2.runs", False, "(noexec)", "TORCHINDUCTOR_CACHE_DIR"),
        ("files", 1024, "only 1024 files open", "ulimit -Hn"),
        ("gpus.torch", [], "torch 2.15.0 can't use the 1 GPU that the driver (550.1) shows", "engine.device=cpu"),
        ("gpus.torch", [("B200", "sm_100")], "has no kernels for the B200 (sm_100)", "built for it"),
        ("access.0.others", "r", "other users can read Ray's token", "chmod go-rwx /home/a/.ray/auth_token"),
        ("access.1.others", "rw", "other users can change temporary files (/tmp)", "chmod o-w /tmp"),
        ("ports", [PORT], "because Ray asks for no token (raylet)", "RAY_AUTH_MODE=token"),
        ("ports", [{**PORT, "token": True, "metrics": True}], "Ray's metrics (raylet at 4000)", "METRIC_PORT=-1"),
        ("slurm.SLURM_JOB_END_TIME", InSeconds(130), "Slurm ends this job in ", "--time"),
    ],
)  # fmt: skip
def test_what_would_go_wrong(path: str, value: Any, trouble: str, remedy: str) -> None:
    [line] = lines([changed(path, value)])
    assert trouble in line.partition(" -> ")[0]
    assert remedy in line.partition(" -> ")[2]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cpus.ray", 6),
        ("cpus.cgroup", 7.5),
        ("gpus.visible", ""),
        ("gpus.torch", [("H100", "sm_90")] * 8),
        ("gpus.made_for", ["sm_50", "compute_80"]),
        ("ports", [{**PORT, "token": True}]),
        ("access.1.others", "r"),
        ("disks.2.system", "nfs4"),
        ("slurm.SLURM_JOB_END_TIME", InSeconds(3600)),
    ],
)
def test_what_would_not(path: str, value: Any) -> None:
    assert lines([sound(), changed(path, value)]) == []


@pytest.mark.parametrize(
    ("path", "value", "trouble"),
    [
        ("versions.torch", "2.14.0", "torch differs: 2.15.0 on host1, host2; 2.14.0 on host3"),
        ("versions.fedray", None, "fedray differs: 0.2.0 (48893dd4) on host1, host2; none on host3"),
        ("versions.python", "3.12.1", "python differs: 3.11 on host1, host2; 3.12 on host3"),
        ("processor.instructions", "AVX512", "the instruction set differs: AVX2 on host1, host2; AVX512 on host3"),
        ("data", {"/data/x.npz": "bb"}, "/data/x.npz differs: aa on host1; aa on host2; bb on host3"),
    ],
)
def test_what_differs_between_nodes(path: str, value: Any, trouble: str) -> None:
    [line] = lines([sound("host1"), sound("host2"), changed(path, value, "host3")])
    assert line.startswith(trouble)


def test_data_need_not_be_everywhere() -> None:
    assert lines([sound("host1"), changed("data", {}, "host2")]) == []


def test_the_same_on_many_nodes_is_one_finding() -> None:
    [found] = findings([changed("files", 1024, f"host{number}") for number in range(100)])
    assert len(found.hosts) == 100


def test_clocks() -> None:
    [line] = lines([sound()], {"host1": -3600.0, "host2": 1.5})
    assert line.startswith("the clock is 3600 s behind this machine's")


def test_the_object_store_as_ray_sizes_it() -> None:
    from ray._private.utils import get_shared_memory_bytes, resolve_object_store_memory

    for available in (4 * GB, 40 * GB, 4000 * GB):
        assert store_size(available, available, get_shared_memory_bytes()) == resolve_object_store_memory(available)
    # without room in /dev/shm Ray takes what is small enough for a disk
    assert store_size(100 * GB, 100 * GB, 1 << 26) == 10 * GB


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "64")
    (tmp_path / "x").write_bytes(b"abc")
    found = gather({"runs": str(tmp_path / "not yet made")}, [str(tmp_path / "x"), str(tmp_path / "y")])
    assert found["host"] == platform.node()
    assert found["cpus"]["affinity"] == len(os.sched_getaffinity(0))
    assert (found["cpus"]["slurm"], found["memory"]["slurm"]) == (1, 64 << 20)
    assert 0 < (found["memory"]["available"] or 0) < (found["memory"]["machine"] or 0)
    assert found["versions"]["ray"] == ray.__version__
    [disk] = [each for each in found["disks"] if each["purpose"] == "runs"]
    assert disk["writable"]
    assert disk["system"]
    assert found["data"] == {str(tmp_path / "x"): "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_limits_of_cgroups(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert facts._quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"memory.max": "1000", "memory.current": "900",
          "memory.stat": "anon 1\nactive_file 200\ninactive_file 300"}, (1000, 400)),
        ({"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900",
          "memory.stat": "active_file 1\ntotal_active_file 100\ntotal_inactive_file 0"}, (1000, 800)),
        ({"memory.max": "max", "memory.current": "900"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_memory_of_cgroups(files: dict[str, str], limit: tuple[float, float] | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert facts._limit(tmp_path) == limit


@pytest.mark.parametrize(
    ("mode", "around", "others"),
    [(0o600, 0o755, ""), (0o644, 0o755, "r"), (0o666, 0o755, "rw"), (0o644, 0o777, "rw"), (0o644, 0o1777, "r"),
     (0o666, 0o700, "")],
)  # fmt: skip
def test_what_other_users_may_do(mode: int, around: int, others: str) -> None:
    # others can't enter the tests' own folder
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o755)
        file = Path(place, "folder", "file")
        file.parent.mkdir()
        file.touch()
        file.chmod(mode)
        file.parent.chmod(around)
        assert facts._others(file) == others


def by_value(thing: Callable[[], Any]) -> bytes:
    pickling: Any = ray.cloudpickle
    for module in (facts, ports):
        pickling.register_pickle_by_value(module)
    try:
        return pickling.dumps(thing)  # type: ignore[no-any-return]
    finally:
        for module in (facts, ports):
            pickling.unregister_pickle_by_value(module)


def test_a_node_without_fedray_is_examined(tmp_path: Path) -> None:
    (tmp_path / "task").write_bytes(by_value(partial(gather, {})))
    code = "import sys; sys.modules['fedray'] = None; import pickle; found = pickle.load(open('task', 'rb'))(); "
    code += "print(found['versions']['fedray'], found['versions']['ray'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["None", ray.__version__], done.stderr


def test_a_cluster(ray_cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    [found], silent = facts_of_cluster({}, [str(tmp_path / "x")], 120, print)
    assert silent == {}
    assert found["host"] == platform.node()
    assert found["cpus"]["ray"] == 4
    assert list(found["data"]) == [str(tmp_path / "x")]
    # newer versions of Ray set it when they start; there may be other clusters on this machine
    token = os.environ.get("RAY_AUTH_MODE") == "token"
    assert {("raylet", token), ("gcs_server", token)} <= {(each["program"], each["token"]) for each in found["ports"]}
    assert clocks_of_cluster(120) == {platform.node(): 0}
    assert main(["doctor", "--cluster", f"engine.address={ray.get_runtime_context().gcs_address}"]) == 1
    printed = capsys.readouterr().out
    # the tests' cluster is not one that fedray starts
    assert f"{platform.node()}: everybody can read Ray's metrics" in printed


def test_a_cluster_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cluster", "engine.address=local"]) == 2
    assert "belongs to no Ray cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ([], False), (["data.source=sample"], True), (["data={source: sample}"], True), (["my.yaml"], True),
        (["train.lr=0.1", "run.output=data.d"], False),
    ],
)  # fmt: skip
def test_data_are_compared_between_nodes_if_they_are_named(
    words: list[str], asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("data: {source: sample}")
    asked: list[bool] = []

    def examine(config: object, asks_for_data: bool) -> tuple[list[Facts], dict[str, float], list[Finding]]:
        asked.append(asks_for_data)
        return [sound()], {}, []

    monkeypatch.setattr(doctor, "_of_cluster", examine)
    assert main(["doctor", "--cluster", *words]) == 0
    assert asked == [asks]


def test_the_folder_of_runs_at_a_uri_is_that_of_their_working_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: dict[str, str] = {}
    monkeypatch.setattr(facts, "gather", lambda found: folders.update(found) or sound())
    assert main(["doctor", "run.output=s3://bucket/runs", f"run.working_copy={tmp_path}/copy"]) == 0
    assert folders["runs"] == f"{tmp_path}/copy"
