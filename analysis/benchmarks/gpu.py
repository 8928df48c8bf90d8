"""fedray on one GPU beside FedAvg by hand: the table of client-steps per second, and what large runs take.

    python analysis/benchmarks/gpu.py [--only lenet5,cnn] [--precisions fp32,bf16] [--out FOLDER]
    python analysis/benchmarks/gpu.py --device cpu --quick      # tries everything with tiny sizes

Each part is a process of its own, which is ended if it takes too long; what it has found until then counts. The rounds
of fedray and the samples of the ways by hand take turns, all with deterministic kernels. A row is a median, with the
least and the most in the file gpu.json, which is written after each part, as are the tables in gpu.md. They are printed
last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import machine, versions
from gpu_parts import PARTS, Options, Row
from gpu_work import PRECISIONS, WORKS, shown

GRACE = 30.0
"""Seconds after its time in which a part may still end by itself."""

MOST_CHARACTERS = 12_000


def measured(name: str, seconds: float) -> list[Row]:
    """Runs one part in a process of its own, and returns its rows."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        asked = ["--part", name, "--rows", str(rows), "--seconds", str(seconds)]
        command = [sys.executable, __file__, *sys.argv[1:], *asked]
        began = time.perf_counter()
        # cuBLAS needs it to be deterministic, and reads it when a process first uses it
        variables = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        process = subprocess.Popen(command, env=variables, start_new_session=True)
        note = ended(process, seconds + GRACE)
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    if note:
        found.append({"error": note})
    print(f"{name}: {len(found)} rows in {time.perf_counter() - began:.0f} s", flush=True)
    return [{"part": name, **row} for row in found]


def ended(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Waits until a process has ended, and ends it if that takes too long. Returns what went wrong, or None."""
    try:
        code = process.wait(seconds)
        return f"the part ended with exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        # so that Ray's processes end too
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE / 2)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "the part took too long, and was ended"


def part(args: argparse.Namespace) -> None:
    """Runs one part in this process, and writes each of its rows as it comes."""
    options = Options(args.device, args.precisions, args.actors, args.actor_precisions, args.quick, float(args.seconds))
    with args.rows.open("a") as file:
        for row in PARTS[args.part][0](options):
            file.write(json.dumps(row) + "\n")
            file.flush()


def of_table(rows: Sequence[Row]) -> list[str]:
    """Returns the table of client-steps per second, a line for each workload and precision."""
    ways = list(dict.fromkeys(row["way"].replace("8 streams", "streams") for row in rows if "way" in row))
    ways = [way for way in ways if way != "by hand"]
    lines = head("client-steps/s", "precision", *ways, "fedray / best by hand", "of peak", "peak TFLOP/s", "fedray has")
    for name, precision in dict.fromkeys((row["workload"], row["precision"]) for row in rows if "way" in row):
        of = {
            row["way"].replace("8 streams", "streams"): row
            for row in rows
            if (row.get("workload"), row.get("precision")) == (name, precision)
        }
        cells = [shown(of[way]["median"]) if "median" in of.get(way, {}) else mark(of.get(way)) for way in ways]
        ours = of.get("fedray", {})
        hand = [row["median"] for way, row in of.items() if not way.startswith("fedray") and "median" in row]
        ratio = f"{ours['median'] / max(hand):.2f}" if "median" in ours and hand else "-"
        peak = f"{100 * ours['of_peak']:.1f} %" if "of_peak" in ours else "-"
        most = shown(next(iter(of.values()))["peak_tflops"])
        lines.append(line(name, precision, *cells, ratio, peak, most, how(ours)))
    return lines


def how(row: Row) -> str:
    """Returns how fedray trained clients, as config.yaml says it."""
    if "vectorize" not in row:
        return "-"
    text = f"stacks of {row['chunk']}" if row["vectorize"] else f"lanes={row.get('lanes')}"
    return text + (", channels last" if row.get("channels_last") else "")


def of_others(name: str, rows: Sequence[Row]) -> list[str]:
    """Returns the table of another part, with a column for each number of its rows."""
    left_out = {"part", "sha256", "bits_promised", "vectorize", "chunk", "lanes", "channels_last", "error"}
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in left_out))
    lines = head(*[column.replace("workload", name) for column in columns], "fedray has")
    for row in rows:
        cells = [row.get(column, "-") for column in columns]
        texts = [shown(cell) if type(cell) in (int, float) else str(cell) for cell in cells]
        lines.append(line(*texts, mark(row) if "error" in row else how(row)))
    return lines


def mark(row: Row | None) -> str:
    return "-" if row is None else "failed"


def head(*columns: str) -> list[str]:
    return [line(*columns), line(*["---"] * len(columns))]


def line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def report(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """Returns everything as Markdown."""
    text = [
        f"{about['card']}, torch {about['versions'].get('torch')}, fedray {about['versions']['fedray']}, "
        f"{about['machine']['cores']} CPUs, {about['seconds']:.0f} s; deterministic kernels",
        "",
    ]
    of_works = [row for row in rows if row["part"] in WORKS]
    if of_works:
        text += [*of_table(of_works), ""]
    for name in dict.fromkeys(row["part"] for row in rows if row["part"] not in WORKS):
        text += [*of_others(name, [row for row in rows if row["part"] == name]), ""]
    for row in rows:
        if "error" in row:
            which = [row.get(key, "") for key in ("part", "precision", "way" if "way" in row else "workload")]
            text.append(f"- {' '.join(filter(None, which))}: {row['error']}")
    return "\n".join(text)


def card(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def names(choices: Sequence[str]) -> Any:
    """Returns a function that reads names between commas, which must be among the choices."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        wrong = [name for name in found if name not in choices]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]} is none of {', '.join(choices)}")
        return found

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", type=names(list(PARTS)), default=list(PARTS), help="parts, between commas")
    parser.add_argument("--precisions", type=names(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--actors", type=int, default=4, help="client actors that share the card; 0: none")
    parser.add_argument("--actor-precisions", type=names(PRECISIONS), default=["fp32"], help="those that actors have")
    parser.add_argument("--minutes", type=float, default=7.5, help="for everything")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md")
    parser.add_argument("--quick", action="store_true", help="try everything with tiny sizes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.actor_precisions = args.actor_precisions if args.actors else []
    if args.part:
        part(args)
        return
    began = time.perf_counter()
    about: dict[str, Any] = {"card": card(args.device), "machine": machine(), "versions": versions()}
    rows: list[Row] = []
    for name in args.only:
        left = began + 60 * args.minutes - time.perf_counter()
        if left < 10:
            rows.append({"part": name, "error": "no time was left"})
        else:
            rows += measured(name, min(PARTS[name][1], left))
        about["seconds"] = time.perf_counter() - began
        if args.out:
            # after each part, because a lent machine may be gone before the last one
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "gpu.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
            (args.out / "gpu.md").write_text(report(rows, about) + "\n")
    print(report(rows, about)[:MOST_CHARACTERS])


if __name__ == "__main__":
    main()
