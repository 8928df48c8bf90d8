"""Benchmark F: 500 rounds of a run with client state, checkpoints and evaluation: does anything grow?

python analysis/benchmarks/soak.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import ProcessTree, Results
from watch import Watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=100, help="rounds that do not count")
    parser.add_argument("--algorithm", default="scaffold")
    args = parser.parse_args()
    from fedray import simulate

    columns = ["seconds", "where", "pss_mib", "shared_mib", "files", "disk_mib", "foreign"]
    results = Results("soak", columns)
    reached = [0]

    def callback(report: Any) -> None:
        reached[0] = report.round
        if report.round == args.rounds:
            # before the actors go
            watch.close()

    with tempfile.TemporaryDirectory() as output:
        watch = Watch(ProcessTree(), Path(output), lambda: reached[0])
        simulate(
            {
                "run.output": output, "run.rounds": args.rounds, "algorithm.name": args.algorithm,
                "data.source": "mnist", "data.clients": 100, "data.samples_per_client": 600,
                "data.partition.kind": "iid", "data.public_samples": 0, "model.name": "lenet5",
                "train.cohort_size": 20, "train.local_steps": 2, "train.batch_size": 20, "engine.actors": 2,
                "engine.address": "local",
            },
            callbacks=[callback],
        )  # fmt: skip
    for sample in watch.samples:
        results.row(**sample)
    results.summary(
        part="soak",
        rounds=args.rounds,
        algorithm=args.algorithm,
        per_round={name: watch.slope(name, args.warmup) for name in columns[2:-1]},
        peak_pss_mib=watch.peak("pss_mib"),
    )


if __name__ == "__main__":
    main()
