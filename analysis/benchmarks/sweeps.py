"""Trials of pFedMo on MNIST (T = 400): a sweep against the same trials run one after another, each in a fresh process.

FEDRAY_DATA=... python analysis/benchmarks/sweeps.py --trials 12 --turns 3

Four ways, in turn: `one by one` with the local engine, `one by one, two actors` with Ray, a `sweep` of two trials at
once, and a `sweep with ASHA` (which does not finish all). The values are drawn at random from the space with one seed,
so that all ways have the same; what each trial evaluates and records is the same too. Seconds are from nothing to the
end of the last trial, with everything that starts and stops.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from common import Results, median_ratio

PROGRAM = str(Path(__file__).parents[2] / "fedray" / "run.py")
ASHA = ["tune.pruner.kind=asha", "tune.pruner.axis=flops"]


def tune(output: Path, trials: int, *more: str) -> None:
    run(
        "tune",
        "pfedmo",
        "run.iterations=400",
        "tune.sampler=random",
        f"tune.trials={trials}",
        f"tune.output={output}",
        *more,
    )


def one_by_one(output: Path, configs: list[Path], *more: str) -> None:
    for number, config in enumerate(configs):
        run("run", str(config), f"run.output={output}", f"run.name=trial-{number}", *more)


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, PROGRAM, *arguments], check=True, stdout=subprocess.DEVNULL)


def turns(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Each way once per turn, the order turned round every time; its seconds."""
    first = scratch / "values"
    tune(first, options.trials)
    configs = sorted(first.glob("pfedmo/trials/*/seed-0/config.yaml"))
    assert len(configs) == options.trials
    ways = {
        "one by one": lambda folder: one_by_one(folder, configs),
        "one by one, two actors": lambda folder: one_by_one(folder, configs, "engine.kind=ray", "engine.actors=2"),
        "sweep": lambda folder: tune(folder, options.trials),
        "sweep with ASHA": lambda folder: tune(folder, options.trials, *ASHA),
    }
    for turn in range(options.turns):
        for way in list(ways)[:: 1 if turn % 2 == 0 else -1]:
            began = time.perf_counter()
            ways[way](scratch / f"{turn}-{way}")
            yield way, {"turn": turn, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    results = Results("sweeps", ["way", "turn", "seconds"])
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for way, sample in turns(options, Path(scratch)):
            results.row(way=way, **sample)
            print(f"{way}: {sample['seconds']:.1f} s", flush=True)
            found.setdefault(way, []).append(sample["seconds"])
    fast = {way: seconds for way, seconds in found.items() if way.startswith("sweep")}
    results.summary(
        trials=options.trials,
        turns=options.turns,
        seconds={way: median(seconds) for way, seconds in found.items()},
        times_as_long={
            f"{slow} / {way}": median_ratio(found[slow], seconds)
            for way, seconds in fast.items()
            for slow in found
            if slow not in fast
        },
    )


if __name__ == "__main__":
    main()
