"""Each algorithm's seconds per round against FedAvg's, and against FedAvg plus the computation that it must do.

FEDRAY_DATA=... python analysis/benchmarks/algorithms.py [--pairs 15] [--only NAME ...]

LeNet-5 on MNIST, 20 clients, Dirichlet 0.3, cohorts of 5, 10 steps of batch 64, the local engine: rounds of an
algorithm and of FedAvg (on the same architecture, head included) take turns in one process. The yardstick adds to
FedAvg's round what the algorithm's `Work` says it must do, priced with passes over the same model timed between the
rounds: extra forwards and backwards of each mini-batch, full-batch gradients, the server's own steps. Vector arithmetic
is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from common import QUIET, ProcessTree, Results, Usage, median_ratio, patient

from fedray.algorithms import known_algorithms
from fedray.config import load
from fedray.core.batches import Batch
from fedray.engine.opening import open_run
from fedray.engine.pool import LocalPool
from fedray.engine.process import computing_process, describe
from fedray.engine.run import Run
from fedray.experiment.resolve import resolve
from fedray.gradients.passes import predicting_head

SETTING = {
    "data.source": "mnist",
    "data.clients": 20,
    "data.partition.kind": "dirichlet",
    "data.partition.alpha": 0.3,
    "data.public_samples": 6000,
    "model.name": "lenet5",
    "train.local_steps": 10,
    "train.batch_size": 64,
    "train.cohort_size": 5,
    "run.rounds": 1_000_000,
    "run.eval_every": 0,
    "run.checkpoint_every": 0,
    "engine.kind": "local",
}
BATCH, PART = 64, 256
"""Samples of a local step, and of the pieces of a full-batch gradient."""


class Running:
    """A run whose rounds are made one at a time."""

    def __init__(self, stack: contextlib.ExitStack, algorithm: str, **keys: Any) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        experiment, data = resolve(load({**SETTING, "algorithm.name": algorithm, "run.output": folder, **keys}))
        pool: Callable[[Any], Any] = lambda worker: (LocalPool(worker), [describe("cpu")])  # noqa: E731
        self.experiment = experiment
        self.run: Run = stack.enter_context(open_run(experiment, data, pool, False))
        self.rounds = self.run.rounds()

    def round(self) -> float:
        began = time.perf_counter()
        next(self.rounds)
        return time.perf_counter() - began

    def passes(self) -> dict[str, float]:
        """Seconds of a mini-batch's forward pass and gradient, and of a gradient of a part of the full batch."""
        network, at = self.run.worker.clients.network, self.run.state.server["x"].rows(1)
        x, y = (tensor[None] for tensor in self.run.worker.clients.train.gather(self.run.data.client(0)[:PART]))
        small, large = Batch(x[:, :BATCH], y[:, :BATCH], 0), Batch(x, y, 0)
        return {
            "forward": timed(lambda: network.forward(at, small.x)),
            "gradient": timed(lambda: network.gradients(at, small)),
            "part": timed(lambda: network.gradients(at, large)) * PART / y.shape[1],
            "prediction": self._prediction(),
        }

    def _prediction(self) -> float:
        """Seconds of a mini-batch there and back through the head's predictor, if it has one."""
        head = predicting_head(self.run.worker.clients.network.module)
        if head is None:
            return 0.0
        predictor = head.predictor.train()
        z = torch.randn(BATCH, head.classifier.in_features, requires_grad=True)
        wanted = [z, *predictor.parameters()]
        return timed(lambda: torch.autograd.grad(predictor(z).sum(), wanted))

    def must(self, passes: dict[str, float]) -> float:
        """Seconds of what this round had to do beyond FedAvg's."""
        work, server = self.experiment.algorithm.work, self.run.state.server
        step = work.forwards * passes["forward"] + work.backwards * (passes["gradient"] - passes["forward"])
        step += work.predictions * passes["prediction"]
        own = self.experiment.algorithm.server_flops(server, self.experiment.facts.flops)
        server_steps = own / (3 * self.experiment.facts.flops * BATCH)
        full = work.full_gradients * sum(server.cohort.sizes) / PART
        return sum(server.cohort.steps) * step + full * passes["part"] + server_steps * passes["gradient"]


def timed(call: Callable[[], Any], repeats: int = 5) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def compare(name: str, args: argparse.Namespace, results: Results) -> dict[str, Any]:
    usage = Usage(ProcessTree())
    more, samples, dropped = patient(args.pairs, args.max_minutes), [], 0
    with contextlib.ExitStack() as stack:
        mine = Running(stack, name)
        fedavg = Running(stack, "fedavg", **{"model.head": mine.experiment.config.model.head})
        for running in (mine, fedavg):
            for _ in range(args.warmup):
                running.round()
        while more(len(samples)):
            usage.start()
            # each is first in every other pair
            order = (mine, fedavg) if (len(samples) + dropped) % 2 else (fedavg, mine)
            seconds = {running: running.round() for running in order}
            passes = fedavg.passes()
            used = usage.stop()
            kept = used["foreign"] <= QUIET
            sample = {"seconds": seconds[mine], "fedavg": seconds[fedavg], "must": mine.must(passes)}
            results.row(algorithm=name, **sample, **passes, foreign=used["foreign"], kept=kept)
            if kept:
                samples.append(sample)
            else:
                dropped += 1
    if len(samples) < 2:
        return {"algorithm": name, "pairs": len(samples), "dropped": dropped}
    column = {key: [sample[key] for sample in samples] for key in samples[0]}
    yardstick = [a + b for a, b in zip(column["fedavg"], column["must"], strict=True)]
    over = median_ratio(column["seconds"], yardstick)
    return {
        "algorithm": name,
        "pairs": len(samples),
        "dropped": dropped,
        "seconds": statistics.median(column["seconds"]),
        "to_fedavg": median_ratio(column["seconds"], column["fedavg"]),
        "must": statistics.median(yardstick) / statistics.median(column["fedavg"]),
        "to_yardstick": over,
        "met": over["low"] <= 1.15,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--max-minutes", type=float, default=2, help="for each algorithm")
    parser.add_argument("--only", nargs="*", default=list(known_algorithms()))
    args = parser.parse_args()
    columns = ["algorithm", "seconds", "fedavg", "must", "forward", "gradient", "part", "prediction", "foreign", "kept"]
    results, rows = Results("algorithms", columns), []
    torch.manual_seed(0)
    with computing_process(1, False):
        for name in args.only:
            rows.append(row := compare(name, args, results))
            if "must" in row:
                print(f"{name}: {row['to_fedavg']['ratio']:.3f} of FedAvg, which must be {row['must']:.3f}", flush=True)
    results.summary(setting=SETTING, algorithms=rows)


if __name__ == "__main__":
    main()
