"""Runs for the tests of fedray compare, and ways to change their files."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import yaml

import fedray
from fedray.tracking.records import digest_of

SETTINGS = {
    "data.source": "sample", "data.clients": 8, "data.partition.kind": "dirichlet", "model.name": "logistic",
    "train.cohort_size": 4, "train.local_steps": 3, "train.lr": 0.05, "run.rounds": 6, "run.eval_every": 2,
    "run.checkpoint_every": 0, "engine.kind": "local", "run.eval_clients": "all",
}  # fmt: skip


def make(folder: Path, name: str, **settings) -> Path:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return fedray.simulate(SETTINGS | keys | {"run.output": str(folder), "run.name": name}).folder


def two_algorithms(folder: Path) -> Path:
    """Two algorithms at two alphas over three seeds."""
    for alpha in (0.1, 5.0):
        for seed in range(3):
            common = {"data__partition__alpha": alpha, "run__seed": seed, "data__seed": seed}
            make(folder, f"fedavg-{alpha}-{seed}", algorithm__name="fedavg", **common)
            make(folder, f"fedprox-{alpha}-{seed}", algorithm__name="fedprox", algorithm__mu=1.0, **common)
    return folder


def write_metrics(folder: Path, metrics: pd.DataFrame) -> None:
    """Writes another metrics.csv of a run, as if the run had recorded it."""
    metrics.to_csv(folder / "metrics.csv", index=False)
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    summary["records"]["metrics.csv"] = digest_of(folder / "metrics.csv")
    path.write_text(json.dumps(summary))


def cut(folder: Path, rounds: int) -> None:
    """Makes a run one that ended after so many rounds."""
    metrics = pd.read_csv(folder / "metrics.csv").iloc[:rounds]
    write_metrics(folder, metrics)
    summary = json.loads((folder / "summary.json").read_text())
    final = float(metrics["test_accuracy"].dropna().iloc[-1])
    (folder / "summary.json").write_text(json.dumps(summary | {"rounds": rounds, "final": final}))


def diverge(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"status": "diverged"}))


def change(path: Path, **keys) -> None:
    config = yaml.safe_load(path.read_text())
    for key, value in keys.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    path.write_text(yaml.safe_dump(config))


def other_input(folder: Path, **inputs) -> None:
    path = folder / "inputs.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | inputs))
