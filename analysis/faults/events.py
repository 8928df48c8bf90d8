"""What can happen to a cluster in the middle of a run."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from faults.cluster import HEAD, HOSTS, NAMESPACE, ROOT, VICTIM, Hosts, full
from faults.runs import Run

ALL = dict.fromkeys(HOSTS, "")
AN_HOUR_LATE = f"env PYTHONPATH={Path(__file__).parent / 'late'}:{ROOT}"


@dataclass(frozen=True)
class Event:
    """``happen`` is called at a random moment of the run, and returns how many seconds the event itself took. The Ray
    nodes before it are ``nodes``: hosts, and the words in front of the command that starts them. Unless
    ``nodes_stay``, they are started anew for the next run. ``output`` is where the run is told to write, if not to its
    folder."""

    happen: Callable[[Hosts, Run], float] = lambda hosts, run: 0.0
    nodes: Mapping[int, str] = field(default_factory=lambda: dict(ALL))
    nodes_stay: bool = True
    output: str = ""


def cut(seconds: float) -> Callable[[Hosts, Run], float]:
    def happen(hosts: Hosts, run: Run) -> float:
        hosts("cut", str(VICTIM))
        time.sleep(seconds)
        hosts("mend", str(VICTIM))
        return seconds

    return happen


def cut_for_good(hosts: Hosts, run: Run) -> float:
    hosts("cut", str(VICTIM))
    return 0.0


def off(hosts: Hosts, run: Run) -> float:
    hosts.ssh(VICTIM, "pkill -9 -f ray")
    return 0.0


def off_and_on(hosts: Hosts, run: Run) -> float:
    off(hosts, run)
    time.sleep(5)
    hosts.start(VICTIM)
    return 0.0


def killed(host: int, pattern: str) -> Callable[[Hosts, Run], float]:
    def happen(hosts: Hosts, run: Run) -> float:
        hosts.signal(host, pattern)
        return 0.0

    return happen


def killed_driver(hosts: Hosts, run: Run) -> float:
    hosts.signal(HEAD, "[f]edray/run.py")
    run.process.wait(60)
    run.start()
    return 0.0


def stuttering(hosts: Hosts, run: Run) -> float:
    """The actor of one host gets a fifth of the time."""
    while run.process.poll() is None:
        for number, seconds in (("-STOP", 0.8), ("-CONT", 0.2)):
            hosts.signal(VICTIM, "[r]ay::ClientActor", number)
            time.sleep(seconds)
    return 0.0


def joined(hosts: Hosts, run: Run) -> float:
    hosts.start(VICTIM)
    return 0.0


def delayed(hosts: Hosts, run: Run) -> float:
    """Everything between one host and the others takes 50 ms, and one packet of a hundred is lost."""
    wire = subprocess.Popen(
        [os.environ["FEDRAY_DELAY_WIRE"], f"{NAMESPACE}{VICTIM}", "50", "0.01"], stdout=subprocess.DEVNULL
    )
    run.process.wait(400)
    wire.terminate()
    wire.wait(30)
    return 0.0


def disk_full(folder: Callable[[Hosts, Run], Path]) -> Callable[[Hosts, Run], float]:
    """The disk of ``folder`` is full. If the run ends by that, there is room again, and its command is typed again."""

    def happen(hosts: Hosts, run: Run) -> float:
        began = time.monotonic()
        with full(folder(hosts, run)):
            code = run.wait()
        if code:
            run.lines.append((run.seconds, f"(status {code}, and summary.json says {run.summary()})"))
            run.start()
        return time.monotonic() - began

    return happen


def frozen(hosts: Hosts, run: Run) -> float:
    hosts.storage.freeze(20)
    return 0.0


EVENTS = {
    "calm": Event(),
    "actor killed": Event(killed(VICTIM, "[r]ay::ClientActor")),
    "server killed": Event(killed(HEAD, "[r]ay::ServerActor")),
    "driver killed": Event(killed_driver),
    "worker off and on": Event(off_and_on, nodes_stay=False),
    "worker off": Event(off, nodes_stay=False),
    "worker added": Event(joined, {host: "" for host in HOSTS if host != VICTIM}, nodes_stay=False),
    **{f"cut {seconds} s": Event(cut(seconds), nodes_stay=False) for seconds in (5, 10, 20, 30)},
    "cut for good": Event(cut_for_good, nodes_stay=False),
    "50 ms and 1 % loss": Event(delayed),
    "slow node": Event(stuttering),
    "clock an hour late": Event(nodes={**ALL, VICTIM: AN_HOUR_LATE}),
    "worker's disk full": Event(disk_full(lambda hosts, run: hosts.disks[VICTIM])),
    "head's disk full": Event(disk_full(lambda hosts, run: run.folder)),
    "storage frozen for 20 s": Event(frozen, output="s3://bucket/runs"),
}
"""All events by their names; ``calm`` is none."""
