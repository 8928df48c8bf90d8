"""pFedMo's LeNet-5 on MNIST: label skew with 3 classes per client (its Fig. 4) and its Table 2, over seeds.

FEDRAY_DATA=... python analysis/pfedmo_mnist.py OUTPUT [--seeds 3] [--processes 2]

Three settings. `skew3`: every client has 3 random classes, as the paper words it; four clients then rarely hold all ten
classes among them, which bounds what averaging can reach. `skew3-covered`: the same, over draws that do hold all ten.
`table2`: i.i.d., pi = 1. All methods leave out the same 6,000 public samples, on which "representation alone" is
trained.
Writes a table (Markdown and CSV) and the curves (PNG) into OUTPUT; runs that are there already are not made again.
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import matplotlib
import pandas as pd

import fedray
from fedray.config import load
from fedray.experiment.resolve import resolve
from fedray.results.statistics import with_interval

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COMMON = {
    "data.source": "mnist",
    "data.clients": 4,
    "data.public_samples": 6000,
    "model.name": "lenet5",
    "train.local_steps": 40,
    "train.batch_size": 64,
    "train.lr": 0.01,
    "run.iterations": 1000,
    "engine.kind": "local",
}
SKEW3 = {"data.partition.kind": "label_skew", "data.partition.classes_per_client": 3}
SETTINGS = {
    "skew3": SKEW3,
    "skew3-covered": SKEW3,
    "table2": {"data.partition.kind": "iid", "run.eval_train_samples": 10000},
}
PI = {"skew3": 0.5, "skew3-covered": 0.5, "table2": 1.0}
METHODS = {
    "fedavg": {"algorithm.name": "fedavg"},
    "fedprox": {"algorithm.name": "fedprox"},
    "fednag": {"algorithm.name": "fednag", "algorithm.gamma": 0.5},
    "pfedmo-velocity": {"algorithm.name": "pfedmo", "algorithm.gamma": 0.5, "algorithm.form": "velocity"},
    "pfedmo-printed": {"algorithm.name": "pfedmo", "algorithm.gamma": 0.5, "algorithm.form": "printed"},
}
PAPER_TABLE2 = {
    "fedavg": "93.31 ± 0.08",
    "fedprox": "93.78 ± 0.06",
    "fednag": "95.04 ± 0.06",
    "pfedmo-velocity": "97.23 ± 0.03",
}


def covering_seeds(count: int) -> list[int]:
    """The first data seeds whose partition leaves no class out."""
    found: list[int] = []
    seed = 0
    while len(found) < count:
        config = load({**COMMON, **SKEW3, "data.seed": seed, "algorithm.name": "fedavg"})
        data = resolve(config)[1]
        if len(set(data.y[data.indices].tolist())) == data.classes:
            found.append(seed)
        seed += 1
    return found


def one(output: Path, setting: str, method: str, seed: int, data_seed: int) -> pd.DataFrame:
    """One run; its metrics with what it was in front."""
    config = {**COMMON, **SETTINGS[setting], **METHODS[method], "run.seed": seed, "run.output": str(output)}
    config["data.seed"] = data_seed
    config["run.name"] = f"{setting}-{method}-{seed}"
    if method.startswith("pfedmo"):
        config["algorithm.pi"] = PI[setting]
    run = fedray.simulate(config)
    print(f"{config['run.name']}: {run.summary['status']}, {run.summary['final_accuracy']:.4f}", flush=True)
    status = run.summary["status"]
    return run.metrics.assign(setting=setting, method=method, seed=seed, status=status)


def table(metrics: pd.DataFrame) -> pd.DataFrame:
    """Final accuracies in percent, a row per setting and method: the mean over the seeds that ended, with its 95 %
    interval. Diverged runs are counted."""
    last = metrics.sort_values("round").groupby(["setting", "method", "seed"]).tail(1)
    alone = last[last["method"] == "pfedmo-velocity"].assign(method="representation alone")
    alone = alone.assign(test_accuracy=alone["representation_accuracy"], train_accuracy=float("nan"))
    alone = alone.assign(personalized_accuracy=float("nan"), status="completed")
    last = pd.concat([last, alone])
    rows = []
    for setting, method in itertools.product(SETTINGS, [*METHODS, "representation alone"]):
        runs = last[(last["setting"] == setting) & (last["method"] == method)]
        ended = runs[runs["status"] != "diverged"]
        row = {"setting": setting, "method": method}
        for kind in ("test", "train", "personalized", "representation"):
            values = 100 * ended[f"{kind}_accuracy"].dropna()
            row[f"{kind}, % (± 95 % interval)"] = with_interval(values.tolist())
        row["diverged"] = f"{len(runs) - len(ended)} of {len(runs)}"
        row["paper (training, its own ±)"] = PAPER_TABLE2.get(method, "") if setting == "table2" else ""
        rows.append(row)
    return pd.DataFrame(rows)


def plot(metrics: pd.DataFrame, path: Path) -> None:
    """Test accuracy over local iterations: mean over the seeds, and their range."""
    figure, axes = plt.subplots(1, len(SETTINGS), figsize=(16, 4.5), sharey=True)
    for axis, setting in zip(axes, SETTINGS, strict=True):
        chosen = metrics[metrics["setting"] == setting]
        curves = {m: chosen[chosen["method"] == m].rename(columns={"test_accuracy": "y"}) for m in METHODS}
        curves["representation alone"] = chosen[chosen["method"] == "pfedmo-velocity"].rename(
            columns={"representation_accuracy": "y"}
        )
        for name, runs in curves.items():
            grouped = 100 * runs.groupby("iterations")["y"].agg(["mean", "min", "max"])
            style = "--" if name == "representation alone" else "-"
            axis.plot(grouped.index, grouped["mean"], style, label=name)
            axis.fill_between(grouped.index, grouped["min"], grouped["max"], alpha=0.15)
        axis.set(title=f"LeNet-5, MNIST: {setting}", xlabel="local iterations", ylim=(0, 100))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend(loc="lower right", title="bands: lowest to highest seed")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    covering = covering_seeds(options.seeds)
    data_seeds = {
        setting: covering if setting == "skew3-covered" else list(range(options.seeds)) for setting in SETTINGS
    }
    jobs = [(s, m, seed, data_seeds[s][seed]) for s in SETTINGS for seed in range(options.seeds) for m in METHODS]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(one, options.output / "runs", *job) for job in jobs]
        metrics = pd.concat([future.result() for future in futures], ignore_index=True)
    metrics.to_csv(options.output / "curves.csv", index=False)
    result = table(metrics)
    result.to_csv(options.output / "table.csv", index=False)
    lines = [
        "| " + " | ".join(map(str, row)) + " |"
        for row in [result.columns, ["---"] * result.shape[1], *result.to_numpy()]
    ]
    (options.output / "table.md").write_text("\n".join(lines) + "\n")
    plot(metrics, options.output / "curves.png")
    print(result.to_string(index=False))


if __name__ == "__main__":
    main()
