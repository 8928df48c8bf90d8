"""What a sweep has found: a table of its trials, and pictures of it. Reads the sweep's folder alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from optuna.exceptions import ExperimentalWarning
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState, create_trial

from fedray.files import replacement_of, write_whole
from fedray.tuning.axis import value_of
from fedray.tuning.curves import learning_curves, runs_of
from fedray.tuning.spec import SweepSpec, read_record, read_sweeps
from fedray.tuning.study import ERROR, JOURNAL, VALUES, loaded, opened, read_study, values_of
from fedray.tuning.sweep import study_name

STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
}


LEAST_TRIALS = 8
"""Complete trials below which nothing is said of importance."""


def study_of(spec: SweepSpec) -> optuna.Study:
    """The study of a sweep, to be read."""
    if spec.tune.storage:
        return loaded(opened(spec.tune.storage), study_name(spec), spec.tune.storage)
    return read_study(spec.folder / JOURNAL, study_name(spec))


def trial_table(folder: Path) -> pd.DataFrame:
    """A row per trial of the sweep in ``folder``.

    ``state`` (complete, diverged, pruned, failed, running), the objectives, what was sampled, the ``seconds`` that its
    runs took together, and as means over them: ``rounds``, and of the first objective ``best`` over the rounds,
    ``best_round``, ``mean`` over the rounds (the area under its curve); ``bytes``, ``flops``, and ``bytes_to_<target>``
    for each run.targets (of validation accuracy; empty where it was not reached). ``error``: the last line of what a
    failed one raised.
    """
    (spec,) = read_sweeps(folder)
    return _table(spec, study_of(spec))


def _table(spec: SweepSpec, study: optuna.Study) -> pd.DataFrame:
    rows = []
    for trial in study.get_trials(deepcopy=False):
        if VALUES not in trial.user_attrs:
            continue
        runs = [_of_run(rows, spec) for rows in runs_of(spec.trial_folder(trial.number))]
        error = trial.user_attrs.get(ERROR, "").strip()
        rows.append(
            {"trial": trial.number, "state": state_of(trial)}
            | dict(zip(spec.tune.objective, _finals(trial), strict=False))
            | values_of(trial)
            | {"seconds": math.fsum(run.pop("seconds") for run in runs)}
            | pd.DataFrame(runs).mean().to_dict()
            | ({"error": error.splitlines()[-1]} if error else {})
        )
    return pd.DataFrame(rows)


def state_of(trial: FrozenTrial) -> str:
    """How a trial has ended, in a word."""
    if trial.state == TrialState.COMPLETE and not all(map(math.isfinite, trial.values)):
        return "diverged"
    return STATES[trial.state]


def _finals(trial: FrozenTrial) -> list[float]:
    values = trial.values or ([trial.value] if trial.value is not None else [])
    return [value if math.isfinite(value) else math.nan for value in values]


def _of_run(rows: pd.DataFrame, spec: SweepSpec) -> dict[str, float]:
    objective, mode = next(iter(spec.tune.objective.items()))
    numbers, total = rows["round"].to_numpy(), (rows["bytes_down"] + rows["bytes_up"]).to_numpy(float)
    records: list[Any] = rows.to_dict("records")
    values = np.array([value_of(row, objective) for row in records])
    found = {"seconds": rows["wall_seconds"].to_numpy(float)[-1], "rounds": float(numbers[-1])}
    found |= {"bytes": total[-1], "flops": rows["flops"].to_numpy(float)[-1]}
    if not np.isnan(values).all():
        best = np.nanargmax(values) if mode == "max" else np.nanargmin(values)
        found |= {"best": values[best], "best_round": float(numbers[best]), "mean": float(np.nanmean(values))}
    for target in spec.base.get("run.targets") or []:
        reached = total[rows["validation_accuracy"].to_numpy() >= target]
        found[f"bytes_to_{target:g}"] = reached[0] if len(reached) else math.nan
    return found


def write_report(spec: SweepSpec) -> list[Path]:
    """``report/`` in the sweep's folder: trials.csv, trials.md, importance.csv, and pictures; what was written."""
    import matplotlib

    matplotlib.use("Agg")
    study = study_of(spec)
    folder = spec.folder / "report"
    folder.mkdir(exist_ok=True)
    table = _table(spec, study)
    write_whole(folder / "trials.csv", table.to_csv(index=False))
    objective = next(iter(spec.tune.objective))
    write_whole(folder / "trials.md", markdown(ranked(table, objective, spec.tune.objective[objective])))
    written = [folder / "trials.csv", folder / "trials.md"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.simplefilter("ignore", UserWarning)
        for objective, finite in _finite_studies(spec, study):
            importances = _importances(finite)
            if importances:
                path = folder / _named("importance", objective, spec, "csv")
                found = pd.Series(importances, name="importance").rename_axis("key").reset_index()
                write_whole(path, found.assign(trials=len(finite.trials)).to_csv(index=False))
                written.append(path)
            for name, draw in _pictures(finite, importances, objective).items():
                written.append(_saved(draw, folder / _named(name, objective, spec, "png")))
            if figure := _curves(spec, table, objective):
                written.append(save_figure(figure, folder / _named("curves", objective, spec, "png")))
        if len(spec.tune.objective) > 1 and "complete" in set(table.get("state", ())):
            written.append(_front(table, spec, folder / "pareto.png"))
    return written


def ranked(table: pd.DataFrame, objective: str, mode: str) -> pd.DataFrame:
    """The best trials first: those that are complete before the pruned ones, and these before all others."""
    if objective not in table:
        return table
    rank = table["state"].map({"complete": 0, "pruned": 1}).fillna(2)
    return (
        table.assign(_rank=rank)
        .sort_values(["_rank", objective], ascending=[True, mode == "min"], kind="stable")
        .drop(columns="_rank")
    )


def _curves(spec: SweepSpec, table: pd.DataFrame, objective: str) -> Any:
    """The learning curves of an objective, on the axis that the sweep's record has."""
    trials = ranked(table, objective, spec.tune.objective[objective])
    axis = read_record(spec.folder)["tune"]["prune"]["axis"]
    return learning_curves(trials, [spec.trial_folder(n) for n in trials["trial"]], axis, objective, spec.name)


def _named(name: str, objective: str, spec: SweepSpec, ending: str) -> str:
    return f"{name}.{ending}" if len(spec.tune.objective) == 1 else f"{name}-{objective}.{ending}"


def _finite_studies(spec: SweepSpec, study: optuna.Study) -> Iterator[tuple[str, optuna.Study]]:
    """For each objective a study of its own, without the trials that have no value: they have no place in a picture."""
    for position, objective in enumerate(spec.tune.objective):
        copy = optuna.create_study(direction=study.directions[position])
        for trial in study.get_trials(deepcopy=False):
            finals = _finals(trial) if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) else []
            if len(finals) > position and math.isfinite(finals[position]):
                copy.add_trial(
                    create_trial(
                        state=trial.state,
                        value=finals[position],
                        params=trial.params,
                        distributions=trial.distributions,
                        intermediate_values=trial.intermediate_values,
                    )
                )
        if copy.trials:
            yield objective, copy


def _importances(study: optuna.Study) -> dict[str, float]:
    """How much each key matters (PED-ANOVA); empty while there are too few trials to tell."""
    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    searched = [key for key in complete[0].params if all(key in t.params for t in complete)] if complete else []
    varied = [key for key in searched if len({str(trial.params[key]) for trial in complete}) > 1]
    if len(complete) < LEAST_TRIALS or not varied:
        return {}
    try:
        return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(), params=varied)
    except (ValueError, RuntimeError):
        # too few, or all alike
        return {}


def _pictures(study: optuna.Study, importances: Mapping[str, float], objective: str) -> dict[str, Any]:
    """The pictures that can be drawn, as functions of no arguments."""
    from optuna.visualization import matplotlib as draw

    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    keys = sorted({key for trial in complete for key in trial.params})
    pictures: dict[str, Any] = {"history": lambda: draw.plot_optimization_history(study, target_name=objective)}
    if complete and keys:
        pictures["slices"] = lambda: draw.plot_slice(study, target_name=objective)
    if importances:
        evaluator = PedAnovaImportanceEvaluator()
        params = list(importances)
        pictures["importance"] = lambda: draw.plot_param_importances(
            study, evaluator=evaluator, params=params, target_name=objective
        )
    if len(importances) > 1 and len(complete) > 3:
        two = sorted(importances, key=lambda key: -importances[key])[:2]
        pictures["contour"] = lambda: draw.plot_contour(study, params=two, target_name=objective)
    return pictures


def _saved(draw: Any, path: Path) -> Path:
    axes = draw()
    return save_figure(np.ravel(axes)[0].figure, path)


def save_figure(figure: Any, path: Path) -> Path:
    """A whole picture, or the old one."""
    import matplotlib.pyplot as plt

    with replacement_of(path) as staging:
        figure.savefig(staging, format=path.suffix[1:], dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path


def _front(table: pd.DataFrame, spec: SweepSpec, path: Path) -> Path:
    """The first two objectives of all complete trials, and the front among them."""
    import matplotlib.pyplot as plt

    (x, x_mode), (y, y_mode) = list(spec.tune.objective.items())[:2]
    points = table[table["state"] == "complete"]
    figure, axes = plt.subplots(figsize=(7, 5))
    axes.scatter(points[x], points[y], label="trials", color="tab:gray")
    front = points[pareto(points[[x, y]].to_numpy(), [x_mode, y_mode])].sort_values(x)
    axes.plot(front[x], front[y], "o-", label="Pareto front", color="tab:red")
    for _, row in front.iterrows():
        axes.annotate(str(row["trial"]), (row[x], row[y]), textcoords="offset points", xytext=(4, 4))
    axes.set(xlabel=f"{x} ({x_mode})", ylabel=f"{y} ({y_mode})", title=spec.name)
    axes.legend()
    return save_figure(figure, path)


def pareto(values: np.ndarray, modes: Sequence[str]) -> np.ndarray:
    """Which rows of ``values`` [n, objectives] no other is at least as good as in all, and better in one."""
    better = values * np.where(np.asarray(modes) == "max", 1.0, -1.0)
    dominated = [(np.all(better >= row, axis=1) & np.any(better > row, axis=1)).any() for row in better]
    return ~np.asarray(dominated, dtype=bool)


def markdown(table: pd.DataFrame) -> str:
    """A table for a README."""

    def shown(value: Any) -> str:
        if isinstance(value, float):
            return "" if math.isnan(value) else f"{value:.4g}"
        return "" if value is None else str(value).replace("|", "\\|")

    lines = [list(map(str, table.columns)), ["---"] * len(table.columns)]
    lines += [[shown(value) for value in row] for row in table.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
