"""Opens a sweep: checks it completely before the first trial runs, and creates or finds its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from optuna.storages import BaseStorage

from fedray.config import dump_yaml, flat, load
from fedray.core.task import Task
from fedray.data.federated import FederatedData
from fedray.errors import UserError, near_miss
from fedray.experiment.custom import CustomObjects
from fedray.experiment.experiment import Experiment
from fedray.experiment.recorded import check_column
from fedray.experiment.resolve import resolve
from fedray.tracking.tensorboard import declare_columns
from fedray.tuning.axis import RoundCost, budget_of, choose_axis, cost_of_a_round
from fedray.tuning.pruning import make_pruner
from fedray.tuning.recorded import list_keys, record_keys_that_differ
from fedray.tuning.settings import COSTS, section
from fedray.tuning.space import Values
from fedray.tuning.spec import RECORD, SweepSpec, merge_settings, read_record
from fedray.tuning.storage import JOURNAL, has_study, hold_study, open_storage, rename_study, storage_of, study_name
from fedray.tuning.study import Study
from fedray.tuning.sweep import Sweep
from fedray.util.files import free_name, write_whole
from fedray.warning import WARNING

TRIALS = 30
"""The number of trials of a sweep that is not a grid and does not set ``tune.trials``."""

BASE = {"run.log_clients": False}
"""The default settings of all trials, which the base of a sweep can replace."""


@contextlib.contextmanager
def open_sweep(
    spec: SweepSpec, custom: CustomObjects, say: Callable[[str], None] = lambda line: None
) -> Iterator[Sweep]:
    """A context with a :class:`Sweep` that is ready to run, as ``spec`` describes it. The sweep is new, or continues
    the one in its folder.

    Before any trial runs, it is checked that a run is possible with both ends of every searched range and with all
    listed values. The folder is locked against other processes until the context ends. ``custom`` has the data set and
    the user's objects, and ``say`` shows a line to the user. Raises :class:`UserError` if the search is not possible as
    it was asked for, or if the folder belongs to another sweep or another process.
    """
    spec = _with_validation(spec, custom)
    if custom.names:
        spec = replace(spec, base={**spec.base, "run.given": custom.names})
    base = {**BASE, **spec.base}
    experiment, data = resolve(load(base), custom)
    resolved = flat(experiment.config.model_dump(mode="json"))
    spec = _with_objective(spec, experiment, data)
    _check_conditions(spec, resolved)
    costs, models = _check_values(spec, base, custom)
    if (first_seed := experiment.config.run.seed) >= 2**62:
        raise UserError(f"{spec.name}: run.seed={first_seed} leaves no room for further seeds: use less than 2**62")
    with hold_study(spec.folder, say):
        spec, unequal = choose_axis(spec, cost_of_a_round(experiment, data), costs)
        record = {"inputs": {**experiment.inputs, **models}, **spec.record()}
        storage = _open_folder(spec, record)
        first, outside = _first_values(spec, resolved)
        warnings = [line for line in experiment.notes if line.startswith(WARNING)]
        notes = [*_against_nature(spec, experiment.task), *outside, *unequal, *custom.notes(spec.tune.seeds), *warnings]
        total = number_of_trials(spec, resolved)
        if spec.sampler == "grid" and total < (whole := len(spec.space.grid(resolved))):
            notes.append(f"{spec.name}: {total} of the grid's {whole:,} combinations are tried, drawn by tune.seed")
        study = Study(
            storage=storage,
            name=study_name(spec),
            space=spec.space,
            base=resolved,
            directions=["maximize" if way == "max" else "minimize" for way in spec.tune.objective.values()],
            sampler=spec.sampler,
            pruner=make_pruner(spec.tune.pruner, spec.tune.seeds),
            seed=spec.tune.seed,
            first=first,
            population=max(4, min(50, total // 5)),
            most=total,
        )
        declare_columns(spec.folder, spec.space.keys(), list(spec.tune.objective))
        yield Sweep(spec, study, base, total, budget_of(experiment, data, spec.tune.pruner.axis), notes)


def _with_validation(spec: SweepSpec, custom: CustomObjects) -> SweepSpec:
    """Returns ``spec`` with a validation set in its base, because trials are compared on it. Its size is
    ``data.validation_samples`` if the base sets or the space searches that key, and otherwise a tenth of the training
    set."""
    assert custom.source is not None
    if "data.validation_samples" in spec.base or "data.validation_samples" in spec.raw_space:
        return spec
    return replace(spec, base={**spec.base, "data.validation_samples": len(custom.source.y_train) // 10})


def number_of_trials(spec: SweepSpec, base: Mapping[str, Any]) -> int:
    """Returns how many trials the sweep ``spec`` has: ``tune.trials``, or 30 if that key is not set. A grid search has
    one trial for each combination of values, or fewer if ``tune.trials`` is smaller.

    ``base`` is the configuration without searched values, by dotted key. Some keys may be searched only under
    conditions, which can depend on this configuration.
    """
    if spec.sampler == "grid":
        combinations = len(spec.space.grid(base))
        return min(spec.tune.trials or combinations, combinations)
    return spec.tune.trials or TRIALS


def _first_values(spec: SweepSpec, resolved: Mapping[str, Any]) -> tuple[list[Values], list[str]]:
    """Returns the values that are tried before any others, a dict for each trial: those of the base, then those that
    the space file lists under ``first``.

    The second list has lines for the user about values that can't be tried, because they are outside the space. A grid
    tries only its combinations, so that nobody expects it to try the base.
    """
    found: list[Values] = []
    notes: list[str] = []
    for values in ({}, *spec.first):
        try:
            spec.space.stored(values, resolved)
            found.append(dict(values))
        except ValueError as error:
            what = ", ".join(f"{key}={value}" for key, value in values.items()) or "the base configuration"
            line = f"{spec.name}: {what} is not tried first, because it is outside the space: {error}"
            if values:
                notes.append(f"{WARNING}{line}")
            elif spec.sampler != "grid":
                notes.append(line)
    return found, notes


def _with_objective(spec: SweepSpec, experiment: Experiment, data: FederatedData) -> SweepSpec:
    """Returns ``spec`` with an objective, by which trials are compared, and its direction. The default is the task's
    main metric on the validation set, such as ``validation_accuracy``. With private layers it is the clients' training
    loss, because the global model lacks what clients have learnt of these layers. Unless a direction is given, metrics
    have their own, and less is better of all else.

    Raises :class:`UserError` for an objective that no trial would record.
    """
    task = experiment.task
    default = {"train_loss": "min"} if experiment.private else {f"validation_{task.main}": task.mode}
    asked: Mapping[str, str | None] = spec.tune.objective or default
    axis = spec.tune.pruner.axis
    if axis in ("virtual_seconds", "joules") and not experiment.config.system.is_on:
        raise UserError(f"tune.pruner.axis={axis} needs a virtual clock (system.*)")
    for name in asked:
        splits, others = ("validation", "train"), ("train_loss", *COSTS)
        check_column("tune.objective", name, splits, others, experiment.config, task, data)
        if experiment.private and name not in others:
            raise UserError(
                f"tune.objective: {name} is that of the global model, whose private layers are the initial ones; use "
                "train_loss, the loss of clients' own models"
            )
    directed = {name: way or natural_way(name, task) for name, way in asked.items()}
    return replace(spec, tune=spec.tune.model_copy(update={"objective": directed}))


def natural_way(column: str, task: Task) -> Literal["max", "min"]:
    """Returns whether more of a ``column`` of metrics.csv is better, "max", or less, "min"."""
    known = task.metrics.get(column.partition("_")[2])
    return "max" if known is not None and known.mode == "max" else "min"


def _against_nature(spec: SweepSpec, task: Task) -> Iterator[str]:
    """Yields a warning for each objective that is searched in the direction in which it gets worse."""
    for name, way in spec.tune.objective.items():
        if way != natural_way(name, task):
            words = {"max": "more", "min": "less"}
            yield (
                f"{WARNING}{spec.name}: tune.objective looks for {words[str(way)]} {name}, although "
                f"{words[natural_way(name, task)]} of it is better"
            )


def _check_conditions(spec: SweepSpec, resolved: Mapping[str, Any]) -> None:
    known = [*resolved, *spec.space.keys()]
    for parameter in spec.space.parameters:
        for key, _ in parameter.when:
            if key not in known:
                where = f"{spec.name}: spaces.{spec.tune.space}: {parameter.key}"
                raise UserError(f"{where}: when names {key}, which is no key here{near_miss(key, known)}")


def _check_values(
    spec: SweepSpec, base: Mapping[str, Any], custom: CustomObjects
) -> tuple[dict[str, list[RoundCost]], dict[str, str]]:
    """Checks before the first trial that both ends of every searched range and all listed values make a possible
    configuration.

    Returns two dicts: the costs of a round with these values, as a list for each searched key; and the digests of the
    code of the searched models, by ``model NAME``. Raises :class:`UserError` for a value that makes no possible
    configuration.
    """
    costs: dict[str, list[RoundCost]] = {}
    models: dict[str, str] = {}
    for values in spec.space.extremes(base):
        experiment, data = _resolve_with(values, spec, base, custom)
        # the searched key comes last, after the keys on which it depends
        costs.setdefault([*values][-1], []).append(cost_of_a_round(experiment, data))
        if "model.name" in values:
            models[f"model {values['model.name']}"] = experiment.inputs["code of the model"]
    for values in spec.first:
        _resolve_with(values, spec, base, custom)
    return costs, models


def _resolve_with(
    values: Values, spec: SweepSpec, base: Mapping[str, Any], custom: CustomObjects
) -> tuple[Experiment, FederatedData]:
    try:
        # trials leave the test set alone
        return resolve(load({**merge_settings(base, values), "run.eval_test": False}), custom)
    except UserError as error:
        shown = ", ".join(f"{key}={value}" for key, value in values.items())
        raise UserError(f"{spec.name}: spaces.{spec.tune.space} with {shown}: {error}") from None


def _open_folder(spec: SweepSpec, record: Mapping[str, Any]) -> BaseStorage:
    """Creates the sweep's folder with ``record`` in it (sweep.yaml), or checks that the sweep in the folder can be
    continued. Returns the storage of the sweep's study."""
    is_continued = _prepare_folder(spec, record)
    try:
        spec.folder.mkdir(parents=True, exist_ok=True)
        if not is_continued:
            # first of all files, as a folder without it is no sweep's
            write_whole(spec.folder / RECORD, dump_yaml(record))
        storage = storage_of(spec)
        if is_continued and any(spec.folder.glob("trials/*")) and not has_study(storage, study_name(spec)):
            raise UserError(
                f"{spec.folder} has trials, but their study {study_name(spec)!r} is not in "
                f"{spec.tune.storage or JOURNAL}: use tune.resume=false to start over (the old folder is renamed)"
            )
        write_whole(spec.folder / RECORD, dump_yaml(record))
    except OSError as error:
        raise UserError(f"can't write to {spec.folder}: {error.strerror}") from None
    return storage


def _prepare_folder(spec: SweepSpec, record: Mapping[str, Any]) -> bool:
    """Returns whether the folder of ``spec`` holds this sweep, which is then continued. If the sweep starts over, the
    old folder is renamed.

    ``record`` is the record (sweep.yaml) that the sweep would write. Raises :class:`UserError` if the folder holds
    something else.
    """
    folder, resume = spec.folder, spec.tune.resume
    if spec.has_begun:
        old = read_record(folder)
        if differ := record_keys_that_differ(old, record):
            raise UserError(
                f"{folder} holds another sweep ({list_keys(differ)}): use tune.resume=false to start over (the old "
                "folder is renamed), or another tune.name"
            )
        if "inputs" not in old and resume is not True:
            raise UserError(
                f"{folder / RECORD} does not say what its trials were made from: tune.resume=true takes it for the "
                "same sweep, tune.resume=false starts over (the old folder is renamed)"
            )
        return True
    in_storage = spec.tune.storage is not None and has_study(open_storage(spec.tune.storage), study_name(spec))
    is_own = (folder / RECORD).exists() and section(read_record(folder), "tune", "").get("storage") == spec.tune.storage
    if in_storage and not (resume is False and is_own):
        raise UserError(
            f"tune.storage={spec.tune.storage} has a study {spec.name} already, which is not the one of {folder}: "
            "choose another tune.name"
        )
    if resume is True:
        raise UserError(f"tune.resume=true, but there is no sweep in {folder}; use tune.resume=auto")
    if resume is False and folder.exists():
        aside = free_name(folder)
        if in_storage:
            rename_study(
                str(spec.tune.storage), study_name(spec), f"{study_name(spec)}{aside.name[len(folder.name) :]}"
            )
        folder.rename(aside)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not a sweep's folder: choose another tune.name or tune.output")
    return False
