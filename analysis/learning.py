"""Trains the papers' models on real data at full settings, and draws their curves.

python analysis/learning.py OUTPUT [NAME ...]      NAME: har, shakespeare, iwildcam, cifar10; all by default

Needs the data in $FEDRAY_DATA. A run goes on where it was stopped, and one that is finished is not made again. Writes
NAME.csv (all evaluations), NAME.md (a table) and NAME.png (the curves) into OUTPUT. What the single experiments leave
out of their papers' settings is said at ``EXPERIMENTS``.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

from fedray import simulate
from fedray.config import load

FILES = Path(__file__).parent / "experiments"
DATA = Path(os.environ.get("FEDRAY_DATA", "."))


@dataclass(frozen=True)
class Learning:
    """An experiment: a config file with other ``settings``, and for each line of the picture some more."""

    title: str
    lines: Mapping[str, Mapping[str, Any]]
    file: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


PHOTOGRAPHS = {
    "data.source": "federated_csv", "data.root": str(DATA / "iwildcam"), "data.image_size": 96,
    "data.normalization": "imagenet", "model.name": "mobilenet_v2", "algorithm.name": "fedavg", "train.cohort_size": 10,
    "train.local_epochs": 1, "train.batch_size": 10, "train.lr": 0.01, "run.rounds": 60, "run.eval_every": 5,
}  # fmt: skip

EXPERIMENTS = {
    # the signals in place of the 561 features, each of the nine channels with its mean and std
    "har": Learning(
        "UCI-HAR, LeNet-5, 4 clients, tau = 40, T = 4,000",
        {name: {"algorithm.name": name} for name in ("pfedmo", "fastslowmo", "fednag", "fedavg")},
        "pfedmo/table2_lenet5_har.yaml",
        {"data.variant": "signals", "data.normalization": "standard", "run.eval_every": 5},
    ),
    # roles of the 37 plays in place of LEAF's, which are of the same plays
    "shakespeare": Learning(
        "Shakespeare, two LSTM layers, 10 of 100 roles, J = 20",
        {name: {"algorithm.name": name} for name in ("fedhbm", "ghbm", "fedavg")},
        "ghbm/table2_shakespeare_non_iid.yaml",
        {"data.variant": "plays", "run.eval_every": 25},
    ),
    # 96 pixels in place of 224
    "iwildcam": Learning(
        "iWildCam, MobileNetV2, 10 of 40 cameras, one epoch",
        {
            "pretrained": {"model.weights": str(DATA / "weights" / "mobilenet_v2-b0353104.pth")},
            "from nothing": {},
        },
        None,
        PHOTOGRAPHS,
    ),
    # 300 of 10,000 rounds; FedHBM divides by the gap as in the paper's formula, not by its mean as in the authors' code
    "cifar10": Learning(
        "CIFAR-10, ResNet-20, 10 of 100 clients of one class",
        {
            "fedhbm": {"algorithm.name": "fedhbm", "algorithm.scale": "inv_gap"},
            **{name: {"algorithm.name": name} for name in ("ghbm", "scaffold", "fedcm", "fedavg")},
        },
        "ghbm/fig3_resnet20.yaml",
        {"run.rounds": 300, "run.checkpoint_every": 5},
    ),
}

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Okabe and Ito's colours, which colour-blind people can tell apart."""

MARKERS = "os^Dv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    if unknown := set(options.names) - EXPERIMENTS.keys():
        parser.error(f"no experiment {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    for name in options.names or EXPERIMENTS:
        report(name, made(name, options.output), options.output)


def made(name: str, output: Path) -> dict[str, Path]:
    """Makes the runs of an experiment, and returns their folders by line."""
    experiment, folders = EXPERIMENTS[name], {}
    for label, more in experiment.lines.items():
        settings = {**experiment.settings, **more, "run.output": str(output / "runs"), "run.name": f"{name}-{label}"}
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        file = None if experiment.file is None else FILES / experiment.file
        folders[label] = simulate(load(file, overrides), verbose=True).folder
    return folders


def report(name: str, folders: Mapping[str, Path], output: Path) -> None:
    """Writes the table, the evaluations and the picture of an experiment."""
    parts, rows = [], []
    for label, folder in folders.items():
        metrics = pd.read_csv(folder / "metrics.csv")
        evaluated = metrics[metrics["test_accuracy"].notna()]
        parts.append(evaluated[["round", "test_accuracy", "test_loss", "wall_seconds"]].assign(line=label))
        accuracy = 100 * evaluated["test_accuracy"]
        cells = [
            label, json.loads((folder / "summary.json").read_text())["status"], str(metrics["round"].max()),
            f"{accuracy.iloc[-1]:.1f}", f"{accuracy.max():.1f}", f"{metrics['round_seconds'].median():.1f}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    table = pd.concat(parts)
    table.to_csv(output / f"{name}.csv", index=False)
    head = ["| | | rounds | test accuracy, % | best | s a round |", "| --- | --- | --- | --- | --- | --- |"]
    (output / f"{name}.md").write_text("\n".join([EXPERIMENTS[name].title, "", *head, *rows, ""]))
    draw(name, table, output)


def draw(name: str, table: pd.DataFrame, output: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for place, (label, rows) in enumerate(table.groupby("line", sort=False)):
        colour = COLOURS[place]
        axes.plot(
            rows["round"], 100 * rows["test_accuracy"], color=colour, marker=MARKERS[place],
            markevery=max(1, len(rows) // 8), markersize=5, linewidth=1.6, label=label,
        )  # fmt: skip
    axes.set(xlabel="round", ylabel="test accuracy, %", title=EXPERIMENTS[name].title, ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(output / f"{name}.png", dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
