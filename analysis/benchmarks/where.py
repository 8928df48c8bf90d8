"""Benchmark G: where the time of fedray's rounds goes, and how much of it is the framework's.

python analysis/benchmarks/where.py --workload A
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import ProcessTree, Results
from overhead import config
from watch import Watch
from workloads import WORKLOADS

WORK = ("data", "gradient", "algorithm")
"""What a plain loop has to do too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="A")
    parser.add_argument("--rounds", type=int, default=16, help="the first does not count")
    parser.add_argument("--compile", action="store_true", help="with compiled gradients (engine.compile=true)")
    args = parser.parse_args()
    from fedray import simulate
    from fedray.tracking.columns import PURPOSES

    with tempfile.TemporaryDirectory() as output:
        settings = config(WORKLOADS[args.workload], output)
        settings["run"]["rounds"] = args.rounds
        settings["engine"]["profile"] = True
        if args.compile:
            settings["engine"]["compile"] = True
        watch = Watch(ProcessTree(), Path(output), lambda: 0)
        profile = simulate(settings).profile
        watch.close()
    results = Results(f"profile-{args.workload}", ["round", *PURPOSES])
    for row in profile.to_dict("records"):
        results.row(**row)
    seconds = profile.iloc[1:].median()[list(PURPOSES)]
    results.summary(
        part="where",
        workload=args.workload,
        compiled=args.compile,
        rounds=args.rounds - 1,
        foreign_cores=watch.median("foreign"),
        seconds=seconds.to_dict(),
        percent=(100 * seconds / seconds.sum()).round(2).to_dict(),
        framework_percent=round(100 * float(1 - seconds[list(WORK)].sum() / seconds.sum()), 2),
    )


if __name__ == "__main__":
    main()
