"""What people are doing, from the sensors of their phones; each person is a client (UCI-HAR, nine raw signals).

python analysis/examples/har.py UCI_HAR_Dataset
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

import fedray

SIGNALS = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]


def windows(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns all windows ``[n, 9, 128]``, what was done in them (0..5), and by whom."""

    def read(part: str, name: str) -> np.ndarray:
        return pd.read_csv(folder / part / f"{name}_{part}.txt", sep=r"\s+", header=None, dtype=np.float32).to_numpy()

    parts = ("train", "test")
    x = [np.stack([read(part, f"Inertial Signals/{signal}") for signal in SIGNALS], 1) for part in parts]
    y, who = (np.concatenate([read(part, name)[:, 0] for part in parts]).astype(int) for name in ("y", "subject"))
    return np.concatenate(x), y - 1, who


def of_tests(who: np.ndarray) -> np.ndarray:
    """Returns which windows are tests: the last fifth of each person's, because neighbouring windows overlap."""
    number, windows = pd.Series(who).groupby(who).cumcount(), pd.Series(who).groupby(who).transform("size")
    return (number >= 0.8 * windows).to_numpy()


def network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(9, 32, 5), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(32, 32, 5), nn.ReLU(), nn.AdaptiveMaxPool1d(8),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(256, classes),
    )  # fmt: skip


def main(folder: Path, **settings: Any) -> fedray.RunResult:
    x, y, who = windows(folder)
    test = of_tests(who)
    keys = {
        "algorithm.name": "scaffold", "run.name": "har", "run.rounds": 60, "run.eval_clients": "all",
        "train.cohort_size": 10, "train.local_steps": 20, "train.batch_size": 32, "train.lr": 0.05,
    }  # fmt: skip
    data, held_out = (x[~test], y[~test], who[~test]), (x[test], y[test], who[test])
    return fedray.simulate({**keys, **settings}, data=data, test=held_out, model=network, verbose=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
