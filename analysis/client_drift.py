"""Measures how far clients drift apart in local steps, beside what theory bounds it by.

    python analysis/client_drift.py OUTPUT

Convergence proofs of local methods, pFedMo's among them, compare the mean of the clients' models after tau local steps
with a virtual model that is trained by the mean of all gradients (`run.diagnostics=virtual` measures the distance).
They bound it by three numbers: delta, how far the clients' gradients are from their mean; beta, how fast gradients
change with the model; rho, how fast losses do. For FedAvg with full gradients the bound of a round is

    h(tau) = delta / beta ((1 + eta beta)^tau - 1) - eta delta tau

(S. Wang et al., Adaptive Federated Learning in Resource Constrained Edge Computing Systems, JSAC 2019, Theorem 1).
Momentum makes distances larger; the distances of FedNAG and pFedMo are measured without a bound.

Logistic regression on 6,000 images of MNIST with inputs from 0 to 1, 4 clients, eta = 0.01, 1,000 local steps on all of
a client's samples. delta and rho are the largest values at the models after each round, and beta is an upper bound
for every model: half the largest eigenvalue of the inputs' second moments.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedray import simulate
from fedray.config import load
from fedray.data.sources.source import Source, source_of
from fedray.experiment.custom import CustomObjects
from fedray.experiment.resolve import resolve
from fedray.results.style import figure_of, lines_for

Array = NDArray[np.float64]

ETA, STEPS, SAMPLES, PUBLIC = 0.01, 1_000, 6_000, 600
ALGORITHMS = ("fedavg", "fednag", "pfedmo")
PARTITIONS = {
    "iid": {"data.partition.kind": "iid"},
    "3 classes": {
        "data.partition.kind": "label_skew", "data.partition.classes_per_client": 3, "data.partition.assign": "balanced"
    },
}  # fmt: skip
TAUS = (10, 20, 40)


def settings_of(algorithm: str, partition: str, tau: int, folder: Path) -> dict[str, Any]:
    """Returns the configuration of a run."""
    return {
        "algorithm.name": algorithm, "data.clients": 4, **PARTITIONS[partition], "data.public_samples": PUBLIC,
        "data.mean": [0], "data.std": [1],
        "model.name": "logistic", "train.lr": ETA, "train.batch_size": "full", "train.local_steps": tau,
        "run.iterations": STEPS, "run.diagnostics": "virtual", "run.seed": 1, "engine.kind": "local",
        "run.output": str(folder),
    }  # fmt: skip


def gradient(model: Array, x: Array, y: NDArray[np.int64]) -> Array:
    """Returns the gradient of the mean cross-entropy at ``model`` ``[classes, features]``, on inputs ``x`` ``[n,
    features]`` of the classes ``y`` ``[n]``."""
    logits = x @ model.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ x / len(y)


def smoothness(x: Array) -> float:
    """Returns an upper bound for beta: the Hessian of the mean cross-entropy is at most half the second moments of the
    inputs ``x``."""
    return float(np.linalg.eigvalsh(x.T @ x / len(x))[-1]) / 2


def bound(delta: float, beta: float, tau: int) -> float:
    """Returns h(tau)."""
    return delta / beta * ((1 + ETA * beta) ** tau - 1) - ETA * delta * tau


def measure(algorithm: str, partition: str, tau: int, source: Source) -> dict[str, Any]:
    """Makes a run, and returns a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(algorithm, partition, tau, Path(folder))
        _, data = resolve(load(settings), CustomObjects(source))
        x = np.asarray(data.x, dtype=np.float64)
        x = (x if data.scale is None else x * np.asarray(data.scale) + np.asarray(data.shift)).reshape(len(x), -1)
        x = np.hstack([x, np.ones((len(x), 1))])
        clients = [(x[data.client(i)], data.y[data.client(i)]) for i in range(4)]
        p = data.sizes() / data.sizes().sum()
        deltas, rhos = np.zeros(4), np.zeros(4)

        def at_round(report: Any) -> None:
            weight, bias = (each.detach().double().numpy() for each in report.model().parameters())
            each = [gradient(np.hstack([weight, bias[:, None]]), *held) for held in clients]
            mean = sum(share * one for share, one in zip(p, each, strict=True))
            deltas[:] = np.maximum(deltas, [np.linalg.norm(one - mean) for one in each])
            rhos[:] = np.maximum(rhos, [np.linalg.norm(one) for one in each])

        metrics = simulate(settings, data=source, callbacks=[at_round]).metrics
    delta, beta = float(p @ deltas), max(smoothness(held) for held, _ in clients)
    return {
        "algorithm": algorithm, "partition": partition, "tau": tau, "delta": delta, "beta": beta,
        "rho": float(rhos.max()), "bound": bound(delta, beta, tau) if algorithm == "fedavg" else np.nan,
        "largest distance": metrics["virtual_distance"].max(),
        "mean distance": metrics["virtual_distance"].mean(), "train loss": metrics["train_loss"].iloc[-1],
    }  # fmt: skip


def rows(source: Source) -> Iterator[dict[str, Any]]:
    for partition in PARTITIONS:
        for algorithm in ALGORITHMS:
            for tau in TAUS:
                yield measure(algorithm, partition, tau, source)


def picture(table: pd.DataFrame) -> Figure:
    """Returns the distances over tau, a panel for each partition."""
    figure, panels = figure_of(len(PARTITIONS), columns=2, legend_width=1.2)
    lines = lines_for([*ALGORITHMS, "bound of FedAvg"])
    for axes, partition in zip(panels, PARTITIONS, strict=True):
        for name in ALGORITHMS:
            found = table[(table["partition"] == partition) & (table["algorithm"] == name)]
            axes.plot(found["tau"], found["largest distance"], label=name, **lines[name].options(len(found)))
        found = table[(table["partition"] == partition) & (table["algorithm"] == "fedavg")]
        style = lines["bound of FedAvg"].options(len(found))
        axes.plot(found["tau"], found["bound"], label="bound of FedAvg", **style)
        axes.set(xlabel="local steps of a round, tau", ylabel="distance to the virtual model", yscale="log")
        axes.set_title(partition, fontsize=10, loc="left")
        axes.set_xticks(TAUS)
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    config = load({"data.source": "mnist"})
    whole = source_of(config.data, config.task)
    source = replace(whole, x_train=whole.x_train[:SAMPLES], y_train=whole.y_train[:SAMPLES])
    options.output.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows(source))
    table.to_csv(options.output / "client_drift.csv", index=False, float_format="%.5g")
    picture(table).savefig(options.output / "client_drift.png", dpi=150)
    print(table.to_string(index=False, float_format="{:.4g}".format))


if __name__ == "__main__":
    main()
