"""The table of a suite: what each algorithm's winner reached on fresh seeds, and what it took."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from optuna.trial import FrozenTrial

from fedray.tracking.folder import read_metrics, write_whole
from fedray.tuning.finals import Final, fresh_seeds, is_finished
from fedray.tuning.intervals import mean_and_margin
from fedray.tuning.report import STATES, markdown, save_figure, state_of, study_of
from fedray.tuning.spec import SweepSpec
from fedray.tuning.study import values_of
from fedray.tuning.suite import Suite
from fedray.tuning.view import described


def suite_table(suite: Suite) -> pd.DataFrame:
    """A row per algorithm (or kind of it: the name of its space file), the best first.

    How many ``trials`` ended how; the ``winner`` and its ``validation``. Of its runs on fresh seeds: ``accuracy`` (of
    the test set, at the end; 0 for one that diverged) with the ``margin`` of its 95 % interval, ``bytes`` of a run, and
    how many ``reached`` the ``target``, after how many ``rounds_to`` and ``bytes_to`` it. The target is the last of
    run.targets, else FedAvg's accuracy here, else the lowest.
    """
    found = [(spec, _winner(spec)) for spec in suite.specs]
    runs = {spec.name: _runs(spec, best, suite.seeds) for spec, best in found}
    finals = {spec.name: _finals(spec, best, suite.seeds) for spec, best in found}
    target = _target(suite, finals)
    rows = []
    for spec, best in found:
        states = Counter(map(state_of, _ended(study_of(spec))))
        row = {"algorithm": _label(spec), "trials": sum(states.values())}
        row |= {state: states[state] for state in ("complete", "pruned", "diverged", "failed")}
        if best is not None and finals[spec.name]:
            mean, margin = mean_and_margin(finals[spec.name])
            costs = [_bytes(rows) for rows in runs[spec.name]]
            reached = [where for each in runs[spec.name] if (where := _first_at(each, target)) is not None]
            row |= {"winner": best.number, "validation": best.value, "accuracy": mean, "margin": margin}
            row |= {"seeds": len(finals[spec.name]), "bytes": np.mean([cost[-1] for cost in costs])}
            row |= {"target": target, "reached": len(reached)}
            if reached:
                row |= dict(zip(("rounds_to", "bytes_to"), np.mean(reached, axis=0), strict=True))
            row["with"] = described(values_of(best))
        rows.append(row)
    table = pd.DataFrame(rows)
    return table.sort_values("accuracy", ascending=False, ignore_index=True) if "accuracy" in table else table


def write_suite(suite: Suite) -> list[Path]:
    """suite.csv, suite.md and curves.png in the suite's folder; what was written."""
    table = suite_table(suite)
    paths = [suite.folder / name for name in ("suite.csv", "suite.md", "curves.png")]
    write_whole(paths[0], table.to_csv(index=False))
    (objective,) = suite.specs[0].tune.objective
    write_whole(paths[1], markdown(_for_people(table, objective)))
    _draw(suite, paths[2])
    return paths


def _for_people(table: pd.DataFrame, objective: str) -> pd.DataFrame:
    """Percent, megabytes, and intervals beside their means."""
    shown = table[["algorithm", "trials", "complete", "pruned", "diverged", "failed"]].copy()
    if "accuracy" not in table:
        return shown
    if objective == "validation_accuracy":
        shown["validation, %"] = 100 * table["validation"]
    else:
        shown[objective] = table["validation"]
    shown["test accuracy, %"] = [
        "" if math.isnan(mean) else f"{100 * mean:.2f}" + ("" if math.isnan(margin) else f" ± {100 * margin:.2f}")
        for mean, margin in zip(table["accuracy"], table["margin"], strict=True)
    ]
    target = f"{100 * table['target'].iloc[0]:.2f} %"
    shown[f"reached {target}"] = [
        "" if math.isnan(count) else f"{count:.0f} of {seeds:.0f}"
        for count, seeds in zip(table["reached"], table["seeds"], strict=True)
    ]
    for name, unit, title in (("rounds_to", 1, "rounds to it"), ("bytes_to", 1e6, "MB to it"), ("bytes", 1e6, "MB")):
        if name in table:
            shown[title] = table[name] / unit
    shown["with"] = table["with"]
    return shown


def _label(spec: SweepSpec) -> str:
    """The algorithm, or what its space file calls a kind of it."""
    return spec.name.rpartition("/")[2]


def _winner(spec: SweepSpec) -> FrozenTrial | None:
    study = study_of(spec)
    return study.best_trials[0] if any(state_of(trial) == "complete" for trial in _ended(study)) else None


def _ended(study: Any) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state in STATES]


def _folders(spec: SweepSpec, best: FrozenTrial | None, seeds: int) -> list[Path]:
    """The winner's runs that have ended."""
    if best is None:
        return []
    folders = [Final(spec).folder(best.number) / f"seed-{seed}" for seed in fresh_seeds(spec, seeds)]
    return [folder for folder in folders if is_finished(folder)]


def _runs(spec: SweepSpec, best: FrozenTrial | None, seeds: int) -> list[pd.DataFrame]:
    return [read_metrics(folder) for folder in _folders(spec, best, seeds)]


def _finals(spec: SweepSpec, best: FrozenTrial | None, seeds: int) -> list[float]:
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in _folders(spec, best, seeds)]
    return [0.0 if each["status"] == "diverged" else each["final_accuracy"] for each in summaries]


def _target(suite: Suite, finals: dict[str, list[float]]) -> float:
    given = suite.specs[0].base.get("run.targets")
    if given:
        return float(given[-1])
    means = {
        spec.base.get("algorithm.name"): math.fsum(finals[spec.name]) / len(finals[spec.name])
        for spec in suite.specs
        if finals[spec.name]
    }
    return means.get("fedavg", min(means.values(), default=math.nan))


def _bytes(rows: pd.DataFrame) -> np.ndarray:
    return (rows["bytes_down"] + rows["bytes_up"]).to_numpy(float)


def _first_at(rows: pd.DataFrame, target: float) -> tuple[float, float] | None:
    """The first round at ``target`` or above, and the bytes up to it."""
    places = np.flatnonzero(rows["test_accuracy"].to_numpy(float) >= target)
    return (float(rows["round"].iloc[places[0]]), _bytes(rows)[places[0]]) if len(places) else None


def _draw(suite: Suite, path: Path) -> None:
    """The mean test accuracy of each winner over the iterations, and the range of its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for spec in suite.specs:
        curves = [_curve(rows) for rows in _runs(spec, _winner(spec), suite.seeds)]
        if not curves:
            continue
        together = pd.concat(curves, axis=1).sort_index()
        mean = together.mean(axis=1)
        (line,) = axes.plot(mean.index, 100 * mean, label=_label(spec))
        low, high = together.min(axis=1), together.max(axis=1)
        axes.fill_between(mean.index, 100 * low, 100 * high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="local iterations", ylabel="test accuracy, %", title=suite.name)
    if axes.lines:
        axes.legend()
    save_figure(figure, path)


def _curve(rows: pd.DataFrame) -> pd.Series:
    evaluated = rows.dropna(subset=["test_accuracy"])
    return pd.Series(evaluated["test_accuracy"].to_numpy(float), index=evaluated["iterations"].to_numpy())
