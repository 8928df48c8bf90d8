"""One run of fedray in a process of its own, with the seconds and the memory of each of its rounds.

:func:`fresh` is for the benchmarks; as a program this file is the process that it starts. The models and the data set
that are given to fedray from Python are here.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import QUIET, ProcessTree, Usage
from torch import Tensor, nn
from watch import Watch

KINDS = ("pss", "anon", "shmem", "file")
WEIGHTS = "weights/mobilenet_v2-b0353104.pth"
LEAST_SAMPLES = 10
"""The number of samples of the memory below which no slope is told."""

COLUMNS = ["round", "seconds", "round_seconds", "samples", "foreign", "kept", *(f"{kind}_mib" for kind in KINDS)]
"""The columns of a round's row. Memory is the most of the samples that were taken in the round."""


def mobilenet(classes: int) -> nn.Module:
    """torchvision's MobileNetV2 with ImageNet's weights from $FEDRAY_DATA, but for its last layer, which is new."""
    from torchvision.models import mobilenet_v2

    network = mobilenet_v2()
    network.load_state_dict(torch.load(Path(os.environ["FEDRAY_DATA"]) / WEIGHTS, weights_only=True))
    network.classifier[1] = nn.Linear(network.last_channel, classes)
    return network


def strided(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model that does little: a convolution of 8 x 8 kernels that do not overlap, and a linear layer."""
    channels, height, width = input_shape
    features = 8 * ((height - 8) // 8 + 1) * ((width - 8) // 8 + 1)
    return nn.Sequential(nn.Conv2d(channels, 8, 8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(features, classes))


class Generated(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Items of 100 kB that are made when they are read, from nothing but their number."""

    shape = (3, 183, 183)
    classes = 10

    def __init__(self, first: int, clients: int, each: int) -> None:
        self.first = first
        self.clients = np.repeat(np.arange(clients), each)
        self.targets = np.random.default_rng(first).integers(0, self.classes, len(self.clients))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        content = np.random.Generator(np.random.PCG64(self.first + i)).bytes(math.prod(self.shape))
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(self.shape), int(self.targets[i])


MODELS = {"mobilenet": mobilenet, "strided": strided}


class Rounds:
    """A callback that times rounds from the end of one call to the start of the next, so that nothing is left out."""

    def __init__(self, rounds: int, watch: Watch) -> None:
        self.rounds, self.watch, self.usage = rounds, watch, Usage(ProcessTree())
        self.rows: list[dict[str, Any]] = []
        self.began = self.resumed = time.perf_counter()

    @property
    def current(self) -> int:
        """The number of the round that is in progress. What comes before the first one counts as round 1."""
        return len(self.rows) + 1

    def __call__(self, report: Any) -> bool:
        seconds, foreign = time.perf_counter() - self.resumed, self.usage.stop()["foreign"]
        self.rows.append(
            {
                "round": report.round,
                "seconds": seconds,
                "round_seconds": report.metrics["round_seconds"],
                "foreign": foreign,
                # the first round holds the start of everything
                "kept": int(report.round > 1 and foreign <= QUIET),
            }
        )
        if report.round == self.rounds:
            # before the actors go
            self.watch.close()
        self.usage.start()
        self.resumed = time.perf_counter()
        return False


class Memory(Watch):
    """Samples the memory of a process tree every second, by kinds."""

    def sample(self) -> dict[str, float]:
        return {f"{kind}_mib": value for kind, value in self.tree.memory_mib().items()}

    def most_of(self, round: int) -> dict[str, float]:
        """Returns the most of each kind in the samples of a round; nothing if none was taken in it."""
        taken = [sample for sample in self.samples if sample["where"] == round]
        return {f"{kind}_mib": max(sample[f"{kind}_mib"] for sample in taken) for kind in KINDS} if taken else {}

    def growth(self, name: str, after: int) -> dict[str, Any] | None:
        """Returns :meth:`slope`, or None if there are too few samples."""
        taken = [sample["where"] for sample in self.samples if sample["where"] >= after]
        return self.slope(name, after) if len(taken) >= LEAST_SAMPLES and len(set(taken)) > 2 else None


def measure(spec: Mapping[str, Any], launched: float) -> dict[str, Any]:
    """Makes one run, and returns its rounds, its memory, and the seconds to the first round since ``launched``."""
    from fedray import simulate

    settings = {"engine.address": "local", **spec["settings"]}
    given: dict[str, Any] = {"model": MODELS[spec["model"]]} if "model" in spec else {}
    if "generated" in spec:
        clients, each = spec["generated"]
        given |= {"data": Generated(0, clients, each), "test": Generated(clients * each, 1, 200)}
    with tempfile.TemporaryDirectory() as output:
        watch = Memory(ProcessTree(), Path(output), lambda: rounds.current)
        rounds = Rounds(settings["run.rounds"], watch)
        result = simulate({**settings, "run.output": output}, **given, callbacks=[rounds])
        samples = result.clients.groupby("round")["samples"].sum().to_dict()
        profile = result.profile.to_dict("records") if settings.get("engine.profile") else None
        summary = result.summary
    rows = [{**row, "samples": samples[row["round"]], **watch.most_of(row["round"])} for row in rounds.rows]
    # GHBM fills its window of tau rounds first, which is growth that ends
    after = 2 + len(rows) // 2
    later = [row["seconds"] for row in rows[1:]]
    return {
        "rows": rows,
        "profile": profile,
        "summary": {
            "status": summary["status"],
            "final": summary["final"],
            "start_seconds": rounds.began - launched + rows[0]["seconds"] - rows[0]["round_seconds"],
            "seconds": float(np.median(later)) if later else None,
            "samples_per_second": sum(row["samples"] for row in rows[1:]) / sum(later) if later else None,
            "kept": sum(row["kept"] for row in rows),
            "foreign": watch.median("foreign"),
            "peak_mib": {kind: watch.peak(f"{kind}_mib") for kind in KINDS},
            "mib_per_round": {kind: watch.growth(f"{kind}_mib", after) for kind in ("pss", "anon", "shmem")},
            "mib_per_round_from": after,
        },
    }


def fresh(spec: Mapping[str, Any], cache: Path) -> dict[str, Any]:
    """Calls :func:`measure` in a fresh process, whose ``$XDG_CACHE_HOME`` is ``cache``."""
    # on Linux the clock is the same in all processes
    command = [sys.executable, __file__, json.dumps(spec), str(time.perf_counter())]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"the run failed: {json.dumps(spec)}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]), float(sys.argv[2]))))
