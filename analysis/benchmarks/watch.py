"""What a tree of processes holds over time: memory, shared memory, open files, disk; and what others compute."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import ProcessTree, Usage

MIB = 2**20


class Watch:
    """Samples every ``seconds`` until closed, with ``where()`` (a round, say) beside each sample."""

    def __init__(self, tree: ProcessTree, folder: Path, where: Callable[[], float], seconds: float = 1.0) -> None:
        self.tree, self.folder, self.where, self.seconds = tree, folder, where, seconds
        self.samples: list[dict[str, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        usage = Usage(self.tree)
        while not self._ended.wait(self.seconds):
            foreign = usage.stop()["foreign"]
            usage.start()
            self.samples.append(
                {"seconds": time.monotonic(), "where": self.where(), **self.sample(), "foreign": foreign}
            )

    def sample(self) -> dict[str, float]:
        return {
            "pss_mib": self.tree.pss_mib(),
            "shared_mib": _shared_mib(),
            "files": self._open_files(),
            "disk_mib": used_mib(self.folder),
        }

    def _open_files(self) -> int:
        count = 0
        for pid in self.tree.ours:
            try:
                count += len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue
        return count

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def peak(self, name: str) -> float:
        return max(sample[name] for sample in self.samples)

    def median(self, name: str) -> float:
        return float(np.median([sample[name] for sample in self.samples]))

    def slope(self, name: str, after: float) -> dict[str, Any]:
        """Growth for each unit of ``where``, by least squares over the samples from ``after`` on, with the 95 %
        interval of resampled blocks: neighbouring samples are alike."""
        kept = [sample for sample in self.samples if sample["where"] >= after]
        x, y = (np.array([sample[key] for sample in kept]) for key in ("where", name))
        rng, block = np.random.default_rng(0), max(1, len(x) // 20)
        slopes = []
        for _ in range(2000):
            starts = rng.integers(0, max(1, len(x) - block), size=len(x) // block + 1)
            chosen = (starts[:, None] + np.arange(block)).ravel()
            if np.ptp(x[chosen]):
                slopes.append(np.polyfit(x[chosen], y[chosen], 1)[0])
        low, high = np.quantile(slopes, [0.025, 0.975])
        first, last = y[: len(y) // 4].mean(), y[-(len(y) // 4) :].mean()
        return {"slope": float(np.polyfit(x, y, 1)[0]), "low": low, "high": high, "first": first, "last": last}


def _shared_mib() -> float:
    """What all of shared memory takes. Ray's object store has no name there."""
    space = os.statvfs("/dev/shm")
    return (space.f_blocks - space.f_bfree) * space.f_frsize / MIB


def used_mib(folder: Path) -> float:
    """What a folder takes of its disk; files with several names count once."""
    blocks: dict[int, int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            blocks[found.st_ino] = found.st_blocks
    return sum(blocks.values()) * 512 / MIB
