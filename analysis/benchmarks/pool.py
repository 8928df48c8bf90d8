"""Pools pairs of two versions of fedray over several results of `compare.py --against before`.

    python analysis/benchmarks/pool.py after=NEW.csv,... before=OLD.csv,...

`after` are results of runs in which the newer version ran the program, `before` those in which the older one did: each
version is then as often the one that runs it. Prints the ratio newer / older of the seconds, with a 95 % interval.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd


def log_ratios(file: str, way: str) -> np.ndarray:
    """Returns log(newer / older) of each quiet pair of a result."""
    table = pd.read_csv(file)
    seconds = table[(table["turn"] >= 0) & table["kept"]].pivot(
        index=["clients", "turn"], columns="system", values="seconds"
    )
    found = np.log((seconds["fedray"] / seconds["before"]).dropna().to_numpy())
    return found if way == "after" else -found


def estimate(results: dict[str, list[np.ndarray]]) -> float:
    """Returns the mean of both ways of the medians of their results, which count by their pairs."""
    of_ways = [
        np.average([np.median(each) for each in files], weights=[len(each) for each in files])
        for files in results.values()
    ]
    return float(np.mean(of_ways))


def main(arguments: list[str]) -> None:
    results: dict[str, list[np.ndarray]] = {}
    for argument in arguments:
        way, _, files = argument.partition("=")
        results[way] = [log_ratios(file, way) for file in files.split(",")]
    rng = np.random.default_rng(0)
    drawn = [
        estimate({way: [rng.choice(each, len(each)) for each in files] for way, files in results.items()})
        for _ in range(2000)
    ]
    low, high = np.exp(np.percentile(drawn, [2.5, 97.5]))
    pairs = sum(len(each) for files in results.values() for each in files)
    print(f"{np.exp(estimate(results)):.3f} ({low:.3f} to {high:.3f}), {pairs} pairs")


if __name__ == "__main__":
    main(sys.argv[1:])
