"""What is watched in the processes of a measured run: what reaches the server, and what memory each process takes.

This module is sent to Ray's processes by value, because they may be on other hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import ray
from common import ProcessTree

from fedray.engine.ray.server import ServerActor
from fedray.engine.sums import CohortSums

ARRIVED = "arrived.json"
"""The file beside the run folder into which the server writes what has reached it."""


class CountingServer(ServerActor):
    """The server actor of a run, which also counts, in each round, the tasks that come back, the bytes of their sums,
    and what its host sends and receives over the network."""

    def run(self, lockstep: bool) -> None:
        import fedray.engine.round

        rounds: list[dict[str, float]] = []
        counted = {"tasks": 0, "sum_bytes": 0}

        class CountedSums(CohortSums):
            def add(self, task: Any, found: Any) -> None:
                counted["tasks"] += 1
                counted["sum_bytes"] += sum(
                    value.nbytes for partial in found.sums.values() for value in partial.nodes.values()
                )
                super().add(task, found)

            def totals(self) -> Any:
                rounds.append({**counted, **network_bytes()})
                return super().totals()

        fedray.engine.round.CohortSums = CountedSums
        super().run(lockstep)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        file = Path(self.experiment.config.run.output) / ARRIVED
        file.write_text(json.dumps({"rounds": rounds, "peak_mib": peak}))


def network_bytes() -> dict[str, int]:
    """Returns how many bytes this host has received and sent so far, on all of its interfaces but the loopback."""
    total = {"received": 0, "sent": 0}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            fields = numbers.split()
            total["received"] += int(fields[0])
            total["sent"] += int(fields[8])
    return total


TITLES = {b"ray::ClientActor": "actor", b"ray::CountingServer": "server"}


class Probe:
    """An actor that samples the memory of a run's processes on its node. ``driver`` is the driver's process, if that is
    on this node."""

    def __init__(self, driver: int | None = None) -> None:
        # the processes of Ray here are the children of its raylet, as this one is, and those of its session
        self.tree, self.driver = ProcessTree(os.getppid()), driver
        self.peaks: defaultdict[str, float] = defaultdict(float)
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._sample()
            time.sleep(2)

    def _sample(self) -> None:
        if self.driver is not None:
            self.tree.ours.setdefault(self.driver, ProcessTree(self.driver).ours[self.driver])
        total = self.tree.memory_mib()
        now = {"all": total["pss"] - _memory(os.getpid(), "smaps_rollup", "Pss:"), "shared": total["shmem"]}
        if gpu := _gpu_mib():
            now["gpu"] = gpu
        for pid in list(self.tree.ours):
            role = "driver" if pid == self.driver else _role(pid)
            if role:
                now[role] = max(now.get(role, 0.0), _memory(pid, "status", "VmHWM:"))
        for name, value in now.items():
            self.peaks[name] = max(self.peaks[name], value)

    def look(self) -> dict[str, Any]:
        """Returns the largest value of each kind of memory in MiB, and what machine this node is.

        ``all`` is the memory of all processes together, in which shared pages count once, and ``shared`` the part of it
        that is Ray's object store. ``driver``, ``server`` and ``actor`` are the most that one such process has had,
        with the pages that it shares. ``gpu`` is the memory of GPUs. Hosts with the same ``machine`` are containers on
        one machine.
        """
        return {
            "memory": dict(self.peaks),
            "machine": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "processors": len(os.sched_getaffinity(0)),
        }


def _gpu_mib() -> float:
    """Returns how much memory of this host's GPUs is used, by whatever program; 0 without GPUs."""
    if shutil.which("nvidia-smi") is None:
        return 0.0
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(sum(map(int, subprocess.run(asked, capture_output=True, text=True).stdout.split())))


def _role(pid: int) -> str | None:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    return next((role for title, role in TITLES.items() if command.startswith(title)), None)


def _memory(pid: int, file: str, name: str) -> float:
    """Returns the number of MiB in the line ``name`` of a file in /proc, or 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) / 1024
    return 0.0


def probes(driver: int) -> list[Any]:
    """Starts a :class:`Probe` on each node of the cluster, and returns them. ``driver`` is the driver's process, which
    is on this node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found, here = [], ray.get_runtime_context().get_node_id()
    ray_: Any = ray
    for node in ray_.nodes():
        if node["Alive"]:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            actor: Any = ray.remote(Probe).options(num_cpus=0, scheduling_strategy=place)
            found.append(actor.remote(driver if node["NodeID"] == here else None))
    return found
