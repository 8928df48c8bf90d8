"""What a fault of a cluster costs a run: on three hosts of their own, at random moments, against an undisturbed run.

    python analysis/benchmarks/cluster_faults.py OUTPUT                          # each event ten times: some hours
    python analysis/benchmarks/cluster_faults.py OUTPUT --times 1 --only cut-20

The hosts are what the script in $FEDRAY_TEST_HOSTS makes (`up N`, `ssh I COMMAND`, `cut I`, `mend I`, `down`); the
program in $FEDRAY_DELAY_WIRE delays and loses what goes to one of them. Takes root. One row for each run goes to
OUTPUT/faults.csv at once, and OUTPUT/faults.md sums them up: whether the bits are those of the undisturbed run, how
many seconds it took longer (less those of the event itself), for how long no line was printed, and what was left.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD, OTHER, VICTIM = 1, 2, 3
PORT = 6379
CALM = "calm"

SETTINGS = [
    "data.source=sample", "data.clients=60", "model.name=mlp", "model.hidden=[256]", "train.cohort_size=24",
    "train.local_steps=50", "run.rounds=40", "run.eval_every=10", "run.checkpoint_every=5", "run.name=run",
    "run.log_clients=false", "engine.vectorize=false", "engine.compile=false", "engine.cpus_per_actor=1",
]  # fmt: skip


@dataclass
class Outcome:
    """One run: what happened to it, and what it took. ``lost`` is in seconds, without those of the event itself."""

    event: str
    algorithm: str
    code: int
    same_bits: bool
    seconds: float
    lost: float
    longest_silence: float
    status: str
    left: str
    line: str


class Hosts:
    """The three hosts, with a Ray node on each."""

    def __init__(self, folder: Path) -> None:
        self.script, self.folder = os.environ["FEDRAY_TEST_HOSTS"], folder
        self.environment = os.environ | {"TEST_HOSTS_DIR": str(folder)}
        print(self("up", "3"), end="")
        for host in (HEAD, OTHER, VICTIM):
            (folder / f"tmp-of-{host}").mkdir()
        self.address = f"10.77.0.1{HEAD}"

    def __call__(self, *words: str, timeout: float = 120) -> str:
        done = subprocess.run(
            [self.script, *words], env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        return done.stdout + done.stderr

    def shell(self, host: int, command: str) -> str:
        """The ssh command that runs ``command`` on ``host``, with what fedray and Ray need there."""
        variables = {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "TMPDIR": str(self.folder / f"tmp-of-{host}"), "RAY_TMPDIR": "/tmp", "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token",
        }  # fmt: skip
        return f"env {' '.join(f'{name}={shlex.quote(value)}' for name, value in variables.items())} {command}"

    def ssh(self, host: int, command: str, timeout: float = 120) -> str:
        return self("ssh", str(host), self.shell(host, command), timeout=timeout)

    def start(self, host: int, prefix: str = "") -> None:
        where = (
            f"--head --port={PORT} --include-dashboard=false" if host == HEAD else f"--address={self.address}:{PORT}"
        )
        self.ssh(host, f"{prefix} ray start {where} --num-cpus=1 --node-ip-address=10.77.0.1{host}")

    def stop(self, host: int) -> None:
        self.ssh(host, "ray stop --force")

    def kill(self, host: int, pattern: str, number: str = "-9") -> None:
        self.ssh(host, f"sh -c {shlex.quote(f'pgrep -f {shlex.quote(pattern)} | head -1 | xargs -r kill {number}')}")

    def left(self) -> str:
        """What the run left on the hosts: processes of its own, and folders of clients' states."""
        found = []
        for host in (HEAD, OTHER, VICTIM):
            actors = self.ssh(host, "pgrep -fc '[r]ay::(Client|Server|State)' || true").split()
            folders = [path.name for path in (self.folder / f"tmp-of-{host}").glob("fedray-*")]
            if actors and actors[0] != "0":
                found.append(f"{actors[0]} actors on host{host}")
            if folders:
                found.append(f"{len(folders)} folders on host{host}")
        return "; ".join(found)


class Run:
    """A run on the cluster, whose driver is on the head, and the times at which it printed lines."""

    def __init__(self, hosts: Hosts, output: Path, settings: list[str]) -> None:
        self.hosts, self.output = hosts, output
        words = " ".join(shlex.quote(word) for word in [*SETTINGS, *settings, f"run.output={output}"])
        self.command = hosts.shell(HEAD, f"{sys.executable} {ROOT}/fedray/run.py {words}")
        self.lines: list[tuple[float, str]] = []
        self.began = time.monotonic()
        self.start()

    def start(self) -> None:
        key = ["ssh", "-tt", "-i", str(self.hosts.folder / "id"), "-o", "StrictHostKeyChecking=no"]
        key += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", f"root@{self.hosts.address}"]
        self.process = subprocess.Popen(
            [*key, f"TERM=dumb {self.command} 2>&1 | cat"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self.reader = threading.Thread(target=self._read, args=(self.process,))
        self.reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.monotonic() - self.began, line.rstrip()))

    def rounds(self) -> int:
        try:
            return len((self.output / "run" / "metrics.csv").read_text().splitlines()) - 1
        except OSError:
            return 0

    def wait_for_round(self, number: int) -> None:
        deadline = time.monotonic() + 240
        while self.rounds() < number and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def end(self, timeout: float = 400) -> int:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = 124
            self.process.send_signal(signal.SIGKILL)
        self.reader.join(10)
        self.seconds = time.monotonic() - self.began
        return code

    def longest_silence(self) -> float:
        times = [0.0, *(at for at, _ in self.lines), self.seconds]
        return max(after - before for before, after in itertools.pairwise(times))

    def summary(self) -> dict[str, object]:
        try:
            found: dict[str, object] = json.loads((self.output / "run" / "summary.json").read_text())
            return found
        except (OSError, ValueError):
            return {}


def again(run: Run) -> None:
    run.process.wait(60)
    run.start()


def cut(seconds: float) -> Callable[[Hosts, Run], float]:
    def event(hosts: Hosts, run: Run) -> float:
        hosts("cut", str(VICTIM))
        time.sleep(seconds)
        hosts("mend", str(VICTIM))
        return seconds

    return event


def off(hosts: Hosts, run: Run) -> float:
    hosts.ssh(VICTIM, "pkill -9 -f ray")
    return 0.0


def off_and_on(hosts: Hosts, run: Run) -> float:
    off(hosts, run)
    time.sleep(5)
    hosts.start(VICTIM)
    return 0.0


def killed_driver(hosts: Hosts, run: Run) -> float:
    hosts.kill(HEAD, "[f]edray/run.py")
    again(run)
    return 0.0


def stuttering(hosts: Hosts, run: Run) -> float:
    """The actor of one host gets a fifth of the time."""
    while run.process.poll() is None:
        for number, seconds in (("-STOP", 0.8), ("-CONT", 0.2)):
            hosts.kill(VICTIM, "[r]ay::ClientActor", number)
            time.sleep(seconds)
    return 0.0


def killed(host: int, pattern: str) -> Callable[[Hosts, Run], float]:
    def event(hosts: Hosts, run: Run) -> float:
        hosts.kill(host, pattern)
        return 0.0

    return event


def joined(hosts: Hosts, run: Run) -> float:
    hosts.start(VICTIM)
    return 0.0


def delayed(hosts: Hosts, run: Run) -> float:
    """Everything between one host and the others takes 50 ms, and one packet of a hundred is lost."""
    wire = subprocess.Popen([os.environ["FEDRAY_DELAY_WIRE"], f"th{VICTIM}", "50", "0.01"], stdout=subprocess.DEVNULL)
    run.process.wait(400)
    wire.terminate()
    wire.wait(30)
    return 0.0


EVENTS: dict[str, Callable[[Hosts, Run], float]] = {
    "actor killed": killed(VICTIM, "[r]ay::ClientActor"),
    "server killed": killed(HEAD, "[r]ay::ServerActor"),
    "driver killed": killed_driver,
    "worker off and on": off_and_on,
    "worker off": off,
    "worker added": joined,
    **{f"cut-{seconds}": cut(seconds) for seconds in (5, 10, 20, 30)},
    "cut for good": cut(0),
    "delayed": delayed,
    "slow node": stuttering,
}
EVENTS["cut for good"] = lambda hosts, run: float(not hosts("cut", str(VICTIM))) * 0.0


def outcome(event: str, algorithm: str, hosts: Hosts, output: Path, calm: Outcome | None, sha: str | None) -> Outcome:
    """Makes a run on a fresh Ray cluster, to which ``event`` happens at a random moment."""
    for host in (HEAD, OTHER, VICTIM):
        if host != VICTIM or event != "worker added":
            hosts.start(host)
    run = Run(hosts, output, [f"algorithm.name={algorithm}"])
    spent = 0.0
    if event != CALM:
        run.wait_for_round(random.randint(5, 20))
        time.sleep(random.uniform(0, 1))
        spent = EVENTS[event](hosts, run)
    code = run.end()
    hosts("mend", str(VICTIM))
    summary = run.summary()
    lost = run.seconds - spent - calm.seconds if calm else 0.0
    said = [line for _, line in run.lines if "no answer" in line or "died" in line or "lost" in line or "left" in line]
    found = Outcome(
        event, algorithm, code, sha is not None and summary.get("model_sha256") == sha, round(run.seconds, 1),
        round(lost, 1), round(run.longest_silence(), 1), str(summary.get("status")), hosts.left(),
        (said or [""])[0].replace("\n", " ")[:200],
    )  # fmt: skip
    output.mkdir(exist_ok=True)
    (output / "lines.txt").write_text("\n".join(f"{at:7.1f} {line}" for at, line in run.lines) + "\n")
    for host in (HEAD, OTHER, VICTIM):
        hosts.stop(host)
    return found


def table(rows: list[Outcome]) -> str:
    lines = ["| event | runs | same bits | seconds lost: median, most | longest silence | left over |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for event in dict.fromkeys((row.event, row.algorithm) for row in rows):
        own = [row for row in rows if (row.event, row.algorithm) == event]
        lost, silence = [row.lost for row in own], max(row.longest_silence for row in own)
        left = "; ".join(sorted({row.left for row in own if row.left})) or "nothing"
        lines.append(
            f"| {event[0]}, {event[1]} | {len(own)} | {sum(row.same_bits for row in own)} | "
            f"{statistics.median(lost):.0f}, {max(lost):.0f} | {silence:.0f} | {left} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=list(EVENTS), default=list(EVENTS))
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "scaffold"])
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    hosts = Hosts(Path(options.output).absolute() / "hosts")
    rows: list[Outcome] = []
    try:
        for algorithm in options.algorithms:
            calm_output = options.output.absolute() / f"{algorithm}-calm"
            calm = outcome(CALM, algorithm, hosts, calm_output, None, None)
            sha = json.loads((calm_output / "run" / "summary.json").read_text())["model_sha256"]
            calm.same_bits = True
            rows.append(calm)
            for number in range(options.times):
                for event in options.only:
                    output = options.output.absolute() / f"{algorithm}-{event.replace(' ', '-')}-{number}"
                    rows.append(outcome(event, algorithm, hosts, output, calm, sha))
                    print(rows[-1], flush=True)
                    with (options.output / "faults.csv").open("w", newline="") as file:
                        writer = csv.DictWriter(file, list(asdict(rows[0])))
                        writer.writeheader()
                        writer.writerows(map(asdict, rows))
                    (options.output / "faults.md").write_text(table(rows))
    finally:
        hosts("down")
    print(table(rows))


if __name__ == "__main__":
    main()
