"""pFedMo tuned on MNIST: 30 trials of T = 400, its five best and the paper's defaults on five fresh seeds, and what the
paper claims of gamma, pi and tau, each moved alone over five seeds.

FEDRAY_DATA=... python analysis/pfedmo_sweep.py OUTPUT [--trials 30] [--seeds 5]

Setting: LeNet-5, 4 clients of 3 random classes each (another draw for each seed), T = 400. Writes summary.json,
winners.csv, claims.csv, table.md and claims.png into OUTPUT, beside the sweeps; what is there already is not run again.
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
from fedray.tracking.folder import read_metrics
from fedray.tuning import tune
from fedray.tuning.intervals import mean_and_margin
from fedray.tuning.report import markdown, write_report
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
    return {"config": name, "seed": seed, "accuracy": run.summary["final_accuracy"]}


def winners(sweep: Path, output: Path, best: int, seeds: int) -> pd.DataFrame:
    """The best trials and the paper's defaults on seeds that no trial has had."""
    table = pd.read_csv(sweep / "report" / "trials.csv")
    complete = table[table["state"] == "complete"].nlargest(best, "validation_accuracy")
    keys = [key for key in table.columns if key.startswith(("algorithm.", "train."))]
    base = flat(read_file(sweep / "trials" / "0000" / "seed-0" / "config.yaml"))
    # rounds were resolved from the iterations of the trial
    base = {key: value for key, value in base.items() if key not in ("run.rounds", "data.seed", "run.eval_test")}
    base |= {"run.iterations": 400, "engine.kind": "local", "run.log_clients": False}
    configs = {f"trial {row['trial']}": {key: row[key] for key in keys} for row in complete.to_dict("records")}
    configs["paper"] = {"algorithm.gamma": 0.5, "algorithm.pi": 0.5, "train.local_steps": 40, "train.lr": 0.01}
    jobs = [(expand(base | c), name, seed) for name, c in configs.items() for seed in range(1, seeds + 1)]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        runs = [pool.submit(again, flat(c), name, seed, str(output)) for c, name, seed in jobs]
        rows = pd.DataFrame([run.result() for run in runs])
    summary = []
    for name, values in configs.items():
        mean, margin = mean_and_margin(rows[rows["config"] == name]["accuracy"].tolist())
        summary.append({"config": name, **values, "test accuracy, %": 100 * mean, "95 % interval, +-": 100 * margin})
    return pd.DataFrame(summary)


def claims(output: Path, seeds: int) -> pd.DataFrame:
    """Validation accuracy with one key moved: after a quarter of the work, and at the end, over seeds."""
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
            early = [_at(rows_of, 100) for rows_of in runs]
            late = [rows_of["validation_accuracy"].iloc[-1] for rows_of in runs]
            row = {"key": key, "value": trial[key]}
            for moment, found in (("T=100", early), ("T=400", late)):
                mean, margin = mean_and_margin(found)
                row |= {f"{moment}, %": 100 * mean, f"{moment}, +-": 100 * margin}
            rows.append(row)
    return pd.DataFrame(rows)


def base_of_paper() -> dict[str, Any]:
    return flat(expand(read_file(known_spaces()["pfedmo"])["base"]))


def _at(rows: pd.DataFrame, iterations: int) -> float:
    """The accuracy at the last round up to that many iterations."""
    return float(rows[rows["iterations"] <= iterations]["validation_accuracy"].iloc[-1])


def draw(table: pd.DataFrame, path: Path) -> None:
    figure, axes = plt.subplots(1, len(CLAIMS), figsize=(14, 4), sharey=True)
    for axis, key in zip(axes, CLAIMS, strict=True):
        rows = table[table["key"] == key]
        for moment in ("T=100", "T=400"):
            axis.errorbar(
                rows["value"], rows[f"{moment}, %"], rows[f"{moment}, +-"], marker="o", capsize=3, label=moment
            )
        axis.set(xlabel=key)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation accuracy, % (95 % interval)")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    arguments = [WORK, f"tune.trials={options.trials}", f"tune.output={options.output}", "tune.name=sweep"]
    facts = options.output / "summary.json"
    with Busy() as busy:
        (result,) = tune("pfedmo", arguments, verbose=True)
    if not facts.exists():
        facts.write_text(
            json.dumps(
                {
                    "trials": options.trials,
                    "seconds": busy.seconds,
                    "both_processors_trained": busy.share(2),
                    "one_or_both": busy.share(1),
                    "best": {
                        k: v for k, v in flat(read_file(result.best[0])).items() if k.startswith(("alg", "train"))
                    },
                },
                indent=2,
            )
            + "\n"
        )
    (spec,) = read_sweeps(result.folder)
    write_report(spec)
    best = winners(result.folder, options.output / "winners", 5, options.seeds)
    best.to_csv(options.output / "winners.csv", index=False)
    moved = claims(options.output, options.seeds)
    moved.to_csv(options.output / "claims.csv", index=False)
    draw(moved, options.output / "claims.png")
    (options.output / "table.md").write_text(markdown(best) + "\n" + markdown(moved))
    print((options.output / "table.md").read_text())


if __name__ == "__main__":
    main()
