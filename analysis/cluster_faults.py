"""What a fault of a cluster costs a run: on three hosts of their own, at random moments, against undisturbed runs.

    python analysis/cluster_faults.py OUTPUT                              # each event ten times: some hours
    python analysis/cluster_faults.py OUTPUT --times 1 --only "cut 20 s"

The hosts are what the script in $FEDRAY_TEST_HOSTS makes (`up N`, `ssh I COMMAND`, `cut I`, `mend I`, `down`); the
program in $FEDRAY_DELAY_WIRE delays and loses what goes to one of them. $FEDRAY_TEST_NETWORK and
$FEDRAY_TEST_NAMESPACE say what the hosts are called, so that several such programs can work at once. Takes root and
fedray's `test` extra. One row for each run is added to OUTPUT/faults.csv at once, and the same command goes on where it
was stopped. OUTPUT/faults.md sums them up: whether the bits are those of the undisturbed run, how many seconds a run
took longer (less those of the event itself), for how long no line was printed, and what was left.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import random
import shutil
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from faults.cluster import VICTIM, Hosts, ObjectStorage
from faults.events import Event, events
from faults.runs import Run

OUTPUT_DISK = 256 << 20
"""The bytes of the disk for what a run writes."""

WORDS = ("no answer", "died", "lost", "are left", "failed", "status ", "error", "Error")
"""What the line has that tells of the event."""


@dataclass(frozen=True)
class Outcome:
    """One run: what happened to it and what it took. ``seconds`` are counted from the end of the first round, because
    starting takes more or less long anyway, and ``event_seconds`` are those of the event itself."""

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
        name, algorithm, code, str(summary.get("model_sha256")), round(run.seconds - run.first_round(), 1),
        round(spent, 1),
        round(run.longest_silence(), 1), str(summary.get("status")), hosts.left(), (said or [""])[0][:300],
    )  # fmt: skip


def read(path: Path) -> list[Outcome]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        kinds = {"code": int, "seconds": float, "event_seconds": float, "longest_silence": float}
        return [
            Outcome(**{key: kinds.get(key, str)(text) for key, text in row.items()}) for row in csv.DictReader(file)
        ]


def add(path: Path, row: Outcome) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Outcome)])
        if is_new:
            writer.writeheader()
        writer.writerow(asdict(row))


def table(rows: list[Outcome]) -> str:
    """Returns the sums of ``rows`` in Markdown. Undisturbed is the median of the undisturbed runs."""
    lines = ["| event | runs | same bits | seconds lost: median, most | longest silence | left over |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, algorithm in dict.fromkeys((row.event, row.algorithm) for row in rows):
        these = [row for row in rows if (row.event, row.algorithm) == (name, algorithm)]
        calm = [row for row in rows if (row.event, row.algorithm) == ("calm", algorithm)]
        usual = statistics.median(row.seconds for row in calm)
        lost = [row.seconds - row.event_seconds - usual for row in these]
        silence = max(row.longest_silence for row in these)
        left = "; ".join(sorted({row.left for row in these if row.left})) or "nothing"
        same = sum(row.sha256 == calm[0].sha256 for row in these)
        lines.append(
            f"| {name}, {algorithm} | {len(these)} | {same} | {statistics.median(lost):.0f}, {max(lost):.0f} | "
            f"{silence:.0f} | {left} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", nargs="+", metavar="EVENT")
    parser.add_argument("--algorithms", nargs="+", default=["fedavg", "scaffold"])
    options = parser.parse_args()
    output, path = options.output.absolute(), options.output / "faults.csv"
    (output / "lines").mkdir(parents=True, exist_ok=True)
    (output / "run").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "-l", output / "run"], check=False)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={OUTPUT_DISK}", "tmpfs", output / "run"], check=True)
        hosts = Hosts(output)
        stack.callback(hosts.down)
        storage = ObjectStorage()
        stack.callback(storage.close)
        there = events(storage)
        for number, algorithm in itertools.product(range(options.times), options.algorithms):
            for name in ["calm", *(options.only or list(there)[1:])]:
                if sum((row.event, row.algorithm) == (name, algorithm) for row in read(path)) <= number:
                    add(path, outcome(name, there[name], algorithm, hosts, output, number))
                    (output / "faults.md").write_text(table(read(path)))
                    print(read(path)[-1], flush=True)
    print(table(read(path)))


if __name__ == "__main__":
    main()
