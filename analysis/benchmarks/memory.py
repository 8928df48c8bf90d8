"""Benchmark G: what a large model takes of memory and disk, against what the table in the engine's README says.

python analysis/benchmarks/memory.py [ALGORITHM ...]      (fedavg scaffold ghbm fedhbm local_ghbm)

ViT-B/16 (85.6 million parameters) at 32 pixels on two actors, cohorts of 4, GHBM with tau 10. Beside each a run with a
tiny model, which shows what the processes take anyway.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from common import ProcessTree, Results

ROLES = {b"ray::ClientActor": "actor", b"ray::ServerActor": "server"}
ALGORITHMS = ("fedavg", "scaffold", "ghbm", "fedhbm")


def vit_b_16(input_shape: Any, classes: int) -> Any:
    from torchvision.models import vit_b_16

    return vit_b_16(image_size=input_shape[-1], num_classes=classes)


def tiny(input_shape: Any, classes: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), classes))


class Peaks:
    """Samples the private memory of each process until closed, and keeps the most of each role in bytes."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.tree, self.seconds = ProcessTree(), seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        scanned = 0.0
        while not self._ended.wait(self.seconds):
            if time.monotonic() - scanned > 2:
                self.tree.scan()
                scanned = time.monotonic()
            found: defaultdict[str, list[int]] = defaultdict(list)
            for pid in list(self.tree.ours):
                role, used = _private(pid)
                if role:
                    found[role].append(used)
            for role, each in found.items():
                self.peaks[role] = max(self.peaks[role], *each)
            self.peaks["all"] = max(self.peaks["all"], sum(sum(each) for each in found.values()))
            self.peaks["shared"] = max(self.peaks["shared"], _shared())

    def close(self) -> dict[str, int]:
        self._ended.set()
        self._thread.join()
        return dict(self.peaks)


def _private(pid: int) -> tuple[str, int]:
    """Returns the role of a process, and the bytes of memory that it shares with no other."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        role = next((name for title, name in ROLES.items() if command.startswith(title)), "")
        if not role:
            return "", 0
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return "", 0
    return role, 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


def _shared() -> int:
    """Returns the bytes in shared memory, which is Ray's object store here."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(fields["Shmem"].split()[0])


def measure(model: str, algorithm: str, rounds: int) -> dict[str, Any]:
    """Runs one experiment, and returns its peaks in bytes."""
    from fedray import simulate

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (850, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, 850)
    owner = np.arange(800) % 40
    before = _shared()
    peaks = Peaks()
    files = []
    with tempfile.TemporaryDirectory() as output:

        def callback(report: Any) -> None:
            files.append(_disk(Path(output) / "memory" / "checkpoints"))

        result = simulate(
            {
                "run.output": output, "run.rounds": rounds, "run.name": "memory", "algorithm.name": algorithm,
                "train.cohort_size": 4, "train.local_steps": 2, "train.batch_size": 10, "train.lr": 0.001,
                "engine.actors": 2, "engine.address": "local", "run.checkpoint_every": 1, "run.eval_every": 4,
                **({"algorithm.tau": 10} if algorithm == "ghbm" else {}),
            },
            data=(x[:800], y[:800], owner), test=(x[800:], y[800:]),
            model={"vit_b_16": vit_b_16, "tiny": tiny}[model], callbacks=[callback],
        )  # fmt: skip
        found = peaks.close()
        seconds = float(result.metrics["round_seconds"].median())
        parameters = result.summary["parameters"]
    found["shared"] -= before
    return {**found, "disk": max(files), "seconds": seconds, "parameters": parameters}


def _disk(folder: Path) -> int:
    """Returns the bytes of a run folder's files; a file with two names counts once."""
    sizes = {}
    for path in folder.rglob("*"):
        try:
            stat = path.lstat()
        except OSError:
            continue
        sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", default=ALGORITHMS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "ALGORITHM"), help="one run, in this process")
    args = parser.parse_args()
    if args.one:
        model, algorithm = args.one
        print(json.dumps(measure(model, algorithm, args.rounds)))
        return
    results = Results("memory", ["algorithm", "model", "actor_mb", "server_mb", "shared_mb", "disk_mb", "seconds"])
    for algorithm in args.algorithms:
        for model in ("tiny", "vit_b_16"):
            command = [sys.executable, __file__, "--rounds", str(args.rounds), "--one", model, algorithm]
            # its errors are printed as they are
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            results.row(
                algorithm=algorithm, model=model, seconds=found["seconds"],
                **{f"{name}_mb": round(found[name] / 1e6) for name in ("actor", "server", "shared", "disk")},
            )  # fmt: skip
            unit = 4 * found["parameters"] / 1e6
            print(algorithm, model, {n: round(found[n] / 1e6) for n in ("actor", "server", "shared", "disk", "all")},
                  f"4P = {unit:.1f} MB, round {found['seconds']:.2f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
