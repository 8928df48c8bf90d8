"""pFedMo tuned on MNIST: 30 trials of T = 400, its five best and the paper's defaults on five fresh seeds, and what the
paper claims of gamma, pi and tau, each moved alone over five seeds.

For comparison it has the representation model alone, from the same runs, which shows how much pFedMo adds to it, and
FedAvg, tuned with as many trials over the same keys. FedAvg's best is run once with the public samples held out and
once with them divided among its clients: then it trains on the same labelled samples as pFedMo.

FEDRAY_DATA=... python analysis/pfedmo_sweep.py OUTPUT [--trials 30] [--seeds 5]

Setting: LeNet-5, 4 clients of 3 random classes each (another draw for each seed), T = 400. Writes summary.json,
winners.csv, claims.csv, table.md and claims.png into OUTPUT, beside the sweeps; what is there already is not run again.
summary.json has the times of a first sweep that was made in one go; if it was resumed, they are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

import fedray
from fedray.config import expand, flat, read_file
from fedray.results.statistics import mean_and_margin
from fedray.results.tables import markdown
from fedray.tracking.tables import read_metrics
from fedray.tuning import tune
from fedray.tuning.report import write_report
from fedray.tuning.spec import known_spaces, read_sweeps

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WORK = "run.iterations=400"
CLAIMS = {
    "algorithm.gamma": [0.0, 0.25, 0.5, 0.75, 0.9],
    "algorithm.pi": [0.0, 0.25, 0.5, 0.75, 1.0],
    "train.local_steps": [10, 20, 40, 80],
}
"""Moved alone, from the paper's gamma = 0.5, pi = 0.5, tau = 40."""

MOMENTS = (80, 400)
"""Iterations after which the accuracies are compared: early, and at the end. Every tau in :data:`CLAIMS` divides them,
so that all values are compared after exactly the same work."""

PUBLIC = 6000
"""The tenth of MNIST on which pFedMo's server trains, and which FedAvg's clients either lack or share."""


class Busy:
    """How large a part of the time both processors trained: samples of the trials' CPU time, every 0.2 seconds."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Busy:
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.seconds = time.perf_counter() - self._began

    def _watch(self) -> None:
        before = cpu_of_trials()
        while not self._over.wait(0.2):
            now = cpu_of_trials()
            ticks = 0.2 * os.sysconf("SC_CLK_TCK")
            self.samples.append(sum(used - before.get(pid, used) > 0.6 * ticks for pid, used in now.items()))
            before = now

    def share(self, processors: int) -> float:
        """The part of all samples in which that many trained at least."""
        return float(np.mean([sample >= processors for sample in self.samples]))


def cpu_of_trials() -> dict[int, int]:
    """Clock ticks that each of Ray's actors has used: here, those that run trials."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes().startswith(b"ray::"):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    found[int(entry.name)] = int(fields[11]) + int(fields[12])
            except OSError:
                continue
    return found


def again(settings: dict[str, Any], name: str, seed: int, output: str) -> dict[str, Any]:
    """A configuration on a fresh seed, with the test set."""
    run = fedray.simulate(settings | {"run.name": f"{name}-{seed}", "run.seed": seed, "run.output": output})
    alone = run.metrics["representation_accuracy"].iloc[-1]
    return {"config": name, "seed": seed, "accuracy": run.summary["final_accuracy"], "representation": alone}


def best_of(sweep: Path, best: int) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """What all trials of a sweep have in common, to be run on another seed, and what its best trials searched."""
    table = pd.read_csv(sweep / "report" / "trials.csv")
    complete = table[table["state"] == "complete"].nlargest(best, "validation_accuracy")
    keys = [key for key in table.columns if key.startswith(("algorithm.", "train."))]
    # not the configuration that a trial has resolved: it spells out what depends on the searched keys
    (spec,) = read_sweeps(sweep)
    base = {**spec.base, "engine.kind": "local", "run.log_clients": False}
    return base, {row["trial"]: {key: row[key] for key in keys} for row in complete.to_dict("records")}


def winners(pfedmo: Path, fedavg: Path, output: Path, best: int, seeds: int) -> pd.DataFrame:
    """pFedMo's best trials, the paper's defaults and FedAvg's best on seeds that no trial has had."""
    base, trials = best_of(pfedmo, best)
    configs = {f"trial {number}": base | values for number, values in trials.items()}
    configs["paper"] = base | {
        "algorithm.gamma": 0.5, "algorithm.pi": 0.5, "train.local_steps": 40, "train.lr": 0.01,
    }  # fmt: skip
    searched = list(next(iter(trials.values())))
    base, trials = best_of(fedavg, 1)
    configs["FedAvg"] = base | next(iter(trials.values()))
    configs["FedAvg, the public samples divided among its clients"] = configs["FedAvg"] | {"data.public_to": "clients"}
    jobs = [(config, name, seed) for name, config in configs.items() for seed in range(1, seeds + 1)]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        runs = [pool.submit(again, config, name, seed, str(output)) for config, name, seed in jobs]
        rows = pd.DataFrame([run.result() for run in runs])
    summary = []
    for name, config in configs.items():
        values = {key: config[key] for key in searched if key in config}
        for column, what in (("accuracy", ""), ("representation", ", representation model alone")):
            found = rows[rows["config"] == name][column].dropna()
            if len(found):
                mean, margin = mean_and_margin(found.tolist())
                row = {"config": name + what, **values}
                summary.append(row | {"test accuracy, %": 100 * mean, "95 % interval, +-": 100 * margin})
    return pd.DataFrame(summary)


def fedavg_space() -> dict[str, Any]:
    """FedAvg in pFedMo's setting, over the keys that both have."""
    space = read_file(known_spaces()["pfedmo"])["spaces"]["wide"]
    return {
        "base": base_of_paper() | {"algorithm.name": "fedavg", "data.public_samples": PUBLIC},
        "spaces": {"wide": {key: values for key, values in space.items() if not key.startswith("algorithm.")}},
    }


def claims(output: Path, seeds: int) -> pd.DataFrame:
    """Validation accuracy with one key moved, after each of :data:`MOMENTS`, over seeds."""
    base = {"algorithm.gamma": 0.5, "algorithm.pi": 0.5, "train.local_steps": 40}
    rows = []
    for key, values in CLAIMS.items():
        space = {"base": base_of_paper() | base, "spaces": {"wide": {key: {"grid": values}}}}
        name = key.partition(".")[2]
        (result,) = tune(
            space, [WORK, f"tune.seeds={seeds}", f"tune.output={output}", f"tune.name={name}"], verbose=True
        )
        for trial in result.trials.to_dict("records"):
            runs = [
                read_metrics(path)
                for path in sorted((result.folder / "trials" / f"{trial['trial']:04d}").glob("seed-*"))
            ]
            row = {"key": key, "value": trial[key]}
            for moment in MOMENTS:
                mean, margin = mean_and_margin([_at(rows_of, moment) for rows_of in runs])
                row |= {f"T={moment}, %": 100 * mean, f"T={moment}, 95 % interval, +-": 100 * margin}
            rows.append(row)
    return pd.DataFrame(rows).sort_values(["key", "value"], ignore_index=True)


def base_of_paper() -> dict[str, Any]:
    return flat(expand(read_file(known_spaces()["pfedmo"])["base"]))


def _at(rows: pd.DataFrame, iterations: int) -> float:
    """The accuracy after exactly that many iterations."""
    (accuracy,) = rows[rows["iterations"] == iterations]["validation_accuracy"]
    return float(accuracy)


def draw(table: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(1, len(CLAIMS), figsize=(14, 4), sharey=True)
    for axis, key in zip(axes, CLAIMS, strict=True):
        rows = table[table["key"] == key].sort_values("value")
        for moment in MOMENTS:
            percent, margin = rows[f"T={moment}, %"], rows[f"T={moment}, 95 % interval, +-"]
            axis.errorbar(rows["value"], percent, margin, marker="o", capsize=3, label=f"T = {moment}")
        axis.set(xlabel=key)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation accuracy, %\n(mean and 95 % interval)")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def facts_of(trials: int, best: Path, busy: Busy | None) -> dict[str, Any]:
    """What summary.json says. ``busy`` is None of a sweep that was resumed, whose whole time is not known."""
    times: dict[str, Any] = {}
    if busy is not None:
        times = {
            "seconds": busy.seconds, "both_processors_trained": busy.share(2), "one_or_both": busy.share(1),
        }  # fmt: skip
    found = {key: value for key, value in flat(read_file(best)).items() if key.startswith(("alg", "train"))}
    return {"trials": trials, **times, "best": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    arguments = [WORK, f"tune.trials={options.trials}", f"tune.output={options.output}"]
    facts = options.output / "summary.json"
    is_whole = not (options.output / "sweep").exists()
    with Busy() as busy:
        (result,) = tune("pfedmo", [*arguments, "tune.name=sweep"], verbose=True)
    if result.interrupted:
        raise SystemExit(130)
    trials = len(result.trials)
    if not facts.exists() or json.loads(facts.read_text())["trials"] != trials:
        facts.write_text(json.dumps(facts_of(trials, result.best[0], busy if is_whole else None), indent=2) + "\n")
    (baseline,) = tune(fedavg_space(), [*arguments, "tune.name=fedavg"], verbose=True)
    for folder in (result.folder, baseline.folder):
        (spec,) = read_sweeps(folder)
        write_report(spec)
    best = winners(result.folder, baseline.folder, options.output / "winners", 5, options.seeds)
    best.to_csv(options.output / "winners.csv", index=False)
    moved = claims(options.output, options.seeds)
    moved.to_csv(options.output / "claims.csv", index=False)
    draw(moved, options.output / "claims.png")
    (options.output / "table.md").write_text(markdown(best) + "\n" + markdown(moved))
    print((options.output / "table.md").read_text())


if __name__ == "__main__":
    main()
