"""All algorithms side by side: LeNet-5 on MNIST, 20 clients, cohorts of 5, Dirichlet 0.3, 60 rounds of 10 steps.

FEDRAY_DATA=... python analysis/all_algorithms.py OUTPUT [--processes 1] [--only NAME ...]

`defaults`: every algorithm with its paper's hyper-parameters (those that fedray has as defaults) and lr 0.01. Beside
each stands FedAvg on the same terms: the same architecture, as MOON and FedSiam-DA have a projection head, and the same
aggregation weights, as some papers weigh clients alike. `further`: those that end more than 2 points below it, in their
papers' regime over three seeds, and FedAvg in that regime too. `personal` is the mean accuracy of all clients' personal
models, each on its own test share, and `clients` that of the global model on these shares; with private layers the
global model says little. A mean over seeds is of the runs that ended, and has beside it half the width of its 95 %
interval (Student's t). Writes table.md and table.csv into OUTPUT; runs that are there already are not made again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd

import fedray
from fedray.algorithms import find_algorithm, known_algorithms
from fedray.cli.main import Parser, exit_code
from fedray.models.heads import DEFAULT
from fedray.results.statistics import mean_and_margin

COMMON = {
    "data.source": "mnist",
    "data.clients": 20,
    "data.partition.kind": "dirichlet",
    "data.partition.alpha": 0.3,
    "model.name": "lenet5",
    "train.local_steps": 10,
    "train.batch_size": 64,
    "train.lr": 0.01,
    "train.cohort_size": 5,
    "run.rounds": 60,
    "run.eval_every": 10,
    "run.eval_clients": "all",
    "engine.kind": "local",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    # their rate is that of a normalised step (Reddi et al. tune it from 0.001 on)
    **{name: {"train.server_lr": 0.01} for name in ("fedadam", "fedyogi", "fedadagrad")},
}
FURTHER: dict[str, dict[str, Any]] = {
    # a step is alpha times the gradient before the momentum has built up: GHBM's grid has ten times the others' rates
    "fedcm": {"train.lr": 0.1},
    # the same: a fresh gradient counts beta = 0.1
    "scaffold_m": {"train.lr": 0.1},
    # (1 - beta) leaves a tenth of the rate in round 1, and s, renewed once a round, is ten rounds old: the undamped
    # form of fedjax and of GHBM's code, with a shorter memory
    "mimemom": {"algorithm.dampening": False, "algorithm.beta": 0.5},
    "mimelitemom": {"algorithm.dampening": False, "algorithm.beta": 0.5},
    # a deeper model, and the rate of the authors' code and of the paper; their momentum of 0.9 is too much for it here
    "moon": {"train.lr": 0.1, "train.weight_decay": 1e-5},
    "fedsiam_da": {"train.lr": 0.1, "train.weight_decay": 1e-5},
}


SHARES = {"clients": "accuracy_", "personal": "personal_accuracy_"}
"""Columns of the table, with what columns of metrics.csv they are."""

NAN = float("nan")


def one(output: Path, setting: str, algorithm: str, head: str, seed: int, keys: dict[str, Any]) -> dict[str, Any]:
    """One run and what the table says of it."""
    changes = [f"{key.split('.')[1]}={value}" for key, value in keys.items()]
    name = "-".join([algorithm, *changes, *([head] if head != "none" else []), str(seed)])
    config = {**COMMON, "algorithm.name": algorithm, "model.head": head, **keys}
    run = fedray.simulate({**config, "run.seed": seed, "run.output": str(output), "run.name": name})
    accuracy, best = 100 * run.summary["final_accuracy"], 100 * run.summary["best_accuracy"]
    last = run.metrics.iloc[-1]
    shares = {name: 100 * last.get(f"clients_{column}mean", NAN) for name, column in SHARES.items()}
    seconds = run.metrics["round_seconds"].sum()
    print(f"{name}: {run.summary['status']}, {accuracy:.2f}, {seconds:.0f} s", flush=True)
    return {
        "setting": setting, "algorithm": algorithm, "head": head, "changed": ", ".join(changes),
        "status": run.summary["status"], "accuracy": accuracy, **shares, "best": best, "seconds": seconds,
    }  # fmt: skip


SEEDS = {"defaults": [0], "further": [0, 1, 2]}


def jobs(only: list[str]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Setting, algorithm, head and keys of each row, FedAvg on the same terms first."""
    for setting, settings in (("defaults", {name: DEFAULTS.get(name, {}) for name in only}), ("further", FURTHER)):
        for name in (name for name in only if name in settings):
            cls = find_algorithm(name)
            # what only this algorithm has; a server learning rate too
            special = {key for key in settings[name] if key.startswith("algorithm.") or key == "train.server_lr"}
            shared = {key: value for key, value in settings[name].items() if key not in special}
            weights = {} if cls.weighting == "samples" else {"train.weighting": cls.weighting}
            yield setting, "fedavg", DEFAULT[cls.needs_head], shared | weights
            yield setting, name, DEFAULT[cls.needs_head], settings[name]


def summed(setting: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several seeds: means over the runs that ended, and the margin of the accuracy."""
    frame = pd.DataFrame(runs)
    ended = frame[frame["status"] != "diverged"]
    means = ended[["accuracy", *SHARES, "best", "seconds"]].mean().to_dict()
    margin = mean_and_margin(ended["accuracy"].tolist())[1]
    row = {**runs[0], **means, "setting": setting, "seeds": len(runs), "± (95 % interval)": margin}
    row["status"] = ", ".join(f"{count} {status}" for status, count in frame["status"].value_counts().items())
    return row


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A row for each algorithm, with what FedAvg reaches on the same terms (percent) and the difference."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    result = pd.DataFrame(
        [
            {**mine, "fedavg": fedavg["accuracy"], "difference": mine["accuracy"] - fedavg["accuracy"]}
            for fedavg, mine in pairs
        ]
    )
    columns = ["setting", "algorithm", "head", "changed", "seeds", "status", "accuracy", "± (95 % interval)", "fedavg"]
    return result[[*columns, "difference", *SHARES, "best", "seconds"]].round(2)


def main(arguments: Sequence[str]) -> int:
    """Makes what the arguments of the command line ask for, and returns the exit code."""
    return exit_code(lambda: _compare(arguments))


def _compare(arguments: Sequence[str]) -> int:
    parser = Parser(prog="all_algorithms.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(known_algorithms()))
    options = parser.parse_args(arguments)
    for name in options.only:
        # before the first run
        find_algorithm(name)
    made: dict[str, Future[dict[str, Any]]] = {}
    rows: list[tuple[str, list[Future[dict[str, Any]]]]] = []
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for setting, name, head, keys in jobs(options.only):
            runs = []
            for seed in SEEDS[setting]:
                key = f"{name} {head} {keys} {seed}"
                if key not in made:
                    made[key] = pool.submit(one, options.output / "runs", setting, name, head, seed, keys)
                runs.append(made[key])
            rows.append((setting, runs))
        result = table([summed(setting, [run.result() for run in runs]) for setting, runs in rows])
    result.to_csv(options.output / "table.csv", index=False)
    lines = [
        "| " + " | ".join("" if value != value else str(value) for value in row) + " |"
        for row in [result.columns, ["---"] * result.shape[1], *result.to_numpy()]
    ]
    (options.output / "table.md").write_text("\n".join(lines) + "\n")
    print(result.to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
