"""One run on the hosts, seen as its user sees it: by its lines and by what it writes."""

from __future__ import annotations

import itertools
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from faults.cluster import HEAD, ROOT, Hosts

SETTINGS = [
    "data.source=sample", "data.clients=60", "model.name=mlp", "model.hidden=[256]", "train.cohort_size=24",
    "train.local_steps=10", "run.rounds=30", "run.eval_every=10", "run.checkpoint_every=5", "run.name=run",
    f"task.loss={ROOT}/analysis/faults/paced.py:cross_entropy",
    "run.log_clients=false", "engine.vectorize=false", "engine.compile=false", "engine.cpus_per_actor=1",
]  # fmt: skip


class Run:
    """A run on the cluster, whose driver is on the head, and the seconds at which it printed its ``lines``.

    Its files are in ``folder``; ``output`` is what it is told, which may be a URI with a working copy there.
    """

    def __init__(self, hosts: Hosts, folder: Path, output: str, settings: list[str]) -> None:
        self.hosts, self.folder = hosts, folder
        words = " ".join(shlex.quote(word) for word in [*SETTINGS, *settings, f"run.output={output}"])
        self.command = hosts.shell(HEAD, f"{sys.executable} {ROOT}/fedray/run.py {words}")
        self.lines: list[tuple[float, str]] = []
        self.began = time.monotonic()
        self.start()

    def start(self) -> None:
        """Types the command, for the first time or again."""
        key = ["ssh", "-tt", "-i", str(self.hosts.folder / "id"), "-o", "StrictHostKeyChecking=no"]
        key += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", f"root@{self.hosts.address}"]
        command = f"TERM=dumb; set -o pipefail; {self.command} 2>&1 | cat"
        self.process = subprocess.Popen(
            [*key, f"bash -c {shlex.quote(command)}"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self.reader = threading.Thread(target=self._read, args=(self.process,))
        self.reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.monotonic() - self.began, line.rstrip()))

    def rounds(self) -> int:
        try:
            return len(next(self.folder.rglob("metrics.csv")).read_text().splitlines()) - 1
        except (OSError, StopIteration):
            return 0

    def wait_for_round(self, number: int) -> None:
        deadline = time.monotonic() + 240
        while self.rounds() < number and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def wait(self, timeout: float = 400) -> int:
        """Waits for the command's end, and returns its exit status; 124 if it did not end."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = 124
            self.process.send_signal(signal.SIGKILL)
        self.reader.join(10)
        self.seconds = time.monotonic() - self.began
        return code

    def first_round(self) -> float:
        """The seconds after which the first line about a round was printed; 0 if none was."""
        return next((at for at, line in self.lines if line.startswith("round ")), 0.0)

    def longest_silence(self) -> float:
        times = [0.0, *(at for at, _ in self.lines), self.seconds]
        return max(after - before for before, after in itertools.pairwise(times))

    def summary(self) -> dict[str, object]:
        try:
            found: dict[str, object] = json.loads(next(self.folder.rglob("summary.json")).read_text())
            return found
        except (OSError, ValueError, StopIteration):
            return {}
