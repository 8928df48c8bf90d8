"""A program of its own: runs on a cluster whose head has no GPU, and whose second node has one that Ray counts only.

`python gpu_cluster.py OUTPUT` prints what each run says, and how it ends.
"""

from __future__ import annotations

import os
import sys

import ray
from ray.cluster_utils import Cluster

from fedray import UserError, simulate
from fedray.testing.contracts import small_source
from fedray.tracking.progress import Display


class Printed(Display):
    def say(self, line: str) -> None:
        print(line)


def run(**keys):
    settings = {
        "algorithm.name": "fedavg",
        "model.name": "logistic",
        "data.clients": 3,
        "run.rounds": 1,
        "run.name": "run",
        "run.output": sys.argv[1],
        "engine.cpus_per_actor": 0.5,
    }
    named = {key.replace("__", "."): value for key, value in keys.items()}
    try:
        simulate(settings | named, data=small_source(), display=Printed(quiet=True))
    except UserError as error:
        print(f"refused: {error}")


os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
cluster.add_node(num_cpus=1, num_gpus=1)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
run()
run(engine__actors_per_gpu=1)
ray.shutdown()
cluster.shutdown()
