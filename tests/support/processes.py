"""Processes that tests start, look for and end by their numbers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

PROGRAM = "from fedray.run import main; raise SystemExit(main())"
"""What fedray's command line does."""


@cache
def loaded() -> Any:
    """Returns a context of multiprocessing whose processes have torch and fedray loaded, and nothing else going on.

    They start in milliseconds, where a new Python takes seconds to import torch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedray.api", "fedray.cli.main", "fedray.testing.contracts"])
    return context


def python(
    code: str, *arguments: str, folder: Path | None = None, seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    """Does what `python -c CODE ARGUMENTS` does, in a process that has torch and fedray loaded."""
    with tempfile.TemporaryDirectory() as temporary:
        streams = [Path(temporary, name) for name in ("out", "err")]
        details = code, arguments, folder or Path.cwd(), dict(os.environ), streams
        process = loaded().Process(target=_python, args=details)
        process.start()
        try:
            process.join(seconds)
            assert process.exitcode is not None, f"it did not end in {seconds:g} s"
        finally:
            process.kill()
            process.join()
        out, err = (path.read_text() if path.exists() else "" for path in streams)
        return subprocess.CompletedProcess(["python", "-c", code, *arguments], process.exitcode, out, err)


def _python(
    code: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Sequence[Path]
) -> None:
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path = ["-c", *arguments], ["", *sys.path]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(main))


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
        if entry.name.isdigit() and (fields := _fields(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for candidate in found:
        found += [child for child, parent in parents.items() if parent == candidate]
    return found[1:]


def begun_at(pids: list[int]) -> dict[int, str]:
    """When each of the processes has begun, which tells it from a later one with its number."""
    found = {pid: _fields(pid) for pid in pids}
    return {pid: fields[19] for pid, fields in found.items() if fields}


def still_the_same(begun: Mapping[int, str]) -> list[int]:
    """Those processes of ``begun_at`` that still run."""
    return [pid for pid, when in begun_at(list(begun)).items() if when == begun[pid]]


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def end(process: subprocess.Popen[Any]) -> None:
    """Kills a process and all that it has started."""
    below = descendants(process.pid) if process.poll() is None else []
    process.kill()
    kill_all(below)
    with process:
        pass


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
