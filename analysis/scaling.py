"""Measures how rounds per second, bytes and memory grow with clients, cohorts, actors, hosts and models, and fits a
model of a round's time to it, which is then carried on to 100 nodes.

python analysis/scaling.py OUTPUT --quick
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fedray.cli.main import Parser, exit_code
from fedray.errors import UserError

# what the benchmarks share is in their folder
sys.path.append(str(Path(__file__).parent / "benchmarks"))

DESCRIPTION = """\
Measure how rounds per second, bytes and memory grow with the registered
clients, the cohort, the actors, the hosts and the model, fit a model of a
round's time to it, check the model, and carry it on to 100 nodes.

Each point is a run of its own in a fresh process. What was measured is added to
OUTPUT/points.jsonl after each point, and the same command goes on where it was
stopped. At the end OUTPUT/scaling.md has the tables, beside the pictures. The
data are made up; nothing else should run on the machine meanwhile."""

HOSTS = """\
The hosts are reached by ssh without a password. They have this Python and this
checkout at the same paths, and run no other Ray. The first one is the head of
the cluster: with real machines it should be this one, which alone measures the
points of one host."""

SECONDS = {False: 5.0, True: 1.5}
"""The seconds of the rounds of each point that count, of the whole grid and of the quick one."""

LIMIT = 900.0
"""The seconds after which a point is given up."""


def main(arguments: Sequence[str]) -> int:
    """Makes what the arguments of the command line ask for, and returns the exit code."""
    return exit_code(lambda: _command(arguments))


def _parser() -> Parser:
    parser = Parser(prog="scaling.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="folder for what is measured")
    parser.add_argument("--quick", action="store_true", help="a few points, in less than five minutes, to try it")
    parser.add_argument("--turns", type=int, default=1, metavar="K", help="measure each point K times; once by default")
    parser.add_argument("--report", action="store_true", help="measure nothing, only make the tables and pictures")
    parser.add_argument("--only", default="", metavar="TEXT", help="only points that --list shows with TEXT")
    parser.add_argument("--list", action="store_true", help="list the points and say how long they take about")
    hosts = parser.add_argument_group("several hosts", HOSTS)
    hosts.add_argument("--hosts", nargs="+", default=[], metavar="HOST", help="such as root@10.77.0.11")
    hosts.add_argument("--ssh", default="ssh", metavar="COMMAND", help="ssh with its options, as one word")
    projection = parser.add_argument_group("the projection to 100 nodes")
    processors = "processors of a node; as many as this machine has by default"
    projection.add_argument("--node-processors", type=int, metavar="K", help=processors)
    projection.add_argument("--gbit", type=float, default=10.0, metavar="G", help="the network in Gb/s; 10 by default")
    return parser


def _command(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--measure"]:
        # the process of one point, started by this program
        from round_time.measuring import main as measure

        measure(arguments[1])
        return 0
    options = _parser().parse_args(arguments)
    for name in ("turns", "node_processors"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {number}")
    if options.gbit <= 0:
        raise UserError(f"--gbit must be more than 0, not {options.gbit:g}")
    from round_time.points import expected_minutes, grid
    from round_time.records import Records

    points = grid(options.quick, max(1, len(options.hosts)), _has_gpu(), options.turns)
    points = [point for point in points if options.only in str(point)]
    if not points:
        raise UserError(f"--only {options.only!r}: no point's name has this in it; --list shows all")
    options.output.mkdir(parents=True, exist_ok=True)
    records = Records(options.output / "points.jsonl", print)
    missing = [] if options.report else records.missing(points)
    minutes = expected_minutes(missing, SECONDS[options.quick])
    print(f"{len(points)} points, {len(missing)} to measure, about {minutes:.0f} minutes on two processors", flush=True)
    if options.list:
        print("\n".join(f"{'' if point in missing else 'done: '}{point}" for point in points))
        return 0
    failures = _measure_all(missing, records, options)
    if not records.rows:
        raise UserError(f"{records.path} has no points yet")
    from round_time.report import write

    paths = write(records.rows, options.output, options.node_processors, options.gbit)
    print(f"wrote {', '.join(map(str, paths))}")
    if failures:
        print(f"{failures} points could not be measured; the same command tries again")
    return 1 if failures else 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _measure_all(missing: Sequence[Any], records: Any, options: argparse.Namespace) -> int:
    """Measures the points that are ``missing``, and returns how many could not be measured."""
    from common import machine, versions
    from round_time.hosts import Hosts

    about = {"machine": machine(), "versions": versions()}
    hosts = Hosts(options.hosts, shlex.split(options.ssh))
    failures = place = 0
    for count, points in groupby(sorted(missing, key=lambda point: point.hosts), lambda point: point.hosts):
        with hosts.cluster(count) if count > 1 else contextlib.nullcontext():
            for point in points:
                place += 1
                began = time.monotonic()
                row, reason = _measured(point, SECONDS[options.quick], hosts)
                failures += row is None
                if row is not None:
                    records.add({**row, **about})
                    reason = f"{row['seconds']:.4f} s a round"
                took = time.monotonic() - began
                print(f"{place} of {len(missing)}: {point}: {reason} ({took:.0f} s)", flush=True)
    return failures


def _measured(point: Any, seconds: float, hosts: Any) -> tuple[dict[str, Any] | None, str]:
    """Measures a point in a fresh process, on the cluster's head if it needs several hosts. Returns what was measured,
    or None and the reason why it was not."""
    spec = {"point": vars(point), "seconds": seconds, "address": hosts.head if point.hosts > 1 else "local"}
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", json.dumps(spec)]
    try:
        if point.hosts > 1:
            done = hosts.run(command, LIMIT)
        else:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return None, f"it took more than {LIMIT:g} s, and was given up"
    if done.returncode:
        return None, f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return json.loads(done.stdout.splitlines()[-1]), ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
