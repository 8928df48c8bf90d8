"""Benchmark E: clients' state larger than memory. 1,000 clients of 2.5 million parameters, all in every round.

python analysis/benchmarks/state.py

Each algorithm is run to the end on two client actors and an object store of 1 GB, then once more, killed with SIGKILL
in its last round, and resumed: the two must end with the same model. Memory is the peak of the summed PSS of all
processes, sampled every second.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ProcessTree, Results
from watch import Watch

CHILD = """
import json, sys
import ray
quiet = dict(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
ray.init(address="local", object_store_memory=10**9, **quiet)
from fedray import simulate
simulate(json.loads(sys.argv[1]))
"""


def settings(algorithm: str, output: str, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "run.name": algorithm, "run.output": output, "run.rounds": args.rounds, "run.eval_every": 0,
        "run.checkpoint_every": 1, "run.keep_checkpoints": 1, "algorithm.name": algorithm,
        "data.source": "mnist", "data.clients": args.clients, "data.samples_per_client": 60,
        "data.partition.kind": "iid", "data.public_samples": 0, "model.name": "mlp", "model.hidden": [args.hidden],
        "train.local_steps": 3, "train.batch_size": 20, "train.lr": 0.01, "engine.actors": 2,
    }  # fmt: skip


class Run:
    """One run in a process of its own."""

    def __init__(self, algorithm: str, output: Path, args: argparse.Namespace) -> None:
        self.folder = output / algorithm
        environment = {**os.environ, "RAY_worker_niceness": "0"}
        command = [sys.executable, "-c", CHILD, json.dumps(settings(algorithm, str(output), args))]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)

    def rounds(self) -> int:
        """How many are recorded."""
        metrics = self.folder / "metrics.csv"
        return max(0, metrics.read_text().count("\n") - 1) if metrics.exists() else 0

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def wait(self) -> None:
        if self.process.wait():
            raise RuntimeError(f"the run in {self.folder} failed")

    def kill(self, tree: ProcessTree) -> None:
        """SIGKILL for all of it."""
        ours = set(tree.scan()) - {tree.root}
        for pid in ours:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def seconds_per_round(folder: Path) -> list[float]:
    """Wall time between the rows of metrics.csv: training, checkpoint and all."""
    import pandas as pd

    return list(pd.read_csv(folder / "metrics.csv")["wall_seconds"].diff()[1:])


def whole(algorithm: str, output: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A run from beginning to end."""
    tree = ProcessTree()
    run = Run(algorithm, output, args)
    watch = Watch(tree, output, run.rounds)
    run.wait()
    watch.close()
    summary = run.summary()
    return {
        "seconds": seconds_per_round(run.folder),
        "foreign": watch.median("foreign"),
        "peak_pss_mib": watch.peak("pss_mib"),
        "peak_shared_mib": watch.peak("shared_mib"),
        "peak_disk_mib": watch.peak("disk_mib"),
        "sha256": summary["model_sha256"],
        "parameters": summary["parameters"],
    }


def killed(algorithm: str, output: Path, args: argparse.Namespace) -> str:
    """The model of a run that was killed in its last round, and resumed."""
    tree = ProcessTree()
    run = Run(algorithm, output, args)
    while run.rounds() < args.rounds - 1:
        if run.process.poll() is not None:
            raise RuntimeError("it ended before it could be killed")
        time.sleep(0.2)
    time.sleep(args.kill_after)
    run.kill(tree)
    if (run.folder / "summary.json").exists():
        raise RuntimeError("it was done before it could be killed")
    again = Run(algorithm, output, args)
    again.wait()
    if "resuming" not in (again.folder / "log.txt").read_text():
        raise RuntimeError("it started over")
    return again.summary()["model_sha256"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "scaffold", "feddyn", "fedhbm"])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--hidden", type=int, default=3145, help="width of the hidden layer: 2,500,285 parameters")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kill-after", type=float, default=5.0, help="seconds into the last round")
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--output", help="where the runs are made: a disk with room for 40 GB")
    args = parser.parse_args()
    columns = ["algorithm", "round", "seconds", "foreign", "peak_pss_mib", "peak_shared_mib", "peak_disk_mib"]
    results = Results("state", columns)
    found: dict[str, Any] = {}
    for algorithm in args.algorithms:
        with tempfile.TemporaryDirectory(dir=args.output) as folder:
            run = found[algorithm] = whole(algorithm, Path(folder) / "whole", args)
        for number, seconds in enumerate(run["seconds"], 2):
            results.row(algorithm=algorithm, round=number, seconds=seconds, **{k: run[k] for k in columns[3:]})
        if not args.no_kill:
            with tempfile.TemporaryDirectory(dir=args.output) as folder:
                run["resumed_exactly"] = killed(algorithm, Path(folder) / "killed", args) == run["sha256"]
        print(algorithm, run, flush=True)
    for run in found.values():
        run["seconds_per_round"] = sorted(run["seconds"])[len(run["seconds"]) // 2]
        run["against_first"] = run["seconds_per_round"] / found[args.algorithms[0]]["seconds_per_round"]
    results.summary(part="state", clients=args.clients, rounds=args.rounds, algorithms=found)


if __name__ == "__main__":
    main()
