"""fedray against other simulators and a plain loop: seconds per round (rounds), start and memory (start).

python analysis/benchmarks/compare.py --workload A --python flower=PYTHON --python pfl=PYTHON
python analysis/benchmarks/compare.py --workload C --against plain pfl2 flower-m
python analysis/benchmarks/compare.py --workload B --subject compiled --against fedray plain plain-compiled
python analysis/benchmarks/compare.py --part start --workload A

Each system runs in processes of its own (``rivals/*_rounds.py``) and makes rounds when it is told so, in turn with the
others; meanwhile they are stopped (SIGSTOP), all but the subject. PYTHON is the interpreter of a virtual environment
with ``rivals/requirements-*.txt``; also taken from $FLOWER_PYTHON and $PFL_PYTHON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ALLOCATOR, QUIET, ProcessTree, Results, Usage, median_ratio, patient
from gate import workload
from workloads import WORKLOADS

HERE = Path(__file__).parent
SAMPLE_SECONDS = 0.5  # CPU accounting has a resolution of 10 ms
SETTLE_SECONDS = 0.3  # what waited while a system was stopped is done with before its sample
ANSWER_SECONDS = 600  # a system that says nothing for so long is taken for hung


@dataclass(frozen=True)
class System:
    """How a system is started: with whose Python, which script of ``rivals``, and in what environment."""

    python: str
    script: str
    environment: dict[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()
    most_clients: float = math.inf


def fedray(**engine: Any) -> System:
    """fedray with some keys of its section engine."""
    return System("fedray", "fedray_rounds.py", {"ENGINE": json.dumps(engine)})


# its own Ray, not one that happens to run here, and client actors at no lower priority than anything else
FLOWER = {"RAY_ADDRESS": "local", "RAY_worker_niceness": "0", "FLWR_TELEMETRY_ENABLED": "0"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")

SYSTEMS = {
    "fedray": fedray(compile=False),
    "compiled": fedray(compile=True),
    "one-actor": fedray(compile=False, actors=1),
    "loop": fedray(compile=False, vectorize=False),
    "loop-compiled": fedray(compile=True, vectorize=False),
    "stacks": fedray(compile=False, vectorize=True),
    "stacks-compiled": fedray(compile=True, vectorize=True),
    "before": System("before", "fedray_rounds.py", {"ENGINE": json.dumps({"compile": False})}),
    "plain": System("fedray", "plain_rounds.py"),
    "plain-channels-last": System("fedray", "plain_rounds.py", {"LAYOUT": "channels_last"}),
    "plain-compiled": System("fedray", "plain_rounds.py", {"COMPILE": "true"}),
    "flower": System("flower", "flower_rounds.py", FLOWER, most_clients=10_000),
    "flower-m": System("flower", "flower_rounds.py", FLOWER | ALLOCATOR, most_clients=10_000),
    "pfl1": System("pfl", "pfl_rounds.py", ALLOCATOR),
    "pfl2": System("pfl", "pfl_rounds.py", ALLOCATOR, TORCHRUN),
}


class Running:
    """A system at work: launched at once, ``ready()`` after its first round, then ``rounds(n)`` as often as wanted.

    ``stopped``: whether it is stopped while it is not its turn."""

    def __init__(self, name: str, python: str, workload_name: str, clients: int, folder: Path, stopped: bool) -> None:
        self.name, self.system, self.stopped = name, SYSTEMS[name], stopped
        self.work = workload(workload_name, clients)
        self.made = 1
        self.log = folder / f"{name}.log"
        address = str(folder / f"{name}.socket")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen()
        script = str(HERE / "rivals" / self.system.script)
        command = [python, *self.system.launcher, script, workload_name, str(clients), address]
        self.began = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=self._environment(),
                # Ray's workers import from the driver's folder first, which may be a checkout of another version
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # a stopped process gets a hangup from the kernel if the shell that started this session goes away
                start_new_session=True,
            )
        self.tree = ProcessTree(self.process.pid)

    def _environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "RAY_"))}
        own = [os.environ["PYTHONPATH"]] if self.system.python == "fedray" and "PYTHONPATH" in os.environ else []
        paths = {"PYTHONPATH": os.pathsep.join([str(HERE), *own])}
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return inherited | paths | threads | self.system.environment

    def ready(self) -> float:
        """Wait for the end of the first round; seconds since the launch."""
        self.listener.settimeout(1)
        while True:
            with contextlib.suppress(TimeoutError):
                connection, _ = self.listener.accept()
                break
            if self.process.poll() is not None or time.perf_counter() > self.began + ANSWER_SECONDS:
                self._fail()
        connection.settimeout(ANSWER_SECONDS)
        self.file = connection.makefile("rw")
        self._hear("seconds")
        return time.perf_counter() - self.began

    def rounds(self, count: int) -> float:
        """Mean seconds of ``count`` rounds, by the system's own clock."""
        self.made += count
        self._say(count)
        return self._hear("seconds") / count

    def leave(self) -> dict[str, str]:
        """End it, and check that it has made the steps that its rounds ask for; its versions."""
        self._say(0)
        steps, versions = self._hear("steps", "versions")
        expected = self.made * self.work.cohort * self.work.steps
        if steps != expected:
            raise SystemExit(f"{self.name}: {steps} steps in {self.made} rounds, which ask for {expected}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        return versions

    def stop(self) -> None:
        if self.stopped:
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self.stopped:
            self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Whatever is left of it."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.listener.close()

    def pids(self) -> list[int]:
        return list(self.tree.scan())

    def _signal(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _say(self, count: int) -> None:
        try:
            self.file.write(f"{count}\n")
            self.file.flush()
        except BrokenPipeError:
            self._fail()

    def _hear(self, *keys: str) -> Any:
        try:
            line = self.file.readline()
        except TimeoutError:
            line = ""
        if not line:
            self._fail()
        values = [json.loads(line)[key] for key in keys]
        return values[0] if len(keys) == 1 else values

    def _fail(self) -> None:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{self.name} gives no answer; the end of what it printed:\n{tail}")


@contextlib.contextmanager
def running(name: str, args: argparse.Namespace, clients: int) -> Iterator[Running]:
    with tempfile.TemporaryDirectory() as folder:
        python = args.pythons[SYSTEMS[name].python]
        system = Running(name, python, args.workload, clients, Path(folder), stopped=name != args.subject)
        try:
            yield system
        finally:
            system.kill()


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """The systems in this turn's order: each is first as often as the others, and half of the turns go backwards."""
    shift = turn // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if turn % 2 else order


def taking_part(args: argparse.Namespace, clients: int) -> list[str]:
    """The subject, and after it the systems with which it is compared."""
    rivals = [name for name in args.against if name != args.subject and clients <= SYSTEMS[name].most_clients]
    return [args.subject, *rivals]


def idle(system: Running, seconds: float = 2.0) -> float:
    """Cores that a waiting system uses."""
    usage = Usage(system.tree)
    time.sleep(seconds)
    return usage.stop()["own"]


def sample(system: Running, rounds: int, tree: ProcessTree) -> dict[str, Any]:
    system.go_on()
    time.sleep(SETTLE_SECONDS)
    usage = Usage(tree)
    seconds = system.rounds(rounds)
    used = usage.stop(apart=system.pids())
    system.stop()
    return {"rounds": rounds, "seconds": seconds, **used, "kept": used["foreign"] <= QUIET}


def compare(args: argparse.Namespace, clients: int, results: Results, minutes: float) -> dict[str, Any]:
    """Rounds of all systems in turn, for one number of registered clients."""
    names = taking_part(args, clients)
    subject, *rivals = names
    tree = ProcessTree()
    turns: list[dict[str, dict[str, Any]]] = []

    def kept(rival: str) -> list[dict[str, dict[str, Any]]]:
        return [turn for turn in turns if turn[subject]["kept"] and turn[rival]["kept"]]

    with contextlib.ExitStack() as stack:
        systems: dict[str, Running] = {}
        facts: dict[str, dict[str, Any]] = {}
        for name in names:
            systems[name] = system = stack.enter_context(running(name, args, clients))
            print(f"N={clients}: {name} has made its first round after {system.ready():.1f} s", flush=True)
            facts[name] = {"idle_cores": idle(system)}
            system.stop()
        rounds = dict.fromkeys(names, 1)
        more = patient(args.pairs, minutes)
        index = -args.warmup
        while index < 0 or more(min((len(kept(rival)) for rival in rivals), default=len(turns))):
            taken = {}
            for place, name in enumerate(in_turn(names, index)):
                taken[name] = sample(systems[name], rounds[name], tree)
                results.row(clients=clients, turn=index, system=name, place=place, **taken[name])
                if index < 0:
                    rounds[name] = max(1, math.ceil(SAMPLE_SECONDS / taken[name]["seconds"]))
            if index >= 0:
                turns.append(taken)
            figures = ", ".join(f"{name} {taken[name]['seconds']:.4f}" for name in names)
            print(f"N={clients} turn {index:3d}: {figures}", flush=True)
            index += 1
        for name, system in systems.items():
            system.go_on()
            facts[name]["versions"] = system.leave()

    summary: dict[str, Any] = {"clients": clients, "turns": len(turns), "systems": {}}
    for name in names:
        good = [turn[name] for turn in turns if turn[name]["kept"]]
        summary["systems"][name] = {
            "rounds_per_sample": rounds[name],
            "kept": len(good),
            "dropped": len(turns) - len(good),
            "seconds": statistics.median(s["seconds"] for s in good) if good else None,
            "cores_of_the_rest": statistics.median(s["rest"] for s in good) if good else None,
            "foreign_cores": statistics.median(s["foreign"] for s in good) if good else None,
            **facts[name],
        }
    for rival in rivals:
        pairs = kept(rival)
        ours, theirs = ([turn[name]["seconds"] for turn in pairs] for name in (subject, rival))
        summary["systems"][rival] |= {
            "pairs": len(pairs),
            f"{subject}_over_it": median_ratio(ours, theirs) if pairs else None,
            f"it_over_{subject}": median_ratio(theirs, ours) if pairs else None,
        }
    return summary


def rounds(args: argparse.Namespace) -> None:
    columns = ["clients", "turn", "system", "place", "rounds", "seconds", "foreign", "own", "rest", "kept"]
    results = Results(f"compare-{args.workload}", columns)
    minutes = args.max_minutes / len(args.clients)
    found = [compare(args, clients, results, minutes) for clients in args.clients]
    results.summary(part="rounds", workload=args.workload, comparisons=found)


def start(args: argparse.Namespace) -> None:
    """Each system alone: from its launch to the end of its first round, and its peak memory until some rounds later."""
    columns = ["clients", "turn", "system", "start_seconds", "peak_mib", "foreign", "kept"]
    results = Results(f"start-{args.workload}", columns)
    found = []
    for clients in args.clients:
        names = taking_part(args, clients)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for turn in range(args.turns):
            for name in in_turn(names, turn):
                runs[name].append(started(name, args, clients))
                results.row(clients=clients, turn=turn, system=name, **runs[name][-1])
                print(f"N={clients} turn {turn}: {name} {runs[name][-1]}", flush=True)
        systems = {}
        for name in names:
            quiet = [run["start_seconds"] for run in runs[name] if run["kept"]]
            systems[name] = {
                "kept": len(quiet),
                "dropped": len(runs[name]) - len(quiet),
                "start_seconds": statistics.median(quiet) if quiet else None,
                "peak_mib": max(run["peak_mib"] for run in runs[name]),
            }
        found.append({"clients": clients, "systems": systems})
    results.summary(part="start", workload=args.workload, comparisons=found)


def started(name: str, args: argparse.Namespace, clients: int) -> dict[str, Any]:
    usage = Usage(ProcessTree())
    with running(name, args, clients) as system:
        peak, over = 0.0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.5):
                peak = max(peak, system.tree.pss_mib())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            seconds = system.ready()
            foreign = usage.stop()["foreign"]
            system.rounds(args.rounds)
        finally:
            over.set()
            watcher.join()
        peak = max(peak, system.tree.pss_mib())
        system.leave()
    return {"start_seconds": seconds, "peak_mib": peak, "foreign": foreign, "kept": foreign <= QUIET}


def pythons(given: Sequence[str]) -> dict[str, str]:
    """The interpreter of each kind of system, from ``NAME=PATH``, the environment, or this one."""
    found = {"fedray": sys.executable}
    for name in ("before", "flower", "pfl"):
        found[name] = os.environ.get(f"{name.upper()}_PYTHON", sys.executable)
    for text in given:
        name, _, path = text.partition("=")
        if name not in found or not path:
            raise SystemExit(f"--python {text} must be {' or '.join(found)}, then =, then a path")
        found[name] = path
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["plain", "flower", "flower-m", "pfl1", "pfl2"]
    parser.add_argument("--part", choices=["rounds", "start"], default="rounds")
    parser.add_argument("--workload", choices=WORKLOADS, default="A")
    parser.add_argument("--against", choices=SYSTEMS, nargs="*", default=usual)
    parser.add_argument("--subject", choices=SYSTEMS, default="fedray", help="what the others are compared with")
    parser.add_argument("--clients", type=int, nargs="+", help="numbers of registered clients, one after the other")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of flower, pfl")
    parser.add_argument("--max-minutes", type=float, default=30, help="time limit of the samples of rounds")
    parser.add_argument("--pairs", type=int, default=15, help="quiet pairs with fedray to keep of each rival")
    parser.add_argument("--warmup", type=int, default=2, help="turns before that")
    parser.add_argument("--turns", type=int, default=3, help="of start: runs of each system")
    parser.add_argument("--rounds", type=int, default=5, help="of start: rounds in which memory is watched")
    args = parser.parse_args()
    args.pythons = pythons(args.python)
    scaling = [100, 1000, 10_000, 100_000]
    args.clients = args.clients or (scaling if args.workload == "C" else [WORKLOADS[args.workload].clients])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that no system is left behind, or stopped
    {"rounds": rounds, "start": start}[args.part](args)


if __name__ == "__main__":
    main()
