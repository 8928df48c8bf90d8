"""A program of its own: a run on a cluster of two nodes, of which the second may be lost in the middle, or join then.

`python two_nodes.py OUTPUT ALGORITHM keep|lose|join|sums|silent|late|buffered`; with `sums` the actor that adds up on
the second node dies, with `silent` that node gives no answer for some rounds, with `late` only its client actor, and
with `buffered` rounds are asynchronous.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from slow_runs import BUFFERED, slow_rounds

from fedray import simulate
from fedray.testing.contracts import small_source

output, algorithm, fate = sys.argv[1:]
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
# so that even the sums of small models stay on their node until they are added up
os.environ["RAY_max_direct_call_object_size"] = "1000"  # noqa: SIM112
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1) if fate != "join" else None
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")


def signal_second(number):
    import psutil  # it comes with Ray, and is found once Ray is imported

    raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)
    below = raylet.children(recursive=True)
    actors = [process for process in below if "ray::ClientActor" in " ".join(process.cmdline())]
    for process in actors if fate == "late" else [raylet, *below]:
        process.send_signal(number)


def saved_twice():
    """Clients whose states are in more than one file, on whatever nodes."""
    folders = [Path(output) / "run" / ".states", *Path(tempfile.gettempdir()).glob("fedray-*")]
    files = [path.name for folder in folders for path in folder.glob("client-*")]
    return [client for client, count in Counter(name.split("-")[1] for name in files).items() if count > 1]


stopped = False


def callback(report):
    global second, stopped
    if fate == "silent" and report.round == 5 and not stopped:
        stopped = True
        signal_second(signal.SIGSTOP)
    if fate == "silent" and report.round == 8:
        signal_second(signal.SIGCONT)
    if fate == "late" and report.round % 3 < 2 and report.round < ROUNDS:
        signal_second(signal.SIGCONT if report.round % 3 else signal.SIGSTOP)
    if fate == "late" and report.round == ROUNDS:
        # the second node drops what came too late without being waited for
        end = time.monotonic() + 30
        while saved_twice():
            assert time.monotonic() < end, saved_twice()
            time.sleep(0.1)
    if report.round == 5 and fate == "lose" and second is not None:
        cluster.remove_node(second, allow_graceful=False)
        second = None
        cluster.add_node(num_cpus=1)
    if fate == "sums" and report.round == 5:
        import psutil  # it comes with Ray, and is found once Ray is imported

        for process in psutil.Process().children(recursive=True):
            if "ray::NodeActor" in " ".join(process.cmdline()):
                process.kill()
    if fate == "join" and report.round == 2:
        cluster.add_node(num_cpus=1)
    if fate == "join" and report.round < ROUNDS - 2:
        # no faster than the new actor starts
        time.sleep(0 if joined() else 0.5)


def joined():
    return (Path(output) / "run" / "log.txt").read_text().count("client actor: pid") == 2


ROUNDS = 100 if fate == "join" else 12
simulate(
    {
        **slow_rounds(algorithm),
        **(BUFFERED if fate == "buffered" else {}),
        "run.name": "run",
        "run.output": output,
        "engine.kind": "ray",
        "engine.actors": "auto" if fate == "join" else 2,
        "run.rounds": ROUNDS,
        "engine.cpus_per_actor": 1,
        "engine.answer_timeout": 4 if fate == "silent" else 15,
    },
    data=small_source(),
    callbacks=[callback],
)
ray.shutdown()
cluster.shutdown()
