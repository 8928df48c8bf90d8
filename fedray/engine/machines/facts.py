"""Gathers what there is to know about a machine before runs compute on it (``fedray doctor``).

Everything here must work on a node that has no fedray, or another version of it, because that is one of the things to
find out. So the functions are sent to other nodes by value, use nothing else of fedray, and import nothing at the top
that a node may lack. Facts are plain values in dicts: sizes are in bytes, and what can't be known is None.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from fedray.engine.machines.ports import Port, open_ports

PACKAGES = ("ray", "torch", "torchvision", "numpy", "safetensors", "pyarrow")
"""The packages whose versions may change results, or must be equal for nodes to understand each other."""

STORE_SHARE, STORE_MOST, STORE_SMALL = 0.3, 200 * 10**9, 10**10
"""How large Ray makes its object store: this share of the free memory, at most so many bytes, and no larger than
``/dev/shm`` unless it is smaller than the last."""


class Disk(TypedDict):
    """A folder that runs use, and the disk on which it is. ``purpose`` says what it is for, such as "temporary files".
    ``size`` and ``free`` are the disk's bytes, and ``system`` is the kind of its file system, such as ``ext4``.
    ``runs`` says whether programs may run there, and ``writable`` whether this user may write there."""

    purpose: str
    path: str
    size: int
    free: int
    system: str
    runs: bool
    writable: bool


class Access(TypedDict):
    """What other users of the machine may do with a file or folder. ``what`` says what it is, such as "Ray's token",
    and ``path`` where it is. ``others`` is "r" if other users can read it, "w" if they can change it, "rw" for both,
    and "" for neither."""

    what: str
    path: str
    others: str


class Facts(TypedDict):
    """What is known about a machine on which runs are to compute. Sizes are in bytes, and what can't be known is None.

    Attributes:
        host: The machine's name.
        cpus: Numbers of CPUs: ``machine`` is how many there are; ``affinity``, ``cgroup`` and ``slurm`` are how many
            each of these limits allows this process; ``ray`` is how many Ray counts.
        memory: Amounts of memory: ``machine``, ``cgroup``, ``slurm`` and ``ray`` as in ``cpus``, and ``available``,
            what is free.
        shm: The ``size`` of ``/dev/shm``, and how much of it is ``free``.
        store: The size of Ray's object store.
        disks: The folders that runs use, and the disks on which they are.
        files: How many files a process may have open.
        versions: The versions of Python and of packages, by name.
        processor: The ``model`` of the CPU, and the ``instructions``, the instruction set that torch uses.
        gpus: The GPUs that the ``driver`` sees and that ``torch`` can use, as lists, and the ``reason`` if torch can't
            use them.
        access: What other users of the machine can do with this user's files and folders.
        ports: The ports at which other machines can reach this user's Ray processes.
        data: The sha256 of each data file, by its path.
        slurm: Slurm's environment variables about this job, by name.
    """

    host: str
    cpus: dict[str, float | None]
    memory: dict[str, float | None]
    shm: dict[str, int]
    store: int
    disks: list[Disk]
    files: int
    versions: dict[str, str | None]
    processor: dict[str, str]
    gpus: dict[str, Any]
    access: list[Access]
    ports: list[Port]
    data: dict[str, str]
    slurm: dict[str, str]


def gather(folders: Mapping[str, str], data: Sequence[str] = ()) -> Facts:
    """Returns the facts about this machine. ``folders`` are the paths of the folders that runs use, by their purposes,
    such as "cache". ``data`` are the paths of files whose digests are wanted; those that are not here are left out."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and "RAY_RAYLET_PID" in os.environ:
        # Ray hides the GPUs from a process that has asked for none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    memory = _memory()
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    space = {"size": shm.total if shm else 0, "free": shm.free if shm else 0}
    places = {"temporary files": tempfile.gettempdir(), **folders}
    return {
        "host": platform.node(),
        "cpus": _cpus(),
        "memory": memory,
        "shm": space,
        "store": store_size(memory["ray"] or 0, memory["available"] or 0, space["free"]),
        "disks": [_disk(purpose, path) for purpose, path in places.items()],
        "files": _open_files(),
        "versions": _versions(),
        "processor": _processor(),
        "gpus": _gpus(),
        "access": list(_access(places)),
        "ports": open_ports(),
        "data": {path: _sha256(path) for path in data if os.path.isfile(path)},
        "slurm": {name: os.environ[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME") if name in os.environ},
    }


def _cpus() -> dict[str, float | None]:
    quotas = [each for folder in _cgroups("cpu") for each in [_quota(folder)] if each]
    found: dict[str, float | None] = {
        "machine": os.cpu_count() or 1,
        "affinity": len(os.sched_getaffinity(0)),
        "cgroup": min(quotas, default=None),
        "slurm": _number(os.environ.get("SLURM_CPUS_ON_NODE")),
        "ray": None,
    }
    with contextlib.suppress(Exception):  # it is not public, and a node may have another version
        from ray._private.utils import get_num_cpus

        found["ray"] = get_num_cpus(override_docker_cpu_warning=True)
    return found


def _quota(folder: Path) -> float | None:
    """Returns how many CPUs the processes of a cgroup may use at a time: of version 2, or else of version 1."""
    words = _words(folder / "cpu.max") or [
        *_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us"),
    ]  # fmt: skip
    amounts = [_number(word) for word in words]
    quota, period = amounts if len(amounts) == 2 else (None, None)
    return quota / period if quota and period and quota > 0 else None


def _memory() -> dict[str, float | None]:
    here = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()}
    limits = [found for found in map(_limit, _cgroups("memory")) if found and found[0] < here["MemTotal"]]
    slurm = _number(os.environ.get("SLURM_MEM_PER_NODE"))
    each = _number(os.environ.get("SLURM_MEM_PER_CPU"))
    if not slurm and each:
        slurm = each * (_number(os.environ.get("SLURM_CPUS_ON_NODE")) or 1)
    found: dict[str, float | None] = {
        "machine": here["MemTotal"],
        "available": min(here["MemAvailable"], *(limit - used for limit, used in limits), math.inf),
        "cgroup": min((limit for limit, _ in limits), default=None),
        "slurm": slurm * 2**20 if slurm else None,
        "ray": here["MemTotal"],
    }
    with contextlib.suppress(Exception):
        from ray._common.utils import get_system_memory

        found["ray"] = get_system_memory()
    return found


def _limit(folder: Path) -> tuple[float, float] | None:
    """Returns how much memory the processes of a cgroup may use, and how much they use, without what the system keeps
    of files and can give back; None without a limit. The cgroup may be of version 2 or 1."""
    for limit, used, prefix in (("max", "current", ""), ("limit_in_bytes", "usage_in_bytes", "total_")):
        most = _number(*_words(folder / f"memory.{limit}"))
        if most:
            kept = dict(line.split()[:2] for line in _lines(str(folder / "memory.stat")))
            files = sum(int(kept.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
            return most, (_number(*_words(folder / f"memory.{used}")) or 0) - files
    return None


def store_size(counted: float, available: float, shm: int) -> int:
    """Returns the size in bytes that Ray gives its object store if the user sets none. ``counted`` is the memory that
    Ray counts, ``available`` the free memory, and ``shm`` the free room in ``/dev/shm``, all in bytes."""
    most = min(STORE_MOST, max(STORE_SMALL, int(0.95 * shm)))
    return min(most, int(STORE_SHARE * min(counted, available)))


def _cgroups(controller: str) -> Iterator[Path]:
    """Yields the folders of the cgroups whose limits hold for this process, of versions 1 and 2, from the innermost."""
    for line in _lines("/proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        if controller in names.split(",") or not names:
            root = Path("/sys/fs/cgroup", *names.split(",")[:1] if names else ())
            inner = root / path.lstrip("/")
            # in a container the path may be that of the machine outside
            for folder in [inner, *inner.parents] if inner.is_dir() else [root]:
                yield folder
                if folder == root:
                    break


def _disk(purpose: str, path: str) -> Disk:
    place = Path(path).expanduser().absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    usage, mounted = shutil.disk_usage(place), os.statvfs(place)
    return {
        "purpose": purpose,
        "path": path,
        "size": usage.total,
        "free": usage.free,
        "system": _file_system(place),
        "runs": not mounted.f_flag & os.ST_NOEXEC,
        "writable": os.access(place, os.W_OK),
    }


def _file_system(place: Path) -> str:
    real, best, kind = str(place.resolve()), "", ""
    for line in _lines("/proc/self/mounts"):
        _, mount, system = line.split()[:3]
        mount = mount.replace("\\040", " ")
        if len(mount) >= len(best) and (real == mount or real.startswith(mount.rstrip("/") + "/")):
            best, kind = mount, system
    return kind


def _open_files() -> int:
    """Returns how many files a process may have open: Ray raises the limit itself as far as it can."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 2**31 if hard == resource.RLIM_INFINITY else hard


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "fedray": None}
    spec = importlib.util.find_spec("fedray")
    if spec is not None and spec.origin:
        package = Path(spec.origin).parent
        digest = hashlib.sha256()
        for path in sorted(package.rglob("*.py")):
            digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
        version = [line for line in _lines(spec.origin) if line.startswith("__version__")]
        found["fedray"] = f"{version[0].split()[-1].strip(chr(34)) if version else ''} ({digest.hexdigest()[:8]})"
    for name in PACKAGES:
        found[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _processor() -> dict[str, str]:
    """Returns the model of the CPU, and the instruction set that torch takes."""
    model = next((line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if "model name" in line), "")
    instructions = ""
    with contextlib.suppress(Exception):  # a node may have no torch, or one that can't be loaded
        import torch

        instructions = torch.backends.cpu.get_cpu_capability()
    return {"model": model or platform.machine(), "instructions": instructions}


def _gpus() -> dict[str, Any]:
    """Returns the GPUs that the driver sees (``driver``: name, bytes in all and used, version of the driver), those
    that torch can use (``torch``: name and compute capability), and why torch can't use one (``reason``)."""
    found: dict[str, Any] = {"driver": [], "torch": [], "reason": ""}
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        for line in subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines():
            name, size, used, driver = (word.strip() for word in line.split(","))
            found["driver"].append((name, int(size) << 20, int(used) << 20, driver))
    try:
        import torch

        if found["driver"]:
            torch.empty(0, device="cuda")
        for number in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(number)
            found["torch"].append((torch.cuda.get_device_name(number), f"sm_{major}{minor}"))
        found["made_for"] = torch.cuda.get_arch_list()
    except Exception as error:  # of all kinds, by the driver and by torch's build
        found["reason"] = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if hidden := os.environ.get("CUDA_VISIBLE_DEVICES"):
        found["visible"] = hidden
    return found


def _access(places: Mapping[str, str]) -> Iterator[Access]:
    """Yields what other users may do with files and folders of this user in which they should not read or write."""
    home = os.path.expanduser("~")
    spec = importlib.util.find_spec("fedray")
    package = {"fedray's code": os.path.dirname(spec.origin)} if spec is not None and spec.origin else {}
    told = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    checked = {**places, "Ray's token": f"{home}/.ray/auth_token", **package, "Python's packages": sys.prefix}
    if told.exists():
        checked["the address of this machine's Ray cluster"] = str(told)
    for what, path in checked.items():
        if os.path.exists(path):
            yield {"what": what, "path": path, "others": _others(Path(path).absolute())}


def _others(path: Path) -> str:
    """Returns what users other than the owner may do with ``path``: r, w, both or nothing. Who may write to the folder
    around a file may replace the file."""
    mode, around = path.stat().st_mode, path.parent.stat().st_mode
    if not all(each.stat().st_mode & stat.S_IXOTH for each in path.parents):
        return ""
    replaceable = around & stat.S_IWOTH and not around & stat.S_ISVTX
    written = mode & stat.S_IWOTH and not (path.is_dir() and mode & stat.S_ISVTX)
    return ("r" if mode & stat.S_IROTH else "") + ("w" if written or replaceable else "")


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _words(path: Path) -> list[str]:
    return " ".join(_lines(str(path))).split()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _number(*words: str | None) -> float | None:
    """Returns the number that the first of ``words`` is, or None if it is none, such as ``max``."""
    try:
        return float(words[0] or "")
    except (IndexError, ValueError):
        return None
