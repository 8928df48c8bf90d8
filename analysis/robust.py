"""Compares robust rules under attacks: each rule with each attack, and both without the other.

    python analysis/robust.py OUTPUT

Fashion-MNIST, a perceptron (784-100-10) and FedAvg; 25 clients that all take part in each of 60 rounds, with 5 local
steps of 32 samples; 5 of them attack. Once the clients' samples are alike, once each client has its own mixture of
classes (Dirichlet, alpha 0.5). Rules are told that 5 of 25 may be Byzantine. Three seeds.

Writes runs.csv, robust.md and robust.png. A run that is in runs.csv is not made again. Means are over the runs that did
not diverge; those that did are counted beside them.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedray import simulate
from fedray.results.statistics import with_interval
from fedray.results.style import save_png
from fedray.results.tables import markdown

SETTING = (
    "Fashion-MNIST, a perceptron (784-100-10), FedAvg with uniform weights; 25 clients that all take part in each of "
    "60 rounds, 5 local steps of 32 samples, learning rate 0.05; 5 of them attack, as many as the rules are told."
)

CLIENTS, BYZANTINE, SEEDS = 25, 5, (1, 2, 3)
RULES: Mapping[str, Mapping[str, Any]] = {
    "mean": {"kind": "mean"},
    "median": {"kind": "median"},
    "trimmed_mean": {"kind": "trimmed_mean", "b": BYZANTINE},
    "multi_krum": {"kind": "multi_krum", "f": BYZANTINE},
    "bulyan": {"kind": "bulyan", "f": BYZANTINE},
    "geometric_median": {"kind": "geometric_median"},
    "centered_clip": {"kind": "centered_clip", "tau": 0.3},
}
ATTACKS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "label_flip": {},
    "sign_flip": {"scale": 5.0},
    "noise": {"scale": 1.0},
    "alie": {},
    "ipm": {"eps": 5.0},
    "backdoor": {"scale": 5.0},
}
WORLDS: Mapping[str, Mapping[str, Any]] = {"alike": {"kind": "iid"}, "mixtures": {"kind": "dirichlet", "alpha": 0.5}}


def settings(world: str, rule: str, attack: str, seed: int, folder: str) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "run": {"seed": seed, "rounds": 60, "eval_every": 20, "output": folder, "checkpoint_every": 0},
        "algorithm": {"name": "fedavg"},
        "data": {"source": "fashion_mnist", "clients": CLIENTS, "partition": dict(WORLDS[world])},
        "model": {"name": "mlp"},
        "train": {"local_steps": 5, "batch_size": 32, "lr": 0.05, "weighting": "uniform"},
        "engine": {"kind": "local", "threads": 1, "compile": False},
    }
    if rule != "mean":
        asked["train"]["aggregation"] = dict(RULES[rule])
    if attack != "none":
        asked["attack"] = {"kind": attack, "fraction": BYZANTINE / CLIENTS, **ATTACKS[attack]}
    return asked


def row_of(world: str, rule: str, attack: str, seed: int) -> dict[str, Any]:
    """Makes a run, and returns what is said of it."""
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(settings(world, rule, attack, seed, folder))
        last, status = result.metrics.iloc[-1], result.summary["status"]
        if status not in ("completed", "diverged"):
            raise SystemExit(f"the run is {status}, and not in the table")
    row = {"world": world, "rule": rule, "attack": attack, "seed": seed, "status": status}
    if status == "diverged":
        return row | {"accuracy": np.nan, "success": np.nan}
    return row | {"accuracy": float(last["test_accuracy"]), "success": float(last.get("backdoor_accuracy", np.nan))}


def cells(runs: pd.DataFrame, world: str, column: str, attacks: list[str]) -> Iterator[dict[str, str]]:
    """Yields the rows of a table: a rule's mean over seeds under each attack, in percent, and how many diverged."""
    of_world = runs[runs["world"] == world]
    for rule in RULES:
        found = of_world[of_world["rule"] == rule]
        yield {"rule": rule} | {attack: cell(found[found["attack"] == attack][column]) for attack in attacks}


def cell(values: pd.Series[float]) -> str:
    known = (100 * values.dropna()).tolist()
    lost = len(values) - len(known)
    diverged = f"{lost} of {len(values)} diverged" if lost else ""
    return ", ".join(filter(None, [with_interval(known, 1), diverged]))


def strengths() -> str:
    """What the rules are told and how strong the attacks are, from :data:`RULES` and :data:`ATTACKS`."""
    rules = {rule: {key: value for key, value in keys.items() if key != "kind"} for rule, keys in RULES.items()}
    told, strong = (
        ", ".join(f"`{name}` with {key} = {value:g}" for name, keys in of.items() for key, value in keys.items())
        for of in (rules, ATTACKS)
    )
    return f"Rules: {told}. Attacks: {strong}. All else has its default."


def report(runs: pd.DataFrame, folder: Path) -> None:
    """Writes the tables and the picture of all ``runs``."""
    seeds = ", ".join(map(str, sorted(runs["seed"].unique())))
    setting = f"{SETTING} {strengths()} Seeds {seeds}; `python analysis/robust.py OUTPUT`."
    lines = ["# Robust rules under attacks\n", textwrap.fill(setting, 120) + "\n"]
    for world in WORLDS:
        how = "samples are alike" if world == "alike" else "have mixtures of classes (Dirichlet, alpha 0.5)"
        lines.append(f"## Clients whose {how}\n" if world == "alike" else f"## Clients that {how}\n")
        lines.append("Test accuracy after 60 rounds, in percent, of 5 attackers among 25 clients.\n")
        lines.append(markdown(pd.DataFrame(cells(runs, world, "accuracy", list(ATTACKS)))) + "\n")
        lines.append("Marked test images that are taken for the attackers' class, in percent.\n")
        lines.append(markdown(pd.DataFrame(cells(runs, world, "success", ["backdoor"]))) + "\n")
    lines.append("![accuracy of each rule under each attack](robust.png)\n")
    (folder / "robust.md").write_text("\n".join(lines))
    save_png(picture(runs), folder / "robust.png")


def picture(runs: pd.DataFrame) -> Figure:
    """Returns the accuracies as colours: a panel for each world, a row for each rule, a column for each attack."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for place, world in enumerate(WORLDS, 1):
        axes = figure.add_subplot(1, 2, place)
        means = runs[runs["world"] == world].pivot_table(index="rule", columns="attack", values="accuracy")
        means = 100 * means.reindex(index=list(RULES), columns=list(ATTACKS))
        axes.imshow(means, vmin=10, vmax=90, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(ATTACKS)), list(ATTACKS), rotation=30, ha="right")
        axes.set_yticks(range(len(RULES)), list(RULES))
        axes.set_title("samples alike" if world == "alike" else "mixtures of classes, alpha 0.5", fontsize=10)
        for (row, column), value in np.ndenumerate(means.to_numpy()):
            if np.isfinite(value):
                axes.text(
                    column, row, f"{value:.0f}", ha="center", va="center", color="white" if value < 60 else "black"
                )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "runs.csv"
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    done = {(row["world"], row["rule"], row["attack"], row["seed"]) for row in rows}
    for seed in SEEDS:
        for key in ((world, rule, attack, seed) for world in WORLDS for rule in RULES for attack in ATTACKS):
            if key not in done:
                rows.append(row_of(*key))
                pd.DataFrame(rows).to_csv(path, index=False, float_format="%.6g")
        report(pd.DataFrame(rows), folder)


if __name__ == "__main__":
    main()
