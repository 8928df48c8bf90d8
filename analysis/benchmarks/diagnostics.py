"""What `run.diagnostics` costs: seconds per round with each of its values against those without.

    python analysis/benchmarks/diagnostics.py [--turns 9] [--rounds 12]

LeNet-5 on MNIST, 10 of 100 clients, 10 steps of 64, on Ray with two client actors. Each turn makes a run with each
value, in an order that moves on from turn to turn. A run's figure is the median of its rounds after the first two; the
ratios are of medians over the turns, with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Collection, Mapping
from typing import Any

from common import QUIET, ProcessTree, Results, Usage, median_ratio

from fedray import Report, simulate
from fedray.tracking.tables import read_metrics

SETTINGS = {
    "data.source": "mnist", "data.clients": 100, "data.samples_per_client": 600, "data.partition.kind": "iid",
    "data.public_samples": 0, "model.name": "lenet5", "train.cohort_size": 10, "train.local_steps": 10,
    "train.batch_size": 64, "train.lr": 0.01, "run.eval_every": 0, "run.checkpoint_every": 0,
    "engine.kind": "ray", "engine.actors": 2, "engine.address": "local",
}  # fmt: skip
CASES = {
    "fedavg": {"algorithm.name": "fedavg"},
    "fedavg, true": {"algorithm.name": "fedavg", "run.diagnostics": True},
    "fedavg, virtual": {"algorithm.name": "fedavg", "run.diagnostics": "virtual"},
    "ghbm": {"algorithm.name": "ghbm"},
    "ghbm, all_clients": {"algorithm.name": "ghbm", "run.diagnostics": "all_clients"},
}
WARM_UP = 2
"""Rounds of a run that do not count."""


def measure(settings: Mapping[str, Any], rounds: int, usage: Usage, whole: bool) -> tuple[float, float]:
    """Returns the median seconds of a round of a run of its own, or, with ``whole``, the mean over all of its rounds,
    and the cores that other programs used meanwhile."""
    folder = tempfile.mkdtemp(prefix="fedray-")
    foreign: list[float] = []

    def watch(report: Report) -> None:
        # while the processes of the run are there: the time of those that have ended can't be told from that of others
        if report.round == WARM_UP:
            usage.start()
        elif report.round == rounds:
            foreign.append(usage.stop()["foreign"])

    try:
        run = simulate({**settings, "run.rounds": rounds, "run.output": folder}, callbacks=[watch])
        seconds = read_metrics(run.folder)["wall_seconds"]
        return float(seconds.iloc[-1] / rounds if whole else seconds.diff().iloc[WARM_UP:].median()), foreign[0]
    finally:
        shutil.rmtree(folder)


def compare(
    name: str, cases: Mapping[str, Mapping[str, Any]], turns: int, rounds: int, whole: Collection[str] = ()
) -> None:
    """Measures the settings of all ``cases`` in turns, and compares each with the case that is named before its comma.
    Cases in ``whole`` have their mean over all rounds. Writes the results called ``name``."""
    results = Results(name, ["turn", "case", "seconds", "foreign", "kept"])
    kept: dict[str, dict[int, float]] = {case: {} for case in cases}
    usage = Usage(ProcessTree())
    for turn in range(turns):
        names = list(cases)
        for case in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            seconds, foreign = measure(cases[case], rounds, usage, case in whole)
            quiet = foreign <= QUIET
            results.row(turn=turn, case=case, seconds=seconds, foreign=foreign, kept=quiet)
            if quiet:
                kept[case][turn] = seconds
    ratios = {}
    for case in cases:
        plain = case.partition(",")[0]
        if both := sorted(kept[case].keys() & kept[plain].keys()):
            ratio = median_ratio([kept[case][turn] for turn in both], [kept[plain][turn] for turn in both])
            ratios[case] = {"turns": len(both), **ratio}
    results.summary(cases=cases, rounds=rounds, ratios=ratios)


def turns_and_rounds(about: str | None, turns: int, rounds: int) -> argparse.Namespace:
    """Reads these two numbers from the command line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=turns)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser.parse_args()


if __name__ == "__main__":
    options = turns_and_rounds(__doc__, turns=9, rounds=12)
    compare("diagnostics", {case: {**SETTINGS, **own} for case, own in CASES.items()}, options.turns, options.rounds)
