"""A program of its own: a run on a cluster of two nodes, of which the second is lost in the middle if asked.

`python two_nodes.py OUTPUT ALGORITHM keep|lose`
"""

from __future__ import annotations

import os
import sys

import ray
from ray.cluster_utils import Cluster
from slow_runs import slow_rounds

from fedray import simulate
from fedray.testing.contracts import small_source

output, algorithm, fate = sys.argv[1:]
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
# so that even the sums of small models stay on their node until they are added up
os.environ["RAY_max_direct_call_object_size"] = "1000"  # noqa: SIM112
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")


def callback(report):
    global second
    if report.round == 5 and fate == "lose" and second is not None:
        cluster.remove_node(second, allow_graceful=False)
        second = None
        cluster.add_node(num_cpus=1)


simulate(
    {
        **slow_rounds(algorithm),
        "run.name": "run",
        "run.output": output,
        "engine.kind": "ray",
        "engine.actors": 2,
        "engine.cpus_per_actor": 1,
    },
    data=small_source(),
    callbacks=[callback],
)
ray.shutdown()
cluster.shutdown()
