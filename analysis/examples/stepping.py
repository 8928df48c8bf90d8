"""Stepping: watch single clients, and decide who takes part next while the run goes on.

python analysis/examples/stepping.py [FOLDER]

In each round three of the five clients are those whose models were furthest from the server's when they last took part.
No setting says that; a simulation that you step through can do it. Beside it FedAvg with cohorts drawn at random, which
is about as good. Writes stepping.png into FOLDER (runs/examples).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.utils import parameters_to_vector

import fedray

KEYS = {
    "algorithm.name": "fedavg", "data.clients": 20, "data.partition.alpha": 0.1, "model.name": "mlp",
    "train.cohort_size": 5, "train.local_steps": 10, "train.batch_size": 32, "train.lr": 0.05, "run.rounds": 25,
    "engine.kind": "local",
}  # fmt: skip


def restless(sim: fedray.Simulation) -> Iterator[fedray.Report]:
    """Makes the rounds of ``sim``. Three of the five clients are those that moved furthest when they last took part.
    The other two are drawn from the rest."""
    rng, moved = np.random.default_rng(0), {client: np.inf for client in sim.clients}
    while sim.round < sim.rounds:
        order = sorted(moved, key=lambda client: (-moved[client], client))
        others = [client for client in order if client not in order[:3]]
        report = sim.step(cohort=[*order[:3], *rng.choice(others, 2, replace=False)])
        server = parameters_to_vector(report.model().parameters()).detach()
        for client in report.clients["client"]:
            own = parameters_to_vector(report.client_model(client).parameters()).detach()
            moved[client] = float(torch.linalg.vector_norm(own - server))
        yield report


def main(folder: Path = Path("runs/examples"), **settings: Any) -> dict[str, list[float]]:
    """Returns the test accuracies of both runs."""
    found = {}
    for name in ("drawn", "restless"):
        keys = {**KEYS, "run.name": f"stepping-{name}", "run.output": str(folder), "run.resume": False, **settings}
        with fedray.Simulation(keys, keep_clients=name == "restless") as sim:
            reports = restless(sim) if name == "restless" else iter(sim)
            found[name] = [report.metrics["test_accuracy"] for report in reports]
    picture(found).savefig(folder / "stepping.png", dpi=150)
    return found


def picture(found: dict[str, list[float]]) -> Figure:
    figure = Figure(figsize=(5.2, 3), layout="constrained")
    axes = figure.subplots()
    names = {"drawn": "clients drawn at random", "restless": "clients that moved furthest"}
    for (name, values), colour in zip(found.items(), ("black", "#0072b2"), strict=True):
        axes.plot(range(1, len(values) + 1), [100 * value for value in values], color=colour, label=names[name])
    axes.set(xlabel="rounds", ylabel="test accuracy, %")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
