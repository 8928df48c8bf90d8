"""Mime with momentum as FedJAX has it, in fedray: twenty clients with five kinds of clothes each.

python analysis/examples/fedjax_mime.py [FOLDER] [--fedjax PYTHON]

Both systems begin with the same model and train the same clients in the same rounds. With full batches nothing is left
to chance, so that the two models differ by rounding alone. With mini-batches each system draws its own. Writes
fedjax_mime.csv and fedjax_mime.png into FOLDER (runs/examples).

`--fedjax` names an interpreter of Python 3.12 or older that has what
analysis/benchmarks/rivals/requirements-fedjax.txt names. Without it only fedray's rounds are made.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch.nn.functional as F
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import fedray
from fedray.data.sources.source import load_source

THEIRS = Path(__file__).parents[1] / "benchmarks" / "rivals" / "fedjax_rounds.py"

CLIENTS, COHORT, ROUNDS, SEEDS = 20, 8, 25, (0, 1, 2)
LR, BETA = 0.03, 0.9

BATCHES: dict[str, dict[str, Any]] = {
    "full": {"train.batch_size": "full", "train.local_steps": 5},
    "mini": {"train.batch_size": 20, "train.local_epochs": 1},
}

KEYS = {
    "algorithm.name": "mimemom", "algorithm.beta": BETA, "algorithm.dampening": False,
    "train.weighting": "samples", "train.lr": LR, "train.cohort_size": COHORT, "run.rounds": ROUNDS,
    "engine.kind": "local",
}  # fmt: skip


class CNN(nn.Module):
    """Two convolutions and two layers, 60,328 parameters."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(input_shape[0], 16, 5), nn.Conv2d(16, 32, 5)
        self.fc1, self.fc2 = nn.Linear(512, 90), nn.Linear(90, classes)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in (self.conv1, self.conv2):
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


def clients() -> tuple[list[tuple[NDArray[np.float32], NDArray[np.int64]]], NDArray[np.float32], NDArray[np.int64]]:
    """Returns the images ``[n_i, 1, 28, 28]``, standardised, of each client with their classes, and those of the test.
    A client has five neighbouring classes, and from 60 to 240 images, always a multiple of 20."""
    source, rng = load_source("sample"), np.random.default_rng(0)
    x, x_test = (
        ((np.asarray(part) / 255 - 0.286) / 0.353).astype(np.float32) for part in (source.x_train, source.x_test)
    )
    y = np.asarray(source.y_train).astype(np.int64)
    found = []
    for client in range(CLIENTS):
        mine = np.flatnonzero((y - client) % 10 < 5)
        own = rng.choice(mine, 60 + 20 * (client // 2), replace=False)
        found.append((x[own], y[own]))
    return found, x_test, np.asarray(source.y_test).astype(np.int64)


def cohorts(seed: int) -> NDArray[np.int64]:
    """Returns who takes part ``[ROUNDS, COHORT]``."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.choice(CLIENTS, COHORT, replace=False) for _ in range(ROUNDS)])


def of_fedray(batches: str, seed: int, folder: Path, **settings: Any) -> tuple[pd.DataFrame, list[nn.Module]]:
    """Returns the test accuracy of each round, and the models: the initial one, and those after each round."""
    keys = {
        **KEYS, **BATCHES[batches], "run.seed": seed, "run.output": str(folder), "run.resume": False,
        "run.name": f"mime-{batches}-{seed}", **settings,
    }  # fmt: skip
    own, x_test, y_test = clients()
    accuracies = []
    with fedray.Simulation(keys, data=own, test=(x_test, y_test), model=CNN) as sim:
        models = [sim.model()]
        for cohort in cohorts(seed)[: sim.rounds]:
            accuracies.append(sim.step(cohort=cohort).metrics["test_accuracy"])
            models.append(sim.model())
    return table_of("fedray", batches, seed, accuracies), models


def of_fedjax(
    python: Path, batches: str, seed: int, folder: Path, first: nn.Module, rounds: int
) -> tuple[pd.DataFrame, NDArray[np.float32]]:
    """Returns the test accuracy of each round, and all parameters after each round ``[rounds, P]``. FedJAX begins with
    the model ``first``, and runs in the interpreter ``python``."""
    own, x_test, y_test = clients()
    given, result = folder / "fedjax-given.npz", folder / "fedjax-result.npz"
    np.savez(
        given, x_test=x_test, y_test=y_test, cohorts=cohorts(seed)[:rounds], full=batches == "full", seed=seed,
        lr=LR, beta=BETA, clients=CLIENTS,
        steps=BATCHES["full"]["train.local_steps"], batch_size=BATCHES["mini"]["train.batch_size"],
        **{f"parameter {name}": value.detach().numpy() for name, value in first.named_parameters()},
        **{f"x {client}": x for client, (x, _) in enumerate(own)},
        **{f"y {client}": y for client, (_, y) in enumerate(own)},
    )  # fmt: skip
    subprocess.run([python, THEIRS, given, result], check=True)
    with np.load(result) as found:
        return table_of("FedJAX", batches, seed, found["accuracies"]), found["models"]


def table_of(system: str, batches: str, seed: int, accuracies: Sequence[float]) -> pd.DataFrame:
    columns = {"system": system, "batches": batches, "seed": seed}
    return pd.DataFrame({**columns, "round": range(1, len(accuracies) + 1), "accuracy": accuracies})


def apart(models: list[nn.Module], theirs: NDArray[np.float32]) -> list[float]:
    """Returns how far the models of both systems are apart after each round, as a fraction of the way that fedray's has
    gone."""
    first, *mine = (parameters_to_vector(model.parameters()).detach().numpy() for model in models)
    return [float(np.linalg.norm(x - y) / np.linalg.norm(x - first)) for x, y in zip(mine, theirs, strict=True)]


def picture(table: pd.DataFrame) -> Figure:
    """Returns a picture of the mean accuracy over seeds in each round, with a band from the least to the largest."""
    figure = Figure(figsize=(6.4, 3), layout="constrained")
    titles = {"full": "full batches", "mini": "mini-batches"}
    for axes, (batches, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for system, colour, dash in (("fedray", "#0072b2", "-"), ("FedJAX", "#d55e00", (0, (1.5, 2.5)))):
            part = table[(table["system"] == system) & (table["batches"] == batches)]
            if part.empty:
                continue
            rows = 100 * part.groupby("round")["accuracy"].agg(["min", "mean", "max"])
            axes.fill_between(rows.index, rows["min"], rows["max"], color=colour, alpha=0.15, linewidth=0)
            axes.plot(rows.index, rows["mean"], linestyle=dash, linewidth=2, color=colour, label=system)
        axes.set(xlabel="round", title=title)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("test accuracy, %")
    figure.axes[0].legend(frameon=False, fontsize=9)
    return figure


def main(
    folder: Path = Path("runs/examples"), fedjax: Path | None = None, seeds: tuple[int, ...] = SEEDS, **settings: Any
) -> pd.DataFrame:
    """Returns the table of all rounds, seeds and systems."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = []
    for batches in BATCHES:
        for seed in seeds:
            table, models = of_fedray(batches, seed, folder, **settings)
            tables.append(table)
            if fedjax:
                table, theirs = of_fedjax(fedjax, batches, seed, folder, models[0], len(table))
                tables.append(table.assign(apart=apart(models, theirs)))
    found = pd.concat(tables)
    found.to_csv(folder / "fedjax_mime.csv", index=False)
    ends = found[found["round"] == found["round"].max()]
    print(ends.pivot_table("accuracy", ["batches", "seed"], "system").round(4))
    if fedjax:
        print(found[found["system"] == "FedJAX"].pivot_table("apart", ["batches", "round"], "seed"))
    picture(found).savefig(folder / "fedjax_mime.png", dpi=150)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Mime with momentum as FedJAX has it, in fedray.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/examples"))
    parser.add_argument("--fedjax", type=Path, metavar="PYTHON")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.fedjax)
