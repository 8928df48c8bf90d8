"""Processes that tests start, look for and end by their numbers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def wait_for_rounds(ended: Callable[[], int | None], metrics: Path, rounds: int) -> None:
    """Return once that many rounds are recorded."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert ended() is None, "the run ended before it could be killed"
        if metrics.exists() and metrics.read_text().count("\n") > rounds:
            return
        time.sleep(0.01)
    raise AssertionError("no round was recorded")


def descendants(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for candidate in found:
        found += [child for child, parent in parents.items() if parent == candidate]
    return found[1:]


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


def environment() -> dict[str, str]:
    """Returns the variables of a program that finds the modules of this folder, on a cluster of its own."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
        # a token file in the user's home would be for another cluster
        "RAY_AUTH_MODE": "disabled",
    }
