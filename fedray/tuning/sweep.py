"""A sweep as its driver sees it: which trials are run, what they have reached, and the record of it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optuna.storages import BaseStorage

from fedray.config import dump_yaml, expand, flat, load
from fedray.data.federated import FederatedData
from fedray.errors import UserError, near_miss
from fedray.experiment import Experiment, Own
from fedray.files import write_whole
from fedray.resolve import resolve
from fedray.tracking.tensorboard import declare_columns
from fedray.tuning.axis import STEPS, RoundCost, budget_of, cost_of_a_round, mean, value_of
from fedray.tuning.equal_work import with_axis
from fedray.tuning.pruning import pruner_of
from fedray.tuning.recorded import differing_keys_of
from fedray.tuning.space import Values
from fedray.tuning.spec import RECORD, SweepSpec, first_seed, overridden, read_record
from fedray.tuning.study import ENDED, JOURNAL, Study, is_there, journal, opened, owned, values_of
from fedray.tuning.trial import Assignment, Message, Round, RunEnd
from fedray.tuning.view import View

TRIALS = 30
"""Trials of a sweep, unless it says otherwise or is a grid."""

BASE = {"run.log_clients": False}
"""What trials have unless the base says otherwise."""


@dataclass
class Progress:
    """A running trial: the last value of its objective in each run, and the step that it has reached."""

    values: Values
    finals: list[list[float]] = field(default_factory=list)
    value: float = math.nan
    step: int = 0
    diverged: bool = False


class Sweep:
    """Hands out trials and takes their messages; every fact goes into the study once.

    ``base``: the configuration of all trials but for what is searched, as dotted keys; ``engine``: what the cluster
    adds to it. ``total``: how many trials there are to be. ``budget``: the whole of the axis on which they are
    compared. ``notes``: lines worth telling before it starts.
    """

    def __init__(
        self, spec: SweepSpec, study: Study, base: Mapping[str, Any], total: int, budget: float, notes: Sequence[str]
    ) -> None:
        self.spec, self.folder, self.study, self.base = spec, spec.folder, study, base
        self.total, self.budget, self.notes = total, budget, notes
        self.objectives = list(spec.tune.objective)
        self.engine: Mapping[str, Any] = {}
        self.running: dict[int, Progress] = {}
        self.show = View(quiet=True)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def exhausted(self) -> bool:
        return not self.study.left(self.total)

    @property
    def finished(self) -> bool:
        return self.exhausted and not self.running

    def introduction(self, concurrency: int) -> str:
        """A line about what is to come."""
        done = self.study.count(*ENDED)
        return (
            f"{self.name}: {self.study.wanted(self.total)} trials of {self.base.get('algorithm.name', 'pfedmo')}"
            + (f", {done} done before" if done else "")
            + f", {concurrency} at once, {self.spec.search} -> {self.folder}"
        )

    def next(self) -> Assignment | None:
        """A trial to run; None if none is left."""
        if not self.study.left(self.total):
            return None
        asked = self.study.ask()
        self.running[asked.number] = Progress(asked.values)
        return self.assignment(asked.number, asked.values)

    def done(self, trial: Progress) -> float:
        """How much of the axis a running trial has behind it, from 0 to 1."""
        return trial.step / (STEPS * self.spec.tune.seeds)

    def assignment(self, number: int, values: Values) -> Assignment:
        tune = self.spec.tune
        base = overridden(self.base, values) | dict(self.engine)
        first = first_seed(base)
        runs = [
            base
            | {"run.output": str(self.spec.trial_folder(number)), "run.name": f"seed-{seed}", "run.seed": seed}
            | {"run.resume": "auto", "run.eval_test": False}
            for seed in range(first, first + tune.seeds)
        ]
        return Assignment(str(number), runs, self.objectives[0], tune.prune.axis, self.budget)

    def hear(self, key: str, message: Message) -> bool:
        """Take a message of a running trial; whether the trial is to stop."""
        number = int(key)
        trial = self.running[number]
        if isinstance(message, Round):
            return self._round(number, trial, message)
        if isinstance(message, RunEnd):
            trial.diverged |= message.status == "diverged"
            trial.finals.append([value_of(message.row, name) for name in self.objectives])
            trial.value = mean([final[0] for final in trial.finals])
            last = trial.diverged or message.run + 1 == self.spec.tune.seeds
            return not last and self._reached(number, trial, [(message.run + 1) * STEPS], may_stop=True)
        if message.interrupted:
            # it stays a running one in the study, and goes on with the sweep
            del self.running[number]
        elif message.error is not None:
            self.failed(key, message.error)
        elif trial.diverged:
            self.study.complete(number, [math.nan] * len(self.objectives))
            self._ended(number, "diverged")
        else:
            self.study.complete(number, [mean(column) for column in zip(*trial.finals, strict=True)])
            self._ended(number, "complete")
            self.write_best()
        return False

    def _round(self, number: int, trial: Progress, message: Round) -> bool:
        value = value_of(message.row, self.objectives[0])
        trial.value = mean([*(final[0] for final in trial.finals), value])
        steps = [message.run * STEPS + step for step in message.steps]
        # at the end there is nothing to save
        return self._reached(number, trial, steps, may_stop=not message.last)

    def _reached(self, number: int, trial: Progress, steps: Sequence[int], may_stop: bool) -> bool:
        """A running trial has its value at these steps; whether it is to stop."""
        trial.step = steps[-1]
        stop = len(self.objectives) == 1 and self.study.report(number, steps, trial.value) and may_stop
        if stop:
            self.study.prune(number)
            self._ended(number, "pruned")
        else:
            self.show.progress()
        return stop

    def write_best(self) -> None:
        """best.yaml, or one file for each trial of the Pareto front: configurations for ``fedray run``."""
        best = self.study.best()
        single = len(self.objectives) == 1
        names = {"best.yaml" if single else f"best-{trial.number:04d}.yaml": trial for trial in best}
        for name, trial in names.items():
            settings = overridden(self.base, values_of(trial)) | {"run.name": f"{self.folder.name}-{trial.number}"}
            if "run.log_clients" not in self.spec.base:
                del settings["run.log_clients"]
            write_whole(self.folder / name, dump_yaml(expand(settings)))
        for old in set(self.folder.glob("best*.yaml")) - {self.folder / name for name in names}:
            old.unlink()

    def lost(self, key: str, error: str) -> None:
        """The process of a running trial died; the trial goes on from its last checkpoint."""
        self.running[int(key)] = Progress(self.running[int(key)].values)
        self.show.say(f"{self.name}: trial {key}: {error}; it goes on from its last checkpoint")

    def failed(self, key: str, error: str) -> None:
        """A running trial can't be ended."""
        number = int(key)
        folder = self.spec.trial_folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "error.txt", error.rstrip() + "\n")
        self.study.fail(number, error)
        self._ended(number, "failed")
        self.show.say(f"{self.name}: trial {number} failed: {error.strip().splitlines()[-1]} ({folder / 'error.txt'})")

    def _ended(self, number: int, how: str) -> None:
        trial = self.running.pop(number)
        self.show.ended(self, number, trial, how)


def trials_of(spec: SweepSpec, base: Mapping[str, Any]) -> int:
    """How many trials a sweep has whose resolved base is ``base``; of a grid, not more than there are combinations."""
    if spec.search == "grid":
        combinations = len(spec.space.grid(base))
        return min(spec.tune.trials or combinations, combinations)
    return spec.tune.trials or TRIALS


@contextlib.contextmanager
def opened_sweep(spec: SweepSpec, own: Own, say: Callable[[str], None] = lambda line: None) -> Iterator[Sweep]:
    """The sweep of ``spec`` at the trial that its folder has reached; ``own`` holds the data set, ``say`` shows a line.

    Raises :class:`UserError` for what can't be searched as asked, or if the folder belongs to another sweep or process.
    """
    spec = with_validation(spec, own)
    if own.given:
        spec = replace(spec, base={**spec.base, "run.given": own.given})
    base = {**BASE, **spec.base}
    experiment, data = resolve(load(base), own)
    resolved = flat(experiment.config.model_dump(mode="json"))
    _check_objectives(spec, data)
    _check_conditions(spec, resolved)
    costs, models = _check_values(spec, base, own)
    _check_seeds(spec, experiment.config.run.seed)
    with owned(spec.folder, say):
        spec, unequal = with_axis(spec, cost_of_a_round(experiment, data), costs)
        record = {"inputs": {**experiment.inputs, **models}, **spec.record()}
        begun = _prepare(spec, record)
        tune, prune = spec.tune, spec.tune.prune
        total = trials_of(spec, resolved)
        first, notes = _first(spec, resolved)
        notes += [*unequal, *own.notes(tune.seeds), *experiment.facts.notes]
        try:
            spec.folder.mkdir(parents=True, exist_ok=True)
            storage = storage_of(spec)
            if begun:
                _check_study(spec, storage)
            write_whole(spec.folder / RECORD, dump_yaml(record))
        except OSError as error:
            raise UserError(f"can't write to {spec.folder}: {error.strerror}") from None
        study = Study(
            storage=storage,
            name=study_name(spec),
            space=spec.space,
            base=resolved,
            directions=["maximize" if way == "max" else "minimize" for way in tune.objective.values()],
            sampler=spec.search,
            pruner=pruner_of(prune, tune.seeds),
            seed=tune.seed,
            first=first,
            population=max(4, min(50, total // 5)),
        )
        declare_columns(spec.folder, spec.space.keys(), list(tune.objective))
        yield Sweep(spec, study, base, total, budget_of(experiment, data, prune.axis), notes)


def _first(spec: SweepSpec, resolved: Mapping[str, Any]) -> tuple[list[Values], list[str]]:
    """What is tried before any other: the base itself, and what the file says; and a line about what can't be."""
    found: list[Values] = []
    notes: list[str] = []
    for values in ({}, *spec.first):
        try:
            spec.space.stored(values, resolved)
            found.append(dict(values))
        except ValueError as error:
            what = ", ".join(f"{key}={value}" for key, value in values.items()) or "the base configuration"
            notes.append(f"{spec.name}: {what} is outside the space, and not tried first: {error}")
    return found, notes if spec.search != "grid" else []


def study_name(spec: SweepSpec) -> str:
    """A storage of the user's may hold other studies; the folder of a sweep that has its own may be moved."""
    return spec.name if spec.tune.storage else "sweep"


def storage_of(spec: SweepSpec) -> BaseStorage:
    """Where the study is kept."""
    return opened(spec.tune.storage) if spec.tune.storage else journal(spec.folder / JOURNAL)


def with_validation(spec: SweepSpec, own: Own) -> SweepSpec:
    """``spec`` with a validation set: a tenth of the training set unless the base says otherwise."""
    assert own.source is not None
    if "data.validation_samples" in spec.base or "data.validation_samples" in spec.described:
        return spec
    return replace(spec, base={**spec.base, "data.validation_samples": len(own.source.y_train) // 10})


def _check_objectives(spec: SweepSpec, data: FederatedData) -> None:
    if "virtual_seconds" in spec.tune.objective:
        raise UserError("tune.objective: virtual_seconds is not recorded without a virtual clock; use bytes or flops")
    if "train_accuracy" in spec.tune.objective and not len(data.train_subset):
        raise UserError("tune.objective: train_accuracy needs run.eval_train_samples, the samples to evaluate it on")
    if "validation_accuracy" in spec.tune.objective and not len(data.validation):
        raise UserError("tune.objective: validation_accuracy needs data.validation_samples, a tenth of all unless set")


def _check_conditions(spec: SweepSpec, resolved: Mapping[str, Any]) -> None:
    known = [*resolved, *spec.space.keys()]
    for parameter in spec.space.parameters:
        for key, _ in parameter.when:
            if key not in known:
                where = f"{spec.name}: spaces.{spec.tune.space}: {parameter.key}"
                raise UserError(f"{where}: when names {key}, which is no key here{near_miss(key, known)}")


def _check_values(
    spec: SweepSpec, base: Mapping[str, Any], own: Own
) -> tuple[dict[str, list[RoundCost]], dict[str, str]]:
    """All ends of ranges and listed values must make a configuration, before anything is run.

    Gives what a round costs with each of these values of each searched key, and digests of the models that are among
    them, by a name for each.
    """
    costs: dict[str, list[RoundCost]] = {}
    models: dict[str, str] = {}
    for values in spec.space.extremes(base):
        experiment, data = _resolved_with(values, spec, base, own)
        # the key that is moved comes last, after those on which it depends
        costs.setdefault([*values][-1], []).append(cost_of_a_round(experiment, data))
        if "model.name" in values:
            models[f"model {values['model.name']}"] = experiment.inputs["code of the model"]
    for values in spec.first:
        _resolved_with(values, spec, base, own)
    return costs, models


def _resolved_with(
    values: Values, spec: SweepSpec, base: Mapping[str, Any], own: Own
) -> tuple[Experiment, FederatedData]:
    try:
        return resolve(load(overridden(base, values)), own)
    except UserError as error:
        shown = ", ".join(f"{key}={value}" for key, value in values.items())
        raise UserError(f"{spec.name}: spaces.{spec.tune.space} with {shown}: {error}") from None


def _check_study(spec: SweepSpec, storage: BaseStorage) -> None:
    if any(spec.folder.glob("trials/*")) and not is_there(storage, study_name(spec)):
        raise UserError(
            f"{spec.folder} has trials, but their study {study_name(spec)!r} is not in {spec.tune.storage or JOURNAL}: "
            "use tune.resume=false to start over (the old one is renamed)"
        )


def _check_seeds(spec: SweepSpec, first: int) -> None:
    if first >= 2**62:
        raise UserError(f"{spec.name}: run.seed={first} leaves no room for further seeds: use less than 2**62")


def _prepare(spec: SweepSpec, record: Mapping[str, Any]) -> bool:
    """Make the sweep's folder, or see that it can go on; whether it had begun before."""
    folder, resume = spec.folder, spec.tune.resume
    begun = spec.has_begun
    if not begun and spec.tune.storage and is_there(opened(spec.tune.storage), study_name(spec)):
        raise UserError(
            f"tune.storage={spec.tune.storage} has a study {spec.name} already, and {folder} is not to go on with it: "
            "choose another tune.name"
        )
    if resume is False and folder.exists():
        number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.bak-{n}").exists())
        folder.rename(folder.with_name(f"{folder.name}.bak-{number}"))
    if begun:
        old = read_record(folder)
        differ = differing_keys_of(old, record)
        if differ:
            raise UserError(
                f"{folder} holds another sweep ({', '.join(differ[:6])} differ{'s' if len(differ) == 1 else ''}): use "
                "tune.resume=false to start over (the old one is renamed), or another tune.name"
            )
        if "inputs" not in old and resume is not True:
            raise UserError(
                f"{folder / RECORD} does not say what its trials were made from: tune.resume=true takes it for the "
                "same sweep, tune.resume=false starts over (the old one is renamed)"
            )
        return True
    if resume is True:
        raise UserError(f"tune.resume=true, but there is no sweep in {folder}; use tune.resume=auto")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and is not a sweep's folder: choose another tune.name or tune.output")
    return False
