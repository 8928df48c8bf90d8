"""Data larger than a user wants to hold in memory: seconds and memory of rounds that read them from files.

python analysis/benchmarks/large_data.py --part photographs --data FOLDER --source gldv2
python analysis/benchmarks/large_data.py --part lazy
python analysis/benchmarks/large_data.py --part input [--data FOLDER]
python analysis/benchmarks/large_data.py --part iwildcam

``photographs.py`` makes the folder of the first part, which needs 2.5 GB of disk for fedray's cache. That cache is in a
temporary folder beside the data, unless ``--cache`` names one. The model of photographs is torchvision's MobileNetV2
with ImageNet's weights, at 64 pixels.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import Results, median_ratio
from input_rates import compare
from measured import COLUMNS, fresh
from watch import used_mib

ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm.name": "fedavg"},
    "fedhbm": {"algorithm.name": "fedhbm"},
    "ghbm": {"algorithm.name": "ghbm", "algorithm.tau": 10},
}
WORK = ("data", "gradient", "algorithm")
"""The purposes of a profile that a plain loop has too."""


def photograph_settings(source: str, root: Path, rounds: int, **more: Any) -> dict[str, Any]:
    """Returns the settings of a run on photographs. The test set is evaluated after the last round only."""
    return {
        "run.name": "large", "run.rounds": rounds, "run.eval_every": 0, "run.checkpoint_every": 10,
        "data.source": source, "data.root": str(root), "data.image_size": 64, "data.access": "mapped",
        "train.cohort_size": 10, "train.local_epochs": 1, "train.batch_size": 32, "train.lr": 0.01,
        "engine.actors": 2, **more,
    }  # fmt: skip


@contextlib.contextmanager
def cache_folder(asked: Path | None, beside: Path | None) -> Iterator[Path]:
    """A folder for fedray's cache, which is removed at the end unless the user asked for this one."""
    if asked is not None:
        asked.mkdir(parents=True, exist_ok=True)
        yield asked.resolve()
        return
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        yield Path(folder)


def evict(folder: Path) -> None:
    """Asks the system to drop the files below ``folder`` from its memory, so that they are read from the disk."""
    seen = set()
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            number = os.lstat(path).st_ino
            if number in seen:
                continue
            seen.add(number)
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def prepare(settings: dict[str, Any], cache: Path) -> float:
    """Returns the seconds of `fedray data prepare`, which reads all photographs unless they are in the cache."""
    given = [f"{key}={value}" for key, value in settings.items() if key.startswith("data.")]
    command = [sys.executable, "-c", "from fedray.run import main; main()", "data", "prepare", *given]
    began = time.perf_counter()
    subprocess.run([*command, "engine.kind=local"], env={**os.environ, "XDG_CACHE_HOME": str(cache)}, check=True)
    return time.perf_counter() - began


class Table:
    """A row for each round of each run, and the summaries of the runs."""

    def __init__(self, part: str) -> None:
        self.results = Results(f"large-{part}", ["run", "algorithm", "access", "repeat", *COLUMNS])
        self.runs: dict[str, Any] = {}

    def run(self, spec: dict[str, Any], cache: Path, name: str, repeat: int = 0) -> list[dict[str, Any]]:
        """Makes a run in a fresh process, writes its rows, and returns them."""
        found, settings = fresh(spec, cache), spec["settings"]
        for row in found["rows"]:
            self.results.row(
                run=name, algorithm=settings["algorithm.name"], access=settings["data.access"], repeat=repeat, **row
            )
        self.runs[name] = found["summary"]
        seconds, peak = found["summary"]["seconds"], found["summary"]["peak_mib"]
        shown = ", ".join(f"{kind} {mib:,.0f}" for kind, mib in peak.items())
        print(f"{name}: {seconds and round(seconds, 3)} s per round, peak MiB {shown}", flush=True)
        return found["rows"]


def against_memory(table: Table, settings: dict[str, Any], cache: Path, repeats: int) -> dict[str, Any]:
    """Runs FedAvg on mapped data and on the same in memory, in alternating order.

    Returns the ratio of their seconds per round. Pairs are the same round of the same repeat, which have the same
    clients; a pair is kept if other processes were quiet in both.
    """
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for repeat in range(repeats):
        rows = {}
        for access in ("mapped", "memory") if repeat % 2 == 0 else ("memory", "mapped"):
            spec = {"settings": {**settings, "data.access": access, "run.eval_test": False}, "model": "mobilenet"}
            rows[access] = table.run(spec, cache, f"fedavg-{access}-{repeat}", repeat)[1:]
        pairs += list(zip(rows["mapped"], rows["memory"], strict=True))
    found: dict[str, Any] = {}
    for name, chosen in (("kept", [pair for pair in pairs if all(row["kept"] for row in pair)]), ("all", pairs)):
        found[name] = {"pairs": len(chosen)}
        for column in ("seconds", "round_seconds"):
            if chosen:
                above, below = ([row[column] for row in side] for side in zip(*chosen, strict=True))
                medians = {"mapped": statistics.median(above), "memory": statistics.median(below)}
                found[name][column] = medians | median_ratio(above, below)
    return found


def photographs(args: argparse.Namespace) -> None:
    """Part (a) is the start in a cold and a warm cache, (b) three algorithms, and (c) the comparison with memory."""
    table = Table(f"photographs-{args.source}")
    settings = photograph_settings(args.source, args.data.resolve(), args.rounds)
    found: dict[str, Any] = {}
    with cache_folder(args.cache, args.data.resolve().parent) as cache:
        if "start" in args.only:
            shutil.rmtree(cache / "fedray" / "mapped", ignore_errors=True)
            evict(args.data)
            found["prepare_seconds"] = {state: prepare(settings, cache) for state in ("cold", "warm")}
            found["mapped_mib"] = used_mib(cache / "fedray" / "mapped")
            print(found, flush=True)
        for name in args.algorithms if "rounds" in args.only else ():
            table.run({"settings": {**settings, **ALGORITHMS[name]}, "model": "mobilenet"}, cache, name)
        if "memory" in args.only:
            asked = {**settings, **ALGORITHMS["fedavg"]}
            found["mapped_over_memory"] = against_memory(table, asked, cache, args.repeats)
    table.results.summary(part="photographs", source=args.source, rounds=args.rounds, **found, runs=table.runs)


def iwildcam(args: argparse.Namespace) -> None:
    """Five rounds of three algorithms on real photographs, of iWildCam."""
    table, data = Table("iwildcam"), args.data or Path(os.environ["FEDRAY_DATA"]) / "iwildcam"
    settings = photograph_settings("federated_csv", data.resolve(), args.rounds)
    with cache_folder(args.cache, None) as cache:
        start = {state: prepare(settings, cache) for state in ("cold", "warm")}
        for name in args.algorithms:
            table.run({"settings": {**settings, **ALGORITHMS[name]}, "model": "mobilenet"}, cache, name)
    table.results.summary(part="iwildcam", rounds=args.rounds, prepare_seconds=start, runs=table.runs)


def lazy(args: argparse.Namespace) -> None:
    """2,000 clients with 100 items of 100 kB each, which are made when they are read: 20 GB if all were in memory."""
    table, clients, each = Table("lazy"), max(20, round(2000 * args.scale)), 100
    settings = {
        "run.name": "lazy", "run.rounds": args.rounds, "run.eval_every": 0, "run.checkpoint_every": 0,
        "algorithm.name": "fedavg", "data.access": "lazy", "train.cohort_size": 20, "train.local_epochs": 1,
        "train.batch_size": 32, "train.lr": 0.01, "engine.actors": 2,
    }  # fmt: skip
    with cache_folder(args.cache, None) as cache:
        spec = {"settings": settings, "model": "strided", "generated": [clients, each]}
        table.run(spec, cache, "lazy")
    table.results.summary(
        part="lazy", items=clients * each, gigabytes=clients * each * 3 * 183**2 / 1e9, rounds=args.rounds,
        runs=table.runs,
    )  # fmt: skip


def profile_settings(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the settings of the runs whose rounds are taken apart: one epoch of each client, from mapped files."""
    common = {
        "run.name": "input", "run.rounds": args.rounds, "run.eval_every": 0, "run.eval_test": False,
        "run.checkpoint_every": 0, "algorithm.name": "fedavg", "data.access": "mapped", "data.clients": 100,
        "data.partition.kind": "iid", "data.public_samples": 0, "train.local_epochs": 1, "train.batch_size": 64,
        "train.lr": 0.01, "engine.actors": 2, "engine.profile": True,
    }  # fmt: skip
    return {
        "lenet5-mnist": {**common, "data.source": "mnist", "model.name": "lenet5", "train.cohort_size": 50},
        "resnet20-cifar10": {**common, "data.source": "cifar10", "model.name": "resnet20", "train.cohort_size": 10},
    }


def input_path(args: argparse.Namespace) -> None:
    """Images per second against a DataLoader's, and the part of a round that goes into reading and scaling samples."""
    from fedray.tracking.columns import PURPOSES

    data = args.data or Path(os.environ["FEDRAY_DATA"]) / "tiny-imagenet-200"
    rates = Results("large-input-rates", ["system", "repeat", "images_per_second", "foreign"])
    rates.summary(part="input-rates", **compare(data.resolve(), args.image_size, args.images, args.pairs, rates.row))
    results = Results("large-input-profile", ["run", "round", *PURPOSES])
    found: dict[str, Any] = {}
    with cache_folder(args.cache, None) as cache:
        for name, settings in profile_settings(args).items():
            run = fresh({"settings": settings}, cache)
            for row in run["profile"]:
                results.row(run=name, **row)
            seconds = {purpose: statistics.median(row[purpose] for row in run["profile"][1:]) for purpose in PURPOSES}
            whole, work = sum(seconds.values()), sum(seconds[purpose] for purpose in WORK)
            found[name] = {
                "seconds": seconds, "foreign": run["summary"]["foreign"],
                "data_percent_of_round": round(100 * seconds["data"] / whole, 2),
                "data_percent_of_work": round(100 * seconds["data"] / work, 2),
            }  # fmt: skip
    results.summary(part="input-profile", rounds=args.rounds - 1, runs=found)


PARTS: dict[str, tuple[Callable[[argparse.Namespace], None], int]] = {
    "photographs": (photographs, 20),
    "lazy": (lazy, 5),
    "input": (input_path, 16),
    "iwildcam": (iwildcam, 5),
}
"""The function of each part, and the rounds of its runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--data", type=Path, help="folder of the images")
    parser.add_argument("--source", default="federated_csv", help="gldv2 or inaturalist at the published counts")
    parser.add_argument("--cache", type=Path, help="folder for fedray's cache, which is kept")
    parser.add_argument(
        "--rounds", type=int, help=f"by default {', '.join(f'{n} ({p})' for p, (_, n) in PARTS.items())}"
    )
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--repeats", type=int, default=3, help="photographs: runs of each of mapped and memory")
    parser.add_argument(
        "--only", nargs="+", choices=("start", "rounds", "memory"), default=["start", "rounds", "memory"]
    )
    parser.add_argument("--scale", type=float, default=1.0, help="lazy: part of the 2,000 clients")
    parser.add_argument("--image-size", type=int, default=64, help="input: pixels")
    parser.add_argument("--images", type=int, default=20_000, help="input: the most photographs of a train.csv")
    parser.add_argument("--pairs", type=int, default=9, help="input: epochs or seconds of each of the two ways")
    args = parser.parse_args()
    function, rounds = PARTS[args.part]
    args.rounds = args.rounds or rounds
    if args.part == "photographs" and args.data is None:
        parser.error("--part photographs needs --data, which photographs.py makes")
    began = time.perf_counter()
    function(args)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
