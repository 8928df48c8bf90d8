"""Whether a GPU gives the same bits in every way, with every model; after a kill; and whether its memory grows.

    python analysis/benchmarks/gpu_bits.py [--only models,algorithms,kill,memory] [--models lenet5,vit_b_16]
    python analysis/benchmarks/gpu_bits.py --device cpu --models lenet5       # the same on a CPU

It prints one table and exits with 1 unless all is the same. Runs of a second go on side by side (--jobs).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_cases import COLOUR, GREY, WAYS, Case, algorithm_cases, model_cases, outcome, rows, verdict

PARTS = ("models", "algorithms", "kill", "memory")
PROGRAM = str(Path(__file__).parents[2] / "fedray" / "run.py")

KILLED = [
    "algorithm.name=scaffold", "data.source=sample", "data.clients=8", "train.cohort_size=6", "model.name=lenet5",
    "train.local_steps=10", "train.batch_size=16", "run.rounds=24", "run.checkpoint_every=4", "engine.vectorize=false",
    "run.name=run",
]  # fmt: skip
KILL_WAYS = {
    "local": ["engine.kind=local", "engine.lanes=8"],
    "4 actors": ["engine.address=local", "engine.actors=4", "engine.cpus_per_actor=0.25"],
}

MEMORY: dict[str, dict[str, Any]] = {
    "lenet5, stacks": {"model.name": "lenet5", "engine.vectorize": True},
    "ghbm_cnn, lanes": {"model.name": "ghbm_cnn", "engine.vectorize": False},
    "ghbm_cnn, lanes, scaffold": {"model.name": "ghbm_cnn", "engine.vectorize": False, "algorithm.name": "scaffold"},
}
EARLY = 20
"""The round after which the memory of a GPU is compared with that at the end."""


def compared(cases: Mapping[str, Case], pool: ProcessPoolExecutor, device: str) -> Iterator[str]:
    """Runs all cases in all their ways, and returns the lines of the table as they come."""
    futures: dict[tuple[str, str], Future[dict[str, Any]]] = {
        (name, way): pool.submit(outcome, case, way, device) for name, case in cases.items() for way in case.ways
    }
    return (
        line
        for name, case in cases.items()
        for line in rows(name, case, {way: futures[name, way].result() for way in case.ways})
    )


def started(folder: str, arguments: list[str], device: str) -> subprocess.Popen[bytes]:
    """Starts the run in a folder, or goes on with it. What it says is in the file ``said`` there."""
    command = [sys.executable, PROGRAM, *KILLED, f"engine.device={device}", f"run.output={folder}", *arguments]
    with (Path(folder) / "said").open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)


def sha_of(folder: Path) -> str | None:
    path = folder / "run" / "summary.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found["model_sha256"] if found.get("status") == "completed" else None


def rounds_in(folder: Path) -> int:
    """Returns how many rounds of a run are written down."""
    path = folder / "run" / "metrics.csv"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.is_file() else 0


def killed(way: str, device: str) -> str:
    """Returns the line of a run that is killed with SIGKILL in its middle, and gone on with, beside a calm one."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as calm, tempfile.TemporaryDirectory() as broken:
        keys = [*KILL_WAYS[way]]
        if device == "cuda" and way != "local":
            keys.append("engine.actors_per_gpu=4")
        started(calm, keys, device).wait()
        victim = started(broken, keys, device)
        while victim.poll() is None and rounds_in(Path(broken)) < 10:
            time.sleep(0.01)
        victim.kill()
        victim.wait()
        written, ended = rounds_in(Path(broken)), sha_of(Path(broken))
        # another way goes on with it than the one that began
        started(broken, KILL_WAYS["local"], device).wait()
        shas = sha_of(Path(calm)), sha_of(Path(broken))
        said = (Path(calm if shas[0] is None else broken) / "said").read_text().strip().splitlines() or [""]
    good = shas[0] is not None and shas[0] == shas[1] and written > 0 and ended is None
    note = f"killed after {written} of 24 rounds" if shas[0] and shas[1] else said[-1]
    return f"| kill, {way} | {str(shas[0])[:12]} | {verdict(good)} | {note} | {time.perf_counter() - began:.0f} |"


def grown(name: str, device: str, rounds: int) -> str:
    """Returns the line of a run of many rounds: the memory of the GPU after round 20 and at the end."""
    import torch

    from fedray import simulate

    found: list[tuple[int, int]] = []

    def look(report: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
            found.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))

    began = time.perf_counter()
    case = Case(MEMORY[name], COLOUR if "ghbm" in name else GREY)
    x, y, owner = case.data()
    keys = {**case.common, **case.settings, "engine.kind": "local", "engine.device": device, "run.rounds": rounds}
    with tempfile.TemporaryDirectory() as folder:
        simulate({**keys, "run.output": folder}, data=(x, y, owner), test=(x, y), callbacks=[look])
    seconds = f"{time.perf_counter() - began:.0f}"
    if not found:
        return f"| memory, {name}, {rounds} rounds | - | no GPU | | {seconds} |"
    (early, early_reserved), (late, late_reserved) = found[min(EARLY, rounds) - 1], found[-1]
    same = verdict(late <= early and late_reserved <= early_reserved)
    used = f"{early:,} and {late:,} bytes, reserved {early_reserved >> 20:,} and {late_reserved >> 20:,} MiB"
    return f"| memory, {name}, {rounds} rounds | - | {same} | {used} | {seconds} |"


def left_behind(device: str, before: int) -> str:
    """Returns the line of the GPU memory that ended and killed processes still hold, after 20 seconds at most."""
    if device != "cuda":
        return "| memory left behind | - | no GPU | | |"
    until = time.monotonic() + 20
    while (taken := before - free_memory()) > 64 << 20 and time.monotonic() < until:
        time.sleep(0.5)
    return f"| memory left behind | - | {verdict(taken <= 64 << 20)} | {taken >> 20:,} MiB | |"


def free_memory() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


def lines(args: argparse.Namespace) -> Iterator[str]:
    """Yields the lines of the table as they come."""
    from fedray.models import MODELS

    before = free_memory() if args.device == "cuda" else 0
    context = multiprocessing.get_context("spawn")
    cases: dict[str, Case] = {}
    if "models" in args.only:
        cases |= model_cases(args.models or list(MODELS))
    if "algorithms" in args.only:
        cases |= {name: case for name, case in algorithm_cases().items() if not args.cases or name in args.cases}
    cases = {name: replace(case, ways=tuple(w for w in case.ways if w in args.ways)) for name, case in cases.items()}
    with ProcessPoolExecutor(args.jobs, context) as pool, ThreadPoolExecutor(2) as beside:
        kills = [beside.submit(killed, way, args.device) for way in KILL_WAYS if "kill" in args.only]
        growth = [pool.submit(grown, name, args.device, args.rounds) for name in MEMORY if "memory" in args.only]
        comparisons = compared(cases, pool, args.device)
        for future in [*kills, *growth]:
            error = future.exception()
            yield f"| {type(error).__name__}: {error} | - | NOT THE SAME | | |" if error else future.result()
        yield from comparisons
    if kills:
        yield left_behind(args.device, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS), help="parts, between commas")
    parser.add_argument("--models", type=lambda text: text.split(","), help="models, between commas; all unless given")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--cases", nargs="+", choices=list(algorithm_cases()), help="of part algorithms")
    parser.add_argument("--rounds", type=int, default=200, help="of the runs whose memory is watched")
    parser.add_argument("--jobs", type=int, default=4, help="processes that make runs side by side")
    args = parser.parse_args()
    if wrong := set(args.only) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(wrong))} is none of {', '.join(PARTS)}")
    began, found = time.perf_counter(), []
    print("| case | sha256 | in all ways | bits promised | seconds of each way |\n| --- | --- | --- | --- | --- |")
    for line in lines(args):
        print(line, flush=True)
        found.append(line)
    failed = sum("NOT THE SAME" in line for line in found)
    print(f"{len(found)} lines, {failed} not the same, {time.perf_counter() - began:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
