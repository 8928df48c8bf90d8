"""A sweep's record: an Optuna study that one process writes, each fact once.

Trials that are running when the process dies are handed out again, with the values that they had.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, CmaEsSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from fedray.errors import UserError
from fedray.tracking.lock import PATIENCE, folder_lock
from fedray.tuning.space import Space, Values

optuna.logging.set_verbosity(optuna.logging.WARNING)

JOURNAL = "study.journal"
"""A study's own storage, in its sweep's folder."""

ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)

VALUES, ERROR = "values", "error"
"""Attributes of a trial: what was sampled, as JSON, and why it failed."""


@dataclass(frozen=True)
class Asked:
    """A trial to run: its number in the study, and a value for each searched key."""

    number: int
    values: Values


class Study:
    """``space`` searched in the study ``name`` of ``storage``; ``base``: the keys that are not searched.

    ``directions``: maximize or minimize, for each objective. ``first``: values that are tried before any other.
    ``population``: the size of NSGA-II's generations, of which the first is random.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        space: Space,
        base: Mapping[str, Any],
        directions: Sequence[Literal["maximize", "minimize"]],
        sampler: str = "tpe",
        pruner: BasePruner | None = None,
        seed: int = 0,
        first: Sequence[Values] = (),
        population: int = 50,
    ) -> None:
        self.space, self.base, self.sampler, self.seed, self.population = space, base, sampler, seed, population
        self._study = optuna.create_study(
            storage=storage,
            study_name=name,
            directions=list(directions),
            pruner=pruner or optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        self._running: dict[int, Trial] = {}
        self._left = [trial for trial in self.trials if trial.state == TrialState.RUNNING]
        grid = space.grid(base) if sampler == "grid" else []
        # a process that was killed may have queued a part
        queued = [trial.system_attrs.get("fixed_params") for trial in self.trials]
        for values in (*first, *grid):
            if (stored := space.stored(values, base)) not in queued:
                queued.append(stored)
                self._study.enqueue_trial(stored)

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, by number; those in a queue too."""
        return self._study.get_trials(deepcopy=False)

    @property
    def interrupted(self) -> int:
        """How many trials were running when an earlier process died, and have not been handed out again."""
        return len(self._left)

    def best(self) -> list[FrozenTrial]:
        """The best trial, or the Pareto front of several objectives; empty as long as none has reached anything."""
        if not self.count(TrialState.COMPLETE):
            return []
        # Optuna copies all trials for a front
        best = [self._study.best_trial] if len(self._study.directions) == 1 else self._study.best_trials
        return [trial for trial in best if all(map(math.isfinite, trial.values))]

    def count(self, *states: TrialState) -> int:
        """How many trials are in one of ``states``."""
        return sum(trial.state in states for trial in self.trials)

    def ask(self) -> Asked:
        """The next trial: one that was running when an earlier process died, else a new one."""
        if self._left:
            frozen = self._left.pop(0)
            trial = Trial(self._study, frozen._trial_id)
        else:
            # a sampler that starts anew with a process would repeat itself
            self._study.sampler = self._make_sampler(len(self.trials))
            trial = self._study.ask()
        # what an interrupted trial has drawn already is drawn again the same
        values = self.space.suggest(trial, self.base)
        trial.set_user_attr(VALUES, json.dumps(values))
        self._running[trial.number] = trial
        return Asked(trial.number, values)

    def report(self, number: int, steps: Sequence[int], value: float) -> bool:
        """The intermediate value of a running trial at ``steps``; whether it should be pruned."""
        trial = self._running[number]
        # a trial that went on from a checkpoint reports again what is recorded
        known = self._study.get_trials(deepcopy=False)[number].intermediate_values
        for step in steps:
            if step not in known:
                trial.report(value, step)
        return bool(trial.should_prune())

    def complete(self, number: int, values: Sequence[float]) -> None:
        """The end of a trial that ran through. Values that are not finite count as the worst there can be."""
        worst = {"MAXIMIZE": -math.inf, "MINIMIZE": math.inf}
        directions = [direction.name for direction in self._study.directions]
        told = [v if math.isfinite(v) else worst[way] for v, way in zip(values, directions, strict=True)]
        self._study.tell(self._running[number], told)
        del self._running[number]

    def prune(self, number: int) -> None:
        """The end of a trial that was pruned; its last intermediate value is its value."""
        self._study.tell(self._running[number], state=TrialState.PRUNED)
        del self._running[number]

    def fail(self, number: int, error: str) -> None:
        """The end of a trial that raised ``error``."""
        trial = self._running[number]
        trial.set_user_attr(ERROR, error)
        self._study.tell(trial, state=TrialState.FAIL)
        del self._running[number]

    @property
    def failed(self) -> list[FrozenTrial]:
        """Trials that failed, and were not tried again."""
        again = {trial.user_attrs.get("retries") for trial in self.trials}
        return [
            t for t in self.trials if t.state == TrialState.FAIL and t.number not in again and VALUES in t.user_attrs
        ]

    def retry_failed(self) -> int:
        """Queue the values of each trial that failed once more; how many there are."""
        failed = self.failed
        for trial in failed:
            self._study.enqueue_trial(trial.params, user_attrs={"retries": trial.number})
        return len(failed)

    def wanted(self, trials: int) -> int:
        """How many trials there are to be of a sweep of ``trials``: those that are tried again come on top."""
        return trials + sum("retries" in trial.user_attrs for trial in self.trials)

    def left(self, trials: int) -> int:
        """How many are still to be handed out."""
        begun = len(self.trials) - self.count(TrialState.WAITING)
        return max(0, self.wanted(trials) - begun) + self.interrupted

    def _make_sampler(self, asked: int) -> BaseSampler:
        seed = (self.seed * 1_000_003 + asked) % 2**32
        if self.sampler == "tpe":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
        if self.sampler == "cmaes":
            return CmaEsSampler(seed=seed, independent_sampler=TPESampler(seed=seed), warn_independent_sampling=False)
        if self.sampler == "nsga2":
            return NSGAIISampler(seed=seed, population_size=self.population)
        return RandomSampler(seed=seed)


def values_of(trial: FrozenTrial) -> Values:
    """What was sampled for a trial that has been handed out."""
    return json.loads(trial.user_attrs[VALUES])


@contextlib.contextmanager
def owned(folder: Path, say: Callable[[str], None], patience: float = PATIENCE) -> Iterator[None]:
    """Keep other processes that ask for the same folder out, as :func:`fedray.tracking.lock.folder_lock` does."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder, "is a sweep that another process runs", say, patience))
        except OSError as error:
            raise UserError(f"can't write to {folder.parent}: {error.strerror}") from None
        yield


def journal(path: Path) -> BaseStorage:
    """A study's storage in a file, for one process at a time: :func:`owned` keeps the others out."""
    # left by a process that was killed while it wrote
    Path(f"{path}.lock").unlink(missing_ok=True)
    with _readable(path):
        _cut_torn_line(path)
    return _journal(path)


def _journal(path: Path) -> BaseStorage:
    with _readable(path):
        storage = JournalStorage(JournalFileBackend(str(path)))
        optuna.get_all_study_names(storage)
    return storage


@contextlib.contextmanager
def _readable(where: object) -> Iterator[None]:
    """What Optuna raises for a storage that it can't read is of any type, and the user's to mend."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{where} can't be read as a study: {type(error).__name__}: {reason}") from None


def _cut_torn_line(path: Path) -> None:
    """Remove what is left of a line that was never written to its end: the next one would be appended to it."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)
        os.fsync(file.fileno())


def read_study(path: Path, name: str) -> optuna.Study:
    """The study in a file that another process may be writing: it is not to be changed."""
    if not path.exists():
        raise UserError(f"there is no study {path}")
    return loaded(_journal(path), name, path)


def loaded(storage: BaseStorage, name: str, where: object) -> optuna.Study:
    """A study that is there."""
    try:
        return optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        raise UserError(f"there is no study {name!r} in {where}") from None


def is_there(storage: BaseStorage, name: str) -> bool:
    """Whether a storage has a study of that name."""
    return name in optuna.get_all_study_names(storage)


def opened(url: str) -> BaseStorage:
    """The storage at an Optuna URL."""
    with _readable(f"tune.storage={url}"):
        storage = get_storage(url)
        optuna.get_all_study_names(storage)
    return storage
