"""Reads "rounds until the target" in several ways from the same runs, and writes a table of what each gives.

python analysis/fedtrip_readings.py RUNS TARGET OUTPUT     RUNS: a folder with ALGORITHM/seed-*/metrics.csv, 0 to 100

FedTrip's paper does not say how it reads the rounds of its Table IV from curves that go up and down. The runs must not
have ended at their target: those of `python analysis/reproduce.py fedtrip/fig5` are whole.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedray.cli.main import Parser, exit_code
from fedray.errors import UserError

ROWS = ("fedtrip", "fedavg", "fedprox", "slowmo", "moon", "feddyn")
READINGS: dict[str, Callable[[pd.Series], pd.Series]] = {
    "first round at the target": lambda accuracy: accuracy,
    "of the mean of 5 rounds": lambda accuracy: accuracy.rolling(5).mean(),
    "of the moving average, 0.5": lambda accuracy: accuracy.ewm(alpha=0.5, adjust=False).mean(),
    "of the moving average, 0.9": lambda accuracy: accuracy.ewm(alpha=0.1, adjust=False).mean(),
    "first round after which it stays there": lambda accuracy: accuracy[::-1].cummin()[::-1],
}
"""What of a run's accuracies in each round must reach the target."""


def rounds_to(target: float, read: Callable[[pd.Series], pd.Series], metrics: Path) -> float:
    """Returns the first round whose value is at the target; infinite if there is none."""
    values = read(pd.read_csv(metrics).set_index("round")["test_accuracy"])
    reached = values.index[values >= target]
    return float(reached[0]) if len(reached) else np.inf


def main(arguments: Sequence[str]) -> int:
    """Writes the table that the arguments of the command line ask for, and returns the exit code."""
    return exit_code(lambda: _read(arguments))


def _read(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="fedtrip_readings.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("target", type=float, help="such as 0.87")
    parser.add_argument("output", type=Path)
    options = parser.parse_args(arguments)
    runs = {row: sorted(options.runs.glob(f"{row}/seed-*/metrics.csv")) for row in ROWS}
    for row in ("fedtrip", "fedavg"):
        if not runs[row]:
            raise UserError(
                f"{options.runs} has no {row}/seed-*/metrics.csv: give a folder with the runs of {', '.join(ROWS)}"
            )
    rows = {}
    for name, read in READINGS.items():
        found = {
            row: float(np.median([rounds_to(options.target, read, path) for path in paths]))
            for row, paths in runs.items()
            if paths
        }
        rows[name] = {**found, "fedavg / fedtrip": found["fedavg"] / found["fedtrip"]}
    table = pd.DataFrame(rows).T
    table.to_csv(options.output, index_label="reading")
    print(table.to_string(float_format="{:.3g}".format))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
