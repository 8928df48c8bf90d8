"""What a fault of a cluster costs a run: on three hosts of their own, at random moments, against undisturbed runs.

    python analysis/cluster_faults.py OUTPUT                              # each event ten times: some hours
    python analysis/cluster_faults.py OUTPUT --times 1 --only "cut 20 s"

The hosts are what the script in $FEDRAY_TEST_HOSTS makes (`up N`, `ssh I COMMAND`, `cut I`, `mend I`, `down`); the
program in $FEDRAY_DELAY_WIRE delays and loses what goes to one of them. $FEDRAY_TEST_NETWORK and
$FEDRAY_TEST_NAMESPACE say what the hosts are called, so that several such programs can work at once. Takes root and
fedray's `test` extra. One row for each run is added to OUTPUT/faults.csv at once, and the same command goes on where it
was stopped. OUTPUT/faults.md sums them up: whether the bits are those of the undisturbed run, how many seconds a run
took longer (less those of the event itself), for how long no line was printed, and what was left. The faults.csv of
several clusters can be put together: with `--times 0` faults.md is made of what is there.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from faults.cluster import NETWORK, VICTIM, Hosts, ObjectStorage
from faults.events import EVENTS, Event
from faults.runs import Run

from fedray.algorithms import find_algorithm
from fedray.cli.main import Parser, exit_code
from fedray.errors import UserError, near_miss

OUTPUT_DISK = 256 << 20
"""The bytes of the disk for what a run writes."""

WORDS = ("no answer", "died", "lost", "are left", "failed", "status ", "error", "Error")
"""What the line has that tells of the event."""


@dataclass(frozen=True)
class Outcome:
    """One run: what happened to it and what it took. ``seconds`` are counted from the end of the first round, because
    starting takes more or less long anyway, and ``event_seconds`` are those of the event itself. Runs are compared with
    the undisturbed ones of their ``cluster`` and algorithm."""

    event: str
    algorithm: str
    code: int
    sha256: str
    seconds: float
    event_seconds: float
    longest_silence: float
    status: str
    left: str
    line: str
    cluster: str = NETWORK

    @property
    def ended(self) -> bool:
        """Whether the run reached its end."""
        return self.code == 0 and self.status == "completed"


def outcome(name: str, event: Event, algorithm: str, hosts: Hosts, output: Path, number: int) -> Outcome:
    """Makes a run to which ``event`` happens at a random moment."""
    hosts.make_nodes(dict(event.nodes))
    folder = hosts.folder / "cache-of-1" if event.output else output / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    where = f"{event.output}-{algorithm}-{number}" if event.output else str(folder)
    run = Run(hosts, folder, where, [f"algorithm.name={algorithm}"])
    run.wait_for_round(random.randint(5, 18))
    time.sleep(random.uniform(0, 1))
    spent = event.happen(hosts, run)
    code = run.wait()
    hosts("mend", str(VICTIM))
    if not event.nodes_stay:
        hosts.nodes = {}
    summary = run.summary()
    (output / "lines" / f"{algorithm}-{name.replace(' ', '-')}-{number}.txt").write_text(
        "\n".join(f"{at:7.1f} {line}" for at, line in run.lines) + "\n"
    )
    said = [line for _, line in run.lines if any(word in line for word in WORDS)]
    return Outcome(
        name, algorithm, code, str(summary.get("model_sha256", "")), round(run.seconds - run.first_round(), 1),
        round(spent, 1),
        round(run.longest_silence(), 1), str(summary.get("status", "")), hosts.left(), (said or [""])[0][:300],
    )  # fmt: skip


def read(path: Path) -> list[Outcome]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        kinds = {"code": int, "seconds": float, "event_seconds": float, "longest_silence": float}
        found = csv.DictReader(file)
        if lacking := {field.name for field in fields(Outcome)} - {*(found.fieldnames or ())}:
            raise UserError(f"{path} is of another version, without {', '.join(sorted(lacking))}: give another OUTPUT")
        return [Outcome(**{key: kinds.get(key, str)(text) for key, text in row.items()}) for row in found]


def add(path: Path, row: Outcome) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Outcome)])
        if is_new:
            writer.writeheader()
        writer.writerow(asdict(row))


def calm_runs(row: Outcome, rows: list[Outcome]) -> list[Outcome]:
    """Returns the undisturbed runs, of those that reached their end, with which ``row`` is compared."""
    same = [each for each in rows if (each.cluster, each.algorithm) == (row.cluster, row.algorithm)]
    return [each for each in same if each.event == "calm" and each.ended]


def table(rows: list[Outcome]) -> str:
    """Returns the sums of ``rows`` in Markdown. What a run lost is by how much it took longer than the median of the
    undisturbed runs; it is counted of the runs that reached their end."""
    columns = ["event", "runs", "same bits", "seconds lost: least, median, most", "over 20 s", "longest silence, s"]
    lines = [f"| {' | '.join([*columns, 'something left'])} |", f"|{' --- |' * 7}"]
    for name in (name for name in EVENTS if any(row.event == name for row in rows)):
        these = [row for row in rows if row.event == name]
        pairs = [(row, calm) for row in these if row.ended and (calm := calm_runs(row, rows))]
        same = sum(row.sha256 == calm[0].sha256 for row, calm in pairs)
        lost = [row.seconds - row.event_seconds - median([each.seconds for each in calm]) for row, calm in pairs]
        shown = ", ".join(str(round(part(lost))) for part in (min, median, max)) if lost else ""
        cells = [
            "undisturbed" if name == "calm" else name, len(these), same, shown, sum(each > 20 for each in lost),
            round(max(row.longest_silence for row in these)), sum(bool(row.left) for row in these),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Makes the runs that the arguments of the command line ask for, and returns the exit code."""
    return exit_code(lambda: _measure(arguments))


def _measure(arguments: Sequence[str]) -> int:
    parser = Parser(prog="cluster_faults.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", nargs="+", metavar="EVENT", default=list(EVENTS)[1:])
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "scaffold"])
    options = parser.parse_args(arguments)
    for name in options.only:
        if name not in EVENTS:
            raise UserError(f"--only: there is no event {name!r}{near_miss(name, EVENTS)}")
    for name in options.algorithms:
        find_algorithm(name)
    if options.times > 0:
        _make(options)
    path = options.output / "faults.csv"
    if not path.exists():
        raise UserError(f"there is no {path}")
    text = table(read(path))
    (options.output / "faults.md").write_text(text)
    print(text)
    return 0


def _make(options: argparse.Namespace) -> None:
    """Makes the runs that faults.csv lacks."""
    if "FEDRAY_TEST_HOSTS" not in os.environ:
        raise UserError("FEDRAY_TEST_HOSTS is not set: it names the script that makes the hosts")
    output, path = options.output.absolute(), options.output / "faults.csv"
    (output / "lines").mkdir(parents=True, exist_ok=True)
    (output / "run").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "-l", output / "run"], check=False)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={OUTPUT_DISK}", "tmpfs", output / "run"], check=True)
        hosts = Hosts(output)
        stack.callback(hosts.down)
        hosts.storage = ObjectStorage()
        stack.callback(hosts.storage.close)
        for number, algorithm in itertools.product(range(options.times), options.algorithms):
            for name in dict.fromkeys(["calm", *options.only]):
                if sum((row.event, row.algorithm) == (name, algorithm) for row in read(path)) <= number:
                    add(path, outcome(name, EVENTS[name], algorithm, hosts, output, number))
                    (output / "faults.md").write_text(table(read(path)))
                    print(read(path)[-1], flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
