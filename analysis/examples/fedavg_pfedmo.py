"""FedAvg against pFedMo on the images that come with fedray: five seeds each, and a page that compares them.

python analysis/examples/fedavg_pfedmo.py [key=value ...]

Both algorithms get the same data, model, training settings and seeds. 1,000 of the images belong to no client: pFedMo's
server trains on them, and FedAvg does not use them. A run that is already there is not repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context

import fedray
from fedray.cli.main import exit_code
from fedray.cli.main import main as fedray_command

SETTINGS = {
    "data.source": "sample",
    "data.clients": 10,
    "data.partition.alpha": 0.1,  # most images of a client are of two or three classes
    "data.public_samples": 1000,
    "model.name": "lenet5",
    "train.local_steps": 10,
    "train.batch_size": 32,
    "train.lr": 0.05,
    "run.rounds": 20,
    "run.output": "runs/fedavg-pfedmo",
    "engine.kind": "local",  # a run is one process, so that two cores make two runs at a time
}


COMPARISON = "runs/fedavg-pfedmo/comparison"


def run(overrides: Sequence[str], algorithm_and_seed: tuple[str, int]) -> str:
    algorithm, seed = algorithm_and_seed
    of_run = {"algorithm.name": algorithm, "run.seed": seed, "run.name": f"{algorithm}-{seed}"}
    result = fedray.simulate(SETTINGS | of_run, overrides=overrides)
    return f"{result.folder}: accuracy {result.summary['final_accuracy']:.4f}"


def main(overrides: Sequence[str]) -> int:
    runs = list(product(("fedavg", "pfedmo"), range(5)))
    print(f"{len(runs)} runs, two at a time ...", flush=True)
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        for line in processes.map(partial(run, overrides), runs):
            print(line, flush=True)
    code = fedray_command(["compare", "runs/fedavg-pfedmo", "--output", COMPARISON])
    if code == 0:
        print(f"open {COMPARISON}/report.html")
    return code


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
