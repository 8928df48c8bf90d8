"""Compares private training with pfl-research's on its own benchmark.

    python analysis/private_cifar10.py OUTPUT --pfl PYTHON

CIFAR-10 as in pfl-research's benchmarks/image_classification/configs/baseline.yaml with central privacy: 50 of 1,000
clients with 50 samples each make a pass in batches of 10 with learning rate 0.1; epsilon 2 at delta 1e-6 for rounds of
1,000 of a million clients, updates clipped to 0.4; the CNN without its dropout. Both systems compute the noise from
epsilon. Without `--pfl`, which names an interpreter that has pfl (benchmarks/rivals/requirements-pfl.txt), only fedray
runs.

Writes points.csv, private_cifar10.md and private_cifar10.png. A curve that is in points.csv is not made again. All have
the same rounds; `--rounds` is also the number of rounds that the noise is for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedray import simulate
from fedray.cli.main import Parser, exit_code
from fedray.data.sources.source import Source
from fedray.errors import UserError
from fedray.results.panel import Curve, Panel, bands_caption, draw_panels
from fedray.results.statistics import LEAST_RUNS, margin_of, with_interval
from fedray.results.style import Line, lines_for, save_png
from fedray.results.tables import markdown

BENCHMARKS = Path(__file__).parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from problems import load  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

PROMISE = {"epsilon": 2.0, "delta": 1e-6, "clip": 0.4, "cohort": 1000, "clients": 1_000_000}
WORK = WORKLOADS["D"]


def source() -> Source:
    (x, y), (x_test, y_test) = load("cifar10"), load("cifar10", train=False)
    return Source("cifar10", x.numpy(), y.numpy(), x_test.numpy(), y_test.numpy(), 10)


def of_fedray(private: bool, seed: int, rounds: int, every: int, folder: Path) -> dict[int, float]:
    """Returns the test accuracy in every so many rounds, and in the last."""
    settings: dict[str, Any] = {
        "run": {"seed": seed, "rounds": rounds, "eval_every": every, "output": str(folder), "name": "fedray"},
        "algorithm": {"name": "fedavg"},
        "data": {"clients": WORK.clients, "seed": 0, "partition": {"kind": "iid"}},
        "model": {"name": f"{BENCHMARKS / 'problems.py'}:SimpleCNN"},
        "train": {
            "cohort_size": WORK.cohort, "local_epochs": 1, "batch_size": WORK.batch, "lr": WORK.lr,
            "weighting": "uniform",
        },
        "privacy": PROMISE if private else {},
        "engine": {"kind": "local", "threads": 1},
    }  # fmt: skip
    result = simulate(settings, data=source())
    if result.summary["status"] != "completed":
        raise SystemExit(f"the run is {result.summary['status']}, and not in the table")
    rows = result.metrics.set_index("round")["test_accuracy"].dropna()
    return dict(zip(rows.index.astype(int), rows.astype(float), strict=True))


def of_pfl(python: str, seed: int, rounds: int, every: int, folder: Path) -> dict[int, float]:
    """Returns the same of pfl-research."""
    settings, output = folder / "settings.json", folder / "pfl.csv"
    settings.write_text(json.dumps({**PROMISE, "seed": seed, "rounds": rounds, "every": every}))
    subprocess.run([python, str(BENCHMARKS / "rivals" / "pfl_private.py"), str(settings), str(output)], check=True)
    rows = pd.read_csv(output, names=["round", "accuracy"])
    return dict(zip(rows["round"].astype(int), rows["accuracy"].astype(float), strict=True))


def curve_of(name: str, line: Line, points: pd.DataFrame) -> Curve:
    """Returns the mean curve of a system over its seeds."""
    by_round = points[points["system"] == name].groupby("round")["accuracy"]
    mean, seeds = by_round.mean(), int(by_round.count().min())
    if seeds < LEAST_RUNS:
        low, high = by_round.min(), by_round.max()
    else:
        margin = margin_of(1.0, seeds) * by_round.std()
        low, high = mean - margin, mean + margin
    return Curve(name, line, pd.DataFrame({"x": mean.index, "mean": mean, "low": low, "high": high}))


def points_of(path: Path, rounds: int, every: int) -> pd.DataFrame:
    """Returns the points in ``path``. Raises :class:`UserError` if they are not those of these rounds."""
    if not path.exists():
        return pd.DataFrame(columns=["system", "seed", "round", "accuracy"])
    points, asked = pd.read_csv(path), {*range(every, rounds, every), rounds}
    for (system, seed), some in points.groupby(["system", "seed"]):
        if {*some["round"]} != asked:
            there = f"{system}, seed {seed} has {len(some)} points up to round {some['round'].max()}"
            raise UserError(f"{path} is of another --rounds or --every ({there}): give another OUTPUT")
    return points


OF_PFL = (
    "`pfl` is pfl-research, run here by this program with the same settings and for as many rounds. It is not the "
    "accuracy that its authors publish, which is that of 1,500 rounds of a model with dropout.\n\n"
)


def report(points: pd.DataFrame, folder: Path, every: int) -> None:
    """Writes the table and the picture of all ``points``, which are of ``every`` so many rounds."""
    rounds, names = int(points["round"].max()), list(map(str, points["system"].unique()))
    last = points[points["round"] == rounds]
    rows = [
        {"": name, "accuracy, %": with_interval((100 * some).tolist()), "seeds": len(some)}
        for name in names
        if len(some := last[last["system"] == name]["accuracy"])
    ]
    title = (
        "# Private training on CIFAR-10\n\n"
        "50 of 1,000 clients with 50 samples each (i.i.d.) make a pass in batches of 10; epsilon 2 at delta 1e-6 for "
        "rounds of 1,000 of a million clients, updates clipped to 0.4. "
        f"`python analysis/private_cifar10.py OUTPUT{' --pfl PYTHON' if 'pfl' in names else ''} --rounds {rounds} "
        f"--every {every} --seeds {points['seed'].nunique()}`. Test accuracy after {rounds:,} rounds:\n\n"
    )
    picture = "\n\n![accuracies over rounds](private_cifar10.png)\n"
    table = markdown(pd.DataFrame(rows)) + "\n\n" + OF_PFL * ("pfl" in names)
    (folder / "private_cifar10.md").write_text(title + table.rstrip() + picture)
    curves = [curve_of(name, line, points) for name, line in lines_for(names).items()]
    caption = bands_caption(int(last.groupby("system").size().min()))
    save_png(
        draw_panels([Panel(caption, "test accuracy, %", "rounds", curves, 100, 100)]), folder / "private_cifar10.png"
    )


def main(arguments: Sequence[str]) -> int:
    """Makes what the arguments of the command line ask for, and returns the exit code."""
    return exit_code(lambda: _compare(arguments))


def _compare(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="private_cifar10.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--pfl", metavar="PYTHON", help="an interpreter that has pfl")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    if min(options.rounds, options.every, options.seeds) < 1:
        raise UserError("--rounds, --every and --seeds must be at least 1")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "points.csv"
    points = points_of(path, options.rounds, options.every)
    for seed in range(1, options.seeds + 1):
        for system in ("fedray", *(["pfl"] if options.pfl else []), "fedray without privacy"):
            if ((points["system"] == system) & (points["seed"] == seed)).any():
                continue
            with tempfile.TemporaryDirectory() as folder:
                made = (
                    of_pfl(options.pfl, seed, options.rounds, options.every, Path(folder))
                    if system == "pfl"
                    else of_fedray(system == "fedray", seed, options.rounds, options.every, Path(folder))
                )
            found = pd.DataFrame({"system": system, "seed": seed, "round": [*made], "accuracy": [*made.values()]})
            points = pd.concat([points, found], ignore_index=True) if len(points) else found
            points.to_csv(path, index=False)
    report(points, options.output, options.every)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
