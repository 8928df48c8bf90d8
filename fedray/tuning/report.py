"""Makes tables and pictures of a sweep's results from the files in its folder."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from optuna.exceptions import ExperimentalWarning
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState, create_trial

from fedray.config import read_file
from fedray.errors import last_line
from fedray.results.tables import markdown
from fedray.tuning.axis import amount
from fedray.tuning.curves import learning_curves, runs_of
from fedray.tuning.recorded import with_recorded_objective
from fedray.tuning.spec import SweepSpec, read_record, read_sweeps
from fedray.tuning.storage import study_of
from fedray.tuning.study import ERROR, VALUES, is_finite, sampled_values
from fedray.util.files import replacement_of, write_whole

STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
}
"""The names of the states of trials that have been started. For Optuna, trials that diverged are complete."""

LEAST_TRIALS = 8
"""The number of complete trials below which the importance of keys is not estimated."""


def trial_table(folder: Path) -> pd.DataFrame:
    """Returns the results of a sweep as a table with a row for each trial that has been started. ``folder`` is the
    sweep's folder. Raises :class:`UserError` if it holds no sweep.

    Columns:

    - ``trial``: the number of the trial; ``state``: complete, diverged, pruned, failed or running.
    - the final value of each objective, such as ``validation_accuracy``, and the sampled value of each searched key,
      such as ``train.lr``.
    - ``seconds``: the time that the trial's runs took, added up.
    - ``error``: the last line of the error, if the trial failed.

    Further columns are means over the trial's runs, of which there is one for each seed:

    - ``rounds``, ``bytes`` (sent to and from clients) and ``flops`` of the whole run, ``epsilon`` of a private one.
    - ``best``, ``best_round``: the best value of the first objective, and its round; ``mean``: the objective's mean
      over the rounds, that is, the area under its curve.
    - ``bytes_to_<target>`` for each of run.targets: the bytes until the validation metric reached the target, as a mean
      over the trial's runs; empty if one of them did not reach the target.
    """
    (spec,) = read_sweeps(folder)
    return _table(spec, study_of(spec))


def _table(spec: SweepSpec, study: optuna.Study) -> pd.DataFrame:
    rows = []
    for trial in study.get_trials(deepcopy=False):
        if VALUES not in trial.user_attrs:
            continue
        folder = spec.trial_folder(trial.number)
        runs = pd.DataFrame([_of_run(rows, spec, folder) for rows in runs_of(folder)])
        seconds = float(runs.pop("seconds").sum()) if len(runs) else 0.0
        error = trial.user_attrs.get(ERROR, "")
        rows.append(
            {"trial": trial.number, "state": state_of(trial)}
            | dict(zip(spec.tune.objective, _finals(trial), strict=False))
            | sampled_values(trial)
            | {"seconds": seconds, **runs.mean().to_dict()}
            # a run that did not reach a target has no number of bytes, and so the mean has none
            | runs.filter(like="bytes_to_").mean(skipna=False).to_dict()
            | ({"error": last_line(error)} if error else {})
        )
    return pd.DataFrame(rows)


def state_of(trial: FrozenTrial) -> str:
    """Returns the state of a trial of Optuna in one word, for tables: complete, diverged, pruned, failed or running.
    For Optuna a trial that diverged is complete; here it is not. The trial must have been started."""
    if trial.state == TrialState.COMPLETE and not is_finite(trial):
        return "diverged"
    return STATES[trial.state]


def _finals(trial: FrozenTrial) -> list[float]:
    values = trial.values or ([trial.value] if trial.value is not None else [])
    return [value if math.isfinite(value) else math.nan for value in values]


def _followed(spec: SweepSpec, trial: Path) -> tuple[str, str]:
    """Returns the column of the validation metric whose targets are followed, and whether more or less of it is better
    ("max", "min"): that of an objective, or else the main metric of the runs in ``trial``, the folder of a trial."""
    for name, way in spec.tune.objective.items():
        if name.startswith("validation_"):
            return name, str(way)
    task = read_file(next(trial.glob("seed-*/config.yaml")))["task"]
    return f"validation_{task['metric']}", task["mode"]


def _of_run(rows: pd.DataFrame, spec: SweepSpec, trial: Path) -> dict[str, Any]:
    objective, mode = next(iter(spec.tune.objective.items()))
    last, values, total = rows.iloc[-1], amount(rows, objective), amount(rows, "bytes")
    found = {"seconds": last["wall_seconds"], "rounds": last["round"], "bytes": total.iloc[-1], "flops": last["flops"]}
    found |= {name: last[name] for name in ("virtual_seconds", "joules") if math.isfinite(last.get(name, math.nan))}
    if "epsilon" in rows and (spent := rows["epsilon"].dropna()).any():
        # of the last round that was evaluated
        found["epsilon"] = spent.iloc[-1]
    if values.notna().any():
        best = values.idxmax() if mode == "max" else values.idxmin()
        found |= {"best": values[best], "best_round": rows["round"][best], "mean": values.mean()}
    for target in spec.base.get("run.targets") or []:
        validated, way = _followed(spec, trial)
        reached = total[rows[validated] <= target if way == "min" else rows[validated] >= target]
        found[f"bytes_to_{target:g}"] = reached.iloc[0] if len(reached) else math.nan
    return found


def write_report(spec: SweepSpec) -> list[Path]:
    """Writes tables (trials.csv, trials.md, importance.csv) and pictures (PNG) about the trials of a sweep to the
    folder ``report/`` in the sweep's folder. ``spec`` describes the sweep.

    Returns the paths of the files that were written. Files that need more trials than the sweep has so far are not
    written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from optuna.visualization import matplotlib as draw

    spec = with_recorded_objective(spec)
    study = study_of(spec)
    folder = spec.folder / "report"
    folder.mkdir(exist_ok=True)
    table = _table(spec, study)
    write_whole(folder / "trials.csv", table.to_csv(index=False))
    objective = next(iter(spec.tune.objective))
    write_whole(folder / "trials.md", markdown(rank_trials(table, objective, spec.tune.objective[objective])))
    written = [folder / "trials.csv", folder / "trials.md"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.simplefilter("ignore", UserWarning)
        for objective, finite in _finite_studies(spec, study):
            suffix = f"-{objective}" if len(spec.tune.objective) > 1 else ""
            if importances := _importances(finite):
                written.append(folder / f"importance{suffix}.csv")
                found = pd.Series(importances, name="importance").rename_axis("key").reset_index()
                write_whole(written[-1], found.assign(trials=len(finite.trials)).to_csv(index=False))
            for name, axes in _pictures(finite, importances, objective):
                written.append(save_figure(np.ravel(axes)[0].figure, folder / f"{name}{suffix}.png"))
            if figure := _curves(spec, table, objective):
                written.append(save_figure(figure, folder / f"curves{suffix}.png"))
        if len(spec.tune.objective) > 1 and "complete" in set(table.get("state", ())):
            names = [f"{name} ({mode})" for name, mode in list(spec.tune.objective.items())[:2]]
            axes = draw.plot_pareto_front(study, target_names=names, targets=lambda trial: trial.values[:2])
            written.append(save_figure(axes.figure, folder / "pareto.png"))
    return written


def rank_trials(table: pd.DataFrame, objective: str, mode: str | None) -> pd.DataFrame:
    """Returns ``table``, a table of trials as :func:`trial_table` returns it, with its rows sorted: complete trials
    first, then pruned ones, then all others. Within each of these three groups the best trial comes first.

    ``objective`` is the column to sort by, and ``mode`` (max or min) says whether large or small values are good. If
    there is no such column, the table is returned as it is.
    """
    if objective not in table:
        return table
    rank = table["state"].map({"complete": 0, "pruned": 1}).fillna(2)
    return (
        table.assign(_rank=rank)
        .sort_values(["_rank", objective], ascending=[True, mode == "min"], kind="stable")
        .drop(columns="_rank")
    )


def _curves(spec: SweepSpec, table: pd.DataFrame, objective: str) -> Any:
    trials = rank_trials(table, objective, spec.tune.objective[objective])
    axis = read_record(spec.folder)["tune"]["pruner"]["axis"]
    return learning_curves(trials, [spec.trial_folder(n) for n in trials["trial"]], axis, objective, spec.name)


def _finite_studies(spec: SweepSpec, study: optuna.Study) -> Iterator[tuple[str, optuna.Study]]:
    """Yields the name of each objective together with a study of this objective alone, for pictures. The study has no
    trials whose value is missing or not finite.

    Optuna's pictures show one objective, and can't show infinite or missing values.
    """
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
    """Returns how much each searched key matters for the objective of ``study``, as numbers by key, computed by
    PED-ANOVA. They sum to 1.

    Keys that some complete trials lack, or that have the same value in all of them, are left out. The result is empty
    if there are fewer than :data:`LEAST_TRIALS` complete trials, or if Optuna finds too few different values.
    """
    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    searched = [key for key in complete[0].params if all(key in t.params for t in complete)] if complete else []
    varied = [key for key in searched if len({str(trial.params[key]) for trial in complete}) > 1]
    if len(complete) < LEAST_TRIALS or not varied:
        return {}
    try:
        return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(), params=varied)
    except (ValueError, RuntimeError):
        # there are too few trials, or their values are all the same
        return {}


def _pictures(study: optuna.Study, importances: Mapping[str, float], objective: str) -> Iterator[tuple[str, Any]]:
    """Yields Optuna's pictures of a study, as far as it has enough trials: the name of the file, such as "history", and
    the axes."""
    from optuna.visualization import matplotlib as draw

    yield "history", draw.plot_optimization_history(study, target_name=objective)
    if any(trial.params for trial in study.trials if trial.state == TrialState.COMPLETE):
        yield "slices", draw.plot_slice(study, target_name=objective)
    # the keys come in the order of their importance
    keys = list(importances)
    if keys:
        evaluator = PedAnovaImportanceEvaluator()
        yield "importance", draw.plot_param_importances(study, evaluator, params=keys, target_name=objective)
    if len(keys) > 1:
        yield "contour", draw.plot_contour(study, params=keys[:2], target_name=objective)


def save_figure(figure: Any, path: Path) -> Path:
    """Writes a Matplotlib ``figure`` to the file ``path``, in the format of its suffix, such as .png. Closes the
    figure, and returns the path.

    If the process is killed while it writes, an earlier picture at that path stays as it was.
    """
    import matplotlib.pyplot as plt

    with replacement_of(path) as staging:
        figure.savefig(staging, format=path.suffix[1:], dpi=120, bbox_inches="tight")
    plt.close(figure)
    return path
