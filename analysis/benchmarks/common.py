"""What the benchmarks share: whose CPU time it was, bootstrap intervals, facts about the machine, result files."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
QUIET = 0.3  # cores that other processes may use during a sample
TICK = 1 / os.sysconf("SC_CLK_TCK")
# glibc's defaults return a step's buffers to the system and fault them in again; only both together help
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "536870912"}
SESSION = re.compile(rb"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+_\d+")


class ProcessTree:
    """The processes of this benchmark: our descendants, and those of Ray sessions that a descendant belongs to.

    Ray detaches some of its daemons, so that parents alone do not tell. They carry the name of their session's folder
    on their command line, and a session is ours if one of our descendants names it. A process that was ours once stays
    ours (its parent may end before it), and so do its children. ``root``: another process than this one, with its own.
    """

    def __init__(self, root: int | None = None) -> None:
        self.root = root or os.getpid()
        stat = _stat(self.root)
        self.ours = {self.root: stat[1]} if stat else {}  # pid -> start time, which tells a reused pid
        self.sessions: set[bytes] = set()

    def scan(self) -> dict[int, float]:
        """CPU seconds so far of each of our processes, with those of its children that have ended."""
        found = {int(entry): stat for entry in os.listdir("/proc") if entry.isdigit() and (stat := _stat(int(entry)))}
        known = {pid for pid, start in self.ours.items() if pid in found and found[pid][1] == start}
        ours = _descendants(known, found)
        for pid in ours - known:
            self.sessions |= set(SESSION.findall(_cmdline(pid)))
        if self.sessions:
            named = {pid for pid in found.keys() - ours if self.sessions & set(SESSION.findall(_cmdline(pid)))}
            ours = _descendants(ours | named, found)
        self.ours = {pid: found[pid][1] for pid in ours}
        return {pid: found[pid][2] for pid in ours}

    def pss_mib(self) -> float:
        """Memory of all our processes: proportional set size, so that shared pages count once."""
        return self.memory_mib()["pss"]

    def memory_mib(self) -> dict[str, float]:
        """The same, ``pss``, and what it consists of: ``anon`` is memory of the processes themselves, ``shmem`` is
        shared, as in Ray's object store, and ``file`` are pages of files, which the system takes back when it needs
        them."""
        total = dict.fromkeys(("pss", "anon", "shmem", "file"), 0.0)
        for pid in self.scan():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            for line in text.splitlines():
                name = line.partition(":")[0].lower().removeprefix("pss_")
                if line.startswith("Pss") and name in total:
                    total[name] += int(line.split()[1]) / 1024
        return total


def _stat(pid: int) -> tuple[int, int, float] | None:
    """Parent, start time and CPU seconds of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19]), sum(map(int, fields[11:15])) * TICK


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _descendants(roots: set[int], found: dict[int, tuple[int, int, float]]) -> set[int]:
    ours = roots & found.keys()
    while more := {pid for pid, stat in found.items() if stat[0] in ours and pid not in ours}:
        ours |= more
    return ours


class Usage:
    """CPU use over a window, in cores: ours, and what others took from the machine (stolen time included)."""

    def __init__(self, tree: ProcessTree) -> None:
        self.tree = tree
        self.start()

    def start(self) -> None:
        self.wall, self.busy, self.own = time.perf_counter(), _busy(), self.tree.scan()

    def stop(self, apart: Iterable[int] = ()) -> dict[str, float]:
        """``foreign``, ``own``, and ``rest``: what our processes but ``apart`` used."""
        own, busy, wall = self.tree.scan(), _busy(), time.perf_counter()
        seconds = wall - self.wall
        # a process that has ended took its own figure with it, but its parent's holds it once it was waited for
        used = {pid: cpu - self.own.get(pid, 0.0) for pid, cpu in own.items()}
        ours = max(0.0, sum(own.values()) - sum(self.own.values()))
        others = max(0.0, busy - self.busy - ours)
        rest = sum(cpu for pid, cpu in used.items() if pid not in set(apart))
        return {"foreign": others / seconds, "own": ours / seconds, "rest": rest / seconds}


def _busy() -> float:
    """Seconds that all cores together were busy since boot: user, nice, system, interrupts, stolen."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]))
    return (sum(fields[:3]) + sum(fields[5:8])) * TICK


def median_ratio(above: Sequence[float], below: Sequence[float], paired: bool = True) -> dict[str, Any]:
    """The ratio of two medians with its 95 % bootstrap interval (resampling pairs, or each side by itself)."""
    a, b = np.asarray(above, float), np.asarray(below, float)
    rng = np.random.default_rng(0)
    first = rng.integers(len(a), size=(10_000, len(a)))
    second = first if paired else rng.integers(len(b), size=(10_000, len(b)))
    ratios = np.median(a[first], axis=1) / np.median(b[second], axis=1)
    return {
        "ratio": float(np.median(a) / np.median(b)),
        "low": float(np.quantile(ratios, 0.025)),
        "high": float(np.quantile(ratios, 0.975)),
    }


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": model.group(1) if model else platform.processor(),
        "cores": os.cpu_count(),
        "avx512": "avx512f" in cpuinfo,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "ray", "numpy"):
        # the training core is measured where there may be no Ray
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--", ":/fedray"], capture_output=True, text=True)
    found["fedray"] = (commit.stdout.strip() or "uncommitted") + ("+changes" if changed.stdout.strip() else "")
    return found


class Results:
    """``NAME-DATE.csv``, a row per sample written as it comes, and ``NAME-DATE.json``, the summary."""

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        RESULTS.mkdir(exist_ok=True)
        self.path = RESULTS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}.csv"
        self.file = self.path.open("w", newline="")
        self.table = csv.DictWriter(self.file, columns)
        self.table.writeheader()

    def row(self, **values: Any) -> None:
        self.table.writerow({key: round(v, 6) if isinstance(v, float) else v for key, v in values.items()})
        self.file.flush()

    def summary(self, **values: Any) -> None:
        self.file.close()
        values = json.loads(json.dumps(values), parse_constant=lambda _: None)  # JSON has no NaN
        whole = {**values, "machine": machine(), "versions": versions(), "quiet": QUIET}
        self.path.with_suffix(".json").write_text(json.dumps(whole, indent=2) + "\n")
        print(json.dumps(values, indent=2))
        print(f"written: {self.path} and .json")


def patient(wanted: int, minutes: float) -> Callable[[int], bool]:
    """Says whether ``kept`` samples are still too few and there is time left."""
    end = time.monotonic() + 60 * minutes
    return lambda kept: kept < wanted and time.monotonic() < end
