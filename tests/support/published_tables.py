"""A small experiment with tables that are said to be published, and run folders as far as tables read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

ASKED = {"command": "python analysis/reproduce.py x", "seeds": 2}

EXPERIMENT = {
    "data": {"source": "sample", "clients": 6}, "model.name": "logistic", "algorithm.name": "fedavg",
    "train": {"cohort_size": 3, "local_steps": 3, "lr": 0.05},
    "run": {"rounds": 20, "targets": [0.3], "eval_train_samples": 100, "output": "runs/x", "checkpoint_every": 0},
    "for_algorithm": {"fedprox": {"algorithm.mu": 0.5}},
}  # fmt: skip


def write_run(folder: Path, accuracies: list[float], status: str = "completed", **columns: float) -> None:
    """A run folder as far as it is read here: an evaluation in each round."""
    folder.mkdir(parents=True)
    summary = {"status": status, "rounds": len(accuracies), "versions": {}}
    (folder / "summary.json").write_text(json.dumps(summary))
    config = {"run": {"rounds": len(accuracies), "targets": [0.3]}, "engine": {"portable_bits": False}}
    config |= {section: {} for section in ("algorithm", "data", "model", "train")}
    (folder / "config.yaml").write_text(json.dumps(config))
    rounds = np.arange(1, len(accuracies) + 1)
    rows = {"round": rounds, "iterations": rounds, "cohort_size": 3, "bytes_down": rounds, "bytes_up": rounds}
    rows |= {"flops": 1.0 * rounds, "round_seconds": 1.0, "wall_seconds": 1.0 * rounds, "test_accuracy": accuracies}
    pd.DataFrame(rows | columns).to_csv(folder / "metrics.csv", index=False)
