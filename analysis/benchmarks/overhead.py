"""fedray's overhead: against the plain loop (pairs), and as registered clients grow (scale).

python analysis/benchmarks/overhead.py --part pairs --workload A
python analysis/benchmarks/overhead.py --part scale
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

from common import QUIET, ProcessTree, Results, Usage, median_ratio, patient
from plain_loop import LAYOUTS, PlainLoop
from workloads import BLOCK, WORKLOADS, Workload


def config(work: Workload, output: str) -> dict[str, Any]:
    """The same work for fedray; its round does what the plain loop's does, and no evaluation or checkpoint."""
    return {
        "run": {"name": "benchmark", "output": output, "rounds": 1_000_000, "eval_every": 0, "checkpoint_every": 0},
        "algorithm": {"name": "fedavg"},
        "data": {
            "source": work.source,
            "clients": work.clients,
            "samples_per_client": work.samples,
            "partition": {"kind": "iid", "overlap": work.overlap},
            "public_samples": 0,
        },
        "model": {"name": work.model},
        "train": {
            "local_steps": work.steps,
            "batch_size": work.batch,
            "lr": work.lr,
            "cohort_size": work.cohort,
        },
        "engine": {"kind": "ray", "actors": 2, "address": "local"},
    }


class Rounds:
    """A callback that times fedray's rounds in blocks and hands each full block to ``on_block``.

    A round's time runs from the end of the last callback to the start of the next one, so that nothing that fedray does
    between two rounds is left out. What ``on_block`` does (the plain loop's rounds) happens while fedray waits.
    """

    def __init__(self, block: int, usage: Usage, on_block: Callable[[dict[str, float]], bool]) -> None:
        self.block, self.usage, self.on_block = block, usage, on_block
        self.walls: list[float] = []
        self.reported: list[float] = []
        self.resumed: float | None = None

    def __call__(self, report: Any) -> bool:
        called = time.perf_counter()
        if self.resumed is None:  # the first round holds the start of everything
            self.usage.start()
            self.resumed = time.perf_counter()
            return False
        self.walls.append(called - self.resumed)
        self.reported.append(report.metrics["round_seconds"])
        stop = False
        if len(self.walls) == self.block:
            seconds = statistics.fmean(self.walls)
            used = self.usage.stop()
            stop = self.on_block({"seconds": seconds, "round_seconds": statistics.fmean(self.reported), **used})
            self.walls, self.reported = [], []
            self.usage.start()
        self.resumed = time.perf_counter()
        return stop


class Pairs:
    """The samples of fedray and of the plain loop, of which each is first in every other pair: F P | P F | F P ...

    A sample is the mean of a block of rounds. It is kept if other processes left the machine alone meanwhile. The first
    ``warmup`` pairs are written, but count for nothing.
    """

    def __init__(
        self, args: argparse.Namespace, results: Results, plain_sample: Callable[[], dict[str, float]]
    ) -> None:
        self.warmup, self.results, self.plain_sample = args.warmup, results, plain_sample
        self.more = patient(args.pairs, args.max_minutes)
        self.fedray: list[dict[str, Any]] = []
        self.plain: list[dict[str, Any]] = []

    def on_block(self, sample: dict[str, float]) -> bool:
        """Takes fedray's next sample, and the plain loop's beside it. Returns whether that was the last pair."""
        pair = len(self.fedray)
        self.fedray.append(placed(sample, pair % 2))
        if pair % 2 == 0:
            self.plain.append(placed(self.plain_sample(), 1))
            self.write(pair)
            # the next pair begins with the plain loop
            self.plain.append(placed(self.plain_sample(), 0))
        else:
            self.write(pair)
        return not self.more(len(self.kept()))

    def write(self, pair: int) -> None:
        """Writes the two rows of a pair, and prints its ratio."""
        fedray, plain = self.fedray[pair], self.plain[pair]
        for system, sample in (("fedray", fedray), ("plain", plain)):
            self.results.row(pair=pair - self.warmup, system=system, **sample)
        print(
            f"pair {pair - self.warmup:3d}: fedray {fedray['seconds']:.4f} s, plain {plain['seconds']:.4f} s, "
            f"ratio {fedray['seconds'] / plain['seconds']:.3f}, foreign {fedray['foreign']:.2f} {plain['foreign']:.2f}",
            flush=True,
        )

    def complete(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns the pairs after the warmup, fedray's sample first."""
        # the plain loop may have a sample already for a pair that fedray has not begun
        return list(zip(self.fedray, self.plain, strict=False))[self.warmup :]

    def kept(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns the pairs of which both samples are kept."""
        return [pair for pair in self.complete() if all(sample["kept"] for sample in pair)]


def placed(sample: dict[str, float], place: int) -> dict[str, Any]:
    """Returns the sample with its place in its pair, and with whether it is kept."""
    return {**sample, "place": place, "kept": sample["foreign"] <= QUIET}


def pairs(args: argparse.Namespace) -> None:
    from fedray import simulate

    work, block = WORKLOADS[args.workload], BLOCK[args.workload]
    columns = ["pair", "system", "place", "seconds", "round_seconds", "foreign", "own", "rest", "kept"]
    results = Results(f"pairs-{args.workload}", columns)
    tree = ProcessTree()
    loop = PlainLoop(work, layout=args.layout)
    loop.start()

    def plain_sample() -> dict[str, float]:
        usage = Usage(tree)
        seconds = [loop.round() for _ in range(block)]
        return {"seconds": statistics.fmean(seconds), **usage.stop(apart=loop.pids())}

    for _ in range(args.warmup):
        plain_sample()
    before = [plain_sample() for _ in range(5)]  # without Ray beside it
    measured = Pairs(args, results, plain_sample)
    with tempfile.TemporaryDirectory() as output:
        simulate(config(work, output), callbacks=[Rounds(block, Usage(tree), measured.on_block)])
    loop.close()
    summarize(args, measured, [sample["seconds"] for sample in before if sample["foreign"] <= QUIET])


def summarize(args: argparse.Namespace, measured: Pairs, plain_alone: list[float]) -> None:
    """Writes the summary of the pairs. ``plain_alone`` holds the plain loop's seconds per round without Ray."""
    kept, dropped = measured.kept(), len(measured.complete()) - len(measured.kept())
    if not kept:
        measured.results.summary(part="pairs", workload=args.workload, kept=0, dropped=dropped)
        return
    fedray = [sample["seconds"] for sample, _ in kept]
    plain = [sample["seconds"] for _, sample in kept]
    measured.results.summary(
        part="pairs",
        workload=args.workload,
        layout=args.layout,
        rounds_per_sample=BLOCK[args.workload],
        kept=len(kept),
        dropped=dropped,
        fedray_seconds=statistics.median(fedray),
        fedray_round_seconds=statistics.median(sample["round_seconds"] for sample, _ in kept),
        plain_seconds=statistics.median(plain),
        plain_alone_seconds=statistics.median(plain_alone) if plain_alone else None,
        ratio_of_medians=median_ratio(fedray, plain),
        ratio_per_pair_median=statistics.median(f / p for f, p in zip(fedray, plain, strict=True)),
        ratios=[round(f / p, 4) for f, p in zip(fedray, plain, strict=True)],
        foreign_cores=statistics.median(sample["foreign"] for pair in kept for sample in pair),
        ray_cores_beside_plain=statistics.median(sample["rest"] for _, sample in kept),
    )


def alone(begin: float, work: Workload, block: int, warmup: int, blocks: int, minutes: float) -> dict[str, Any]:
    """fedray by itself in this (fresh) process: its blocks of rounds, the time to its first round, its peak memory."""
    tree = ProcessTree()
    start = Usage(tree)
    memory = [0.0]
    started = threading.Event()

    def watch() -> None:
        while not started.wait(0.5):
            memory.append(tree.pss_mib())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    from fedray import simulate

    samples: list[dict[str, Any]] = []
    more = patient(blocks, minutes)

    def on_block(sample: dict[str, float]) -> bool:
        if not samples:
            watcher.join()
        memory.append(tree.pss_mib())
        samples.append({**sample, "kept": sample["foreign"] <= QUIET and len(samples) >= warmup})
        return not more(sum(sample["kept"] for sample in samples))

    rounds = Rounds(block, Usage(tree), on_block)
    first: dict[str, float] = {}

    def callback(report: Any) -> bool:
        if not first:
            first.update(start_seconds=time.perf_counter() - begin)
            first.update(start_foreign=start.stop()["foreign"])
            started.set()
        return rounds(report)

    with tempfile.TemporaryDirectory() as output:
        simulate(config(work, output), callbacks=[callback])
    return {"samples": samples[warmup:], "peak_mib": max(memory), **first}


def fresh(*args: Any) -> dict[str, Any]:
    """``alone`` in a process of its own: memory and Ray start anew. The clock runs from before that process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(alone, time.perf_counter(), *args).result()


def scale(args: argparse.Namespace) -> None:
    columns = ["clients", "turn", "seconds", "round_seconds", "foreign", "own", "rest", "kept"]
    results = Results("scale", columns)
    block = BLOCK["C"]
    runs: dict[int, list[dict[str, Any]]] = {clients: [] for clients in args.clients}
    for turn in range(args.turns):
        shift = turn % len(args.clients)
        for clients in args.clients[shift:] + args.clients[:shift]:
            work = replace(WORKLOADS["C"], clients=clients)
            run = fresh(work, block, 1, args.blocks, args.max_minutes / (args.turns * len(args.clients)))
            runs[clients].append(run)
            for sample in run["samples"]:
                results.row(clients=clients, turn=turn, **sample)
            print(
                f"turn {turn}, N={clients}: {median(run['samples']):.5f} s/round, start {run['start_seconds']:.1f} s, "
                f"peak {run['peak_mib']:.0f} MiB",
                flush=True,
            )
    kept = {n: [s for run in runs[n] for s in run["samples"] if s["kept"]] for n in runs}
    low, high = min(runs), max(runs)

    def grown(name: str) -> dict[str, Any] | None:
        above, below = column(kept[high], name), column(kept[low], name)
        return median_ratio(above, below, paired=False) if above and below else None

    results.summary(
        part="scale",
        rounds_per_sample=block,
        clients=[
            {
                "clients": n,
                "seconds": median(kept[n]),
                "round_seconds": median(kept[n], "round_seconds"),
                "by_turn": [median([s for s in run["samples"] if s["kept"]]) for run in runs[n]],
                "kept": len(kept[n]),
                "dropped": sum(not s["kept"] for run in runs[n] for s in run["samples"]),
                "start_seconds": statistics.median(run["start_seconds"] for run in runs[n]),
                "peak_mib": max(run["peak_mib"] for run in runs[n]),
            }
            for n in runs
        ],
        ratio=f"N={high} / N={low}",
        ratio_of_medians=grown("seconds"),
        ratio_of_round_seconds=grown("round_seconds"),
    )


def column(samples: Sequence[dict[str, Any]], name: str = "seconds") -> list[float]:
    return [sample[name] for sample in samples]


def median(samples: Sequence[dict[str, Any]], name: str = "seconds") -> float:
    return statistics.median(column(samples, name)) if samples else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["pairs", "scale"], default="pairs")
    parser.add_argument("--max-minutes", type=float, default=20, help="time limit of the whole")
    parser.add_argument("--workload", choices=WORKLOADS, default="A", help="of pairs")
    parser.add_argument("--turns", type=int, default=3, help="of scale: runs per N, in rotating order")
    pair = parser.add_argument_group("pairs")
    pair.add_argument("--pairs", type=int, default=15, help="pairs of samples to keep")
    pair.add_argument("--warmup", type=int, default=2, help="pairs before that")
    pair.add_argument("--layout", choices=LAYOUTS, default="usual", help="of the plain loop's convolutions")
    scale_group = parser.add_argument_group("scale")
    scale_group.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    scale_group.add_argument("--blocks", type=int, default=6, help=f"samples of {BLOCK['C']} rounds to keep per run")
    args = parser.parse_args()
    {"pairs": pairs, "scale": scale}[args.part](args)


if __name__ == "__main__":
    main()
