"""Starts every experiment of analysis/experiments, and estimates what the whole of it takes on this machine.

python analysis/start_experiments.py OUTPUT [NAME ...]      NAME: such as pfedmo/fig2a; all by default

Each makes two rounds with its paper's algorithm, on the files in $FEDRAY_DATA, or on files in the same format that
``stand_ins.py`` makes below OUTPUT. A round that would take longer than about five seconds is shortened: it has fewer
local steps and clients, and its seconds are scaled up by the samples that are trained on. What an evaluation takes is
estimated from its forward passes. Writes OUTPUT/costs.csv and OUTPUT/costs.md; a row that is there already
is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import ray
import stand_ins
import yaml
from torch import nn

from fedray import simulate
from fedray.algorithms import find_algorithm
from fedray.config import Config, load
from fedray.data.federated import FederatedData
from fedray.experiment.experiment import Experiment
from fedray.experiment.resolve import resolve
from fedray.tracking.costs import mean_load

FOLDER = Path(__file__).parent / "experiments"
LIMIT = 3e11
"""The multiply-adds of a round that is not shortened: those of about five seconds on 2 processors."""

MEMORY = 1.2e11
"""The multiply-adds of a batch with which two processes do not fit into 24 GB. With more, one process trains alone."""

LARGE = 1e8
"""The parameters of a model of which the same is true."""

SEEDS = {"pfedmo": 3, "fedtrip": 10, "ghbm": 5, "fedsiam_da": 3}
"""The seeds of each paper's experiments; three where the paper names no number."""

WEIGHTS = "mobilenet_v2-b0353104.pth"

CLASSES = {"gldv2": 2028, "inaturalist": 1203}
"""The classes of data sets of which only a part is made."""

TWO_ROUNDS = {
    "run.rounds": 2, "run.iterations": None, "run.eval_every": 0, "run.eval_test": False, "run.eval_train_samples": 0,
    "run.eval_clients": 0, "run.targets": [], "run.last_rounds": None, "run.resume": False, "run.checkpoint_every": 0,
}  # fmt: skip

STAND_INS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "cifar100": stand_ins.cifar100, "emnist": stand_ins.emnist, "har": stand_ins.har,
    "shakespeare": stand_ins.shakespeare, "tiny_imagenet": stand_ins.tiny_imagenet,
    **{name: lambda folder, name=name: stand_ins.photographs(name, folder) for name in CLASSES},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    names = options.names or [str(path.relative_to(FOLDER))[:-5] for path in sorted(FOLDER.glob("*/*.yaml"))]
    table = options.output / "costs.csv"
    rows = pd.read_csv(table).to_dict("records") if table.exists() else []
    options.output.mkdir(parents=True, exist_ok=True)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    for name in names:
        if name in [row["experiment"] for row in rows]:
            continue
        rows.append(started(name, options.output))
        print(rows[-1], flush=True)
        pd.DataFrame(rows).sort_values("experiment").to_csv(table, index=False)
    (options.output / "costs.md").write_text(as_markdown(pd.read_csv(table)))


def started(name: str, output: Path) -> dict[str, Any]:
    """Runs two rounds of an experiment, and returns its row of the table."""
    path = FOLDER / f"{name}.yaml"
    section = load(path).data
    source = section.source
    more, made = _data(source, section.variant or "", output)
    if load(path).model.weights:
        more["model.weights"] = str(Path(os.environ["FEDRAY_DATA"]) / "weights" / WEIGHTS)
        if load(path).model.name != "mobilenet_v2":
            more["model.weights"] = None
    config = _with(path, more)
    experiment, data = resolve(config)
    load_of_round = mean_load(data.sizes(), experiment.training)
    cohort, multiply_adds = experiment.cohort_size, experiment.facts.flops / 2
    cost = 3 * multiply_adds * load_of_round.seen * cohort
    short = _shortened(config, cost, load_of_round.steps, cohort)
    if multiply_adds * (experiment.training.batch_size or 0) > MEMORY or experiment.facts.parameters > LARGE:
        more["engine.actors"] = 1
    result = simulate(_with(path, {**more, **short, **TWO_ROUNDS, "run.output": str(output / "runs" / name)}))
    assert result.metrics["train_loss"].map(math.isfinite).all(), result.metrics["train_loss"]
    seconds = result.metrics["round_seconds"].iloc[1]
    if short:
        seen = result.clients[result.clients["round"] == 2]["steps"].sum() * (experiment.training.batch_size or 0)
        seconds *= load_of_round.seen * cohort / seen
    evaluations = 1 + (experiment.rounds - 1) // (config.run.eval_every or experiment.rounds)
    evaluation = evaluations * len(data.y_test) * multiply_adds / (cost / seconds)
    hours = (experiment.rounds * seconds + evaluation) / 3600
    further = _further_parameters(experiment, data, source)
    return {
        "experiment": name, "data": made, "model": config.model.name,
        "parameters": experiment.facts.parameters + further,
        "multiply_adds_million": multiply_adds / 1e6, "clients": data.clients, "cohort": cohort,
        "local_steps": load_of_round.steps, "rounds": experiment.rounds, "seconds_per_round": seconds,
        "shortened": bool(short), "hours_per_run": hours,
        "loss_1": result.metrics["train_loss"].iloc[0], "loss_2": result.metrics["train_loss"].iloc[1],
    }  # fmt: skip


def _data(source: str, variant: str, output: Path) -> tuple[dict[str, Any], str]:
    """Returns settings that read the data, and what they are."""
    folder = output / "data" / source
    # of UCI-HAR the signals are at hand
    if source not in STAND_INS or variant == "signals":
        return {}, "real"
    note = "same format" if source not in CLASSES else f"same format, {stand_ins.SCALE:.0%} of the users and classes"
    mark = folder / "made.yaml"
    if not mark.exists():
        settings = STAND_INS[source](folder)
        mark.write_text(yaml.safe_dump(settings))
    return yaml.safe_load(mark.read_text()), note


def _with(path: Path, settings: dict[str, Any]) -> Config:
    return load(path, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


def _shortened(config: Config, cost: float, steps: float, cohort: int) -> dict[str, Any]:
    """Returns settings that make a round cheaper, if its ``cost`` in multiply-adds is too high."""
    if cost <= LIMIT:
        return {}
    # pFedMo's clients all take part
    clients = cohort if config.algorithm.name == "pfedmo" else min(cohort, 2)
    left = LIMIT / (cost / steps / cohort) / clients
    return {"train.local_steps": max(1, int(left)), "train.local_epochs": None, "train.cohort_size": clients}


def _further_parameters(experiment: Experiment, data: FederatedData, source: str) -> int:
    """Returns how many parameters more the last layer has with the published number of classes."""
    last = [layer for layer in experiment.build_model().modules() if isinstance(layer, nn.Linear)][-1]
    return (CLASSES.get(source, data.classes) - data.classes) * (last.in_features + 1)


def runs_of(name: str) -> int:
    """Returns how many runs the experiment is in the paper: those of each algorithm, with each of the values that are
    varied and that it has, with each seed."""
    written = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    varied = written.get("x-vary", [{}])
    compared = written.get("x-algorithms") or load(FOLDER / f"{name}.yaml").for_algorithm
    count = 0
    for algorithm in compared:
        known = find_algorithm(algorithm).Hyper.model_fields
        hypers = {key.removeprefix("algorithm.") for keys in varied for key in keys if key.startswith("algorithm.")}
        count += len(varied) if hypers <= known.keys() else 1
    return count * SEEDS[name.split("/")[0]]


def figure(value: float) -> str:
    """Returns a number with three digits that count."""
    digits = 2 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def as_markdown(table: pd.DataFrame) -> str:
    lines = [
        "| experiment | data | model | parameters | M multiply-adds | rounds | s a round | h a run | runs | h in all |",
        f"|{' --- |' * 10}",
    ]
    for row in table.itertuples():
        runs = runs_of(row.experiment)
        cells: Sequence[str] = [
            row.experiment, row.data, f"`{row.model}`", f"{row.parameters:,}", figure(row.multiply_adds_million),
            f"{row.rounds:,}", figure(row.seconds_per_round) + (" *" if row.shortened else ""),
            figure(row.hours_per_run), f"{runs:,}", figure(runs * row.hours_per_run),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "\\* Estimated from rounds with fewer local steps and clients.", ""])


if __name__ == "__main__":
    main()
