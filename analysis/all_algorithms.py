"""All algorithms side by side: LeNet-5 on MNIST, 20 clients, cohorts of 5, Dirichlet 0.3, 60 rounds of 10 steps.

FEDRAY_DATA=... python analysis/all_algorithms.py OUTPUT [--seed 0] [--processes 2]

Every algorithm with its paper's default hyper-parameters (those that fedray has as defaults) and the same training
settings. Those that end more than 2 points below FedAvg are run again as their paper has them (`paper`), and FedAvg on
the same terms. Writes table.md and table.csv into OUTPUT; runs that are there already are not made again.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd

import fedray
from fedray.algorithms import known_algorithms

COMMON = {
    "data.source": "mnist",
    "data.clients": 20,
    "data.partition.kind": "dirichlet",
    "data.partition.alpha": 0.3,
    "model.name": "lenet5",
    "train.local_steps": 10,
    "train.batch_size": 64,
    "train.lr": 0.05,
    "train.cohort_size": 5,
    "run.rounds": 60,
    "run.eval_every": 10,
    "engine.kind": "local",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    # their rate is that of a normalised step (Reddi et al. tune it from 0.001 on)
    **{name: {"train.server_lr": 0.01} for name in ("fedadam", "fedyogi", "fedadagrad")},
}


def one(output: Path, setting: str, algorithm: str, seed: int, keys: dict[str, Any]) -> dict[str, Any]:
    """One run and what the table says of it."""
    name = f"{setting}-{algorithm}-{seed}"
    config = {**COMMON, "algorithm.name": algorithm, **keys}
    config |= {"run.seed": seed, "run.output": str(output), "run.name": name}
    run = fedray.simulate(config)
    accuracy, seconds = 100 * run.summary["final_accuracy"], run.metrics["round_seconds"].sum()
    print(f"{name}: {run.summary['status']}, {accuracy:.2f}, {seconds:.0f} s", flush=True)
    best = 100 * run.summary["best_accuracy"]
    return {
        "setting": setting, "algorithm": algorithm, "settings": ", ".join(f"{k}={v}" for k, v in keys.items()),
        "status": run.summary["status"], "final": round(accuracy, 2), "best": round(best, 2),
        "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(known_algorithms()))
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        jobs = [("defaults", name, options.seed, DEFAULTS.get(name, {})) for name in options.only]
        rows = [f.result() for f in [pool.submit(one, options.output / "runs", *job) for job in jobs]]
    result = pd.DataFrame(rows)
    result.to_csv(options.output / "table.csv", index=False)
    print(result.to_string(index=False))


if __name__ == "__main__":
    main()
