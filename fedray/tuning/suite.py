"""A fair comparison: each algorithm is tuned with one budget on its own space, and the winners meet on fresh seeds.

about: what is compared
base: {data.source: sample, run.rounds: 40}      # the same for all
space: {train.lr: {loguniform: [0.003, 1]}}      # searched by all, beside each one's own algorithm.* keys
algorithms: [fedavg, fedprox, ../mine.yaml]      # space files, by name or path
seeds: 3                                         # of the winners, none of which a trial has had
tune: {trials: 8}                                # TuneConfig, for each
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedray.config import Section, Whole, assign, check, flat, load, read_file
from fedray.errors import UserError
from fedray.tuning.driver import own_of, run_sweeps, started
from fedray.tuning.settings import section
from fedray.tuning.spec import (
    SPACES,
    SweepSpec,
    find_file,
    first_of,
    first_seed,
    known_sections,
    known_spaces,
    overridden,
    read_base,
    read_sweeps,
)
from fedray.tuning.study import values_of
from fedray.tuning.trial import Assignment, Message, RunEnd, TrialEnd
from fedray.tuning.view import View

if TYPE_CHECKING:
    from fedray.tuning.sweep import Sweep


@dataclass(frozen=True)
class Suite:
    """``specs``: a sweep for each algorithm. ``seeds``: how many fresh ones the winners have."""

    name: str
    specs: Sequence[SweepSpec]
    seeds: int

    @property
    def folder(self) -> Path:
        return Path(self.specs[0].tune.output).absolute() / self.name


class _Seeds(Section):
    seeds: Whole = Field(3, ge=1, le=1000)


def known_suites() -> dict[str, Path]:
    """The suites that come with fedray, by name."""
    return {path.stem: path for path in sorted((SPACES / "suites").glob("*.yaml"))}


def read_suite(name: str | Path, overrides: Iterable[str] = ()) -> Suite:
    """The suite in a file, by path or name; ``overrides`` are for its base, or ``tune.*``, of all algorithms."""
    path = find_file(name, known_suites(), "suite")
    values, where = read_file(path), f"{path}: "
    known_sections(values, ("about", "base", "space", "algorithms", "seeds", "tune"), where)
    algorithms = values.get("algorithms")
    if not isinstance(algorithms, list) or not algorithms:
        raise UserError(f"{where}algorithms must list at least one space file, by path or name")
    seeds = check(_Seeds, {"seeds": values.get("seeds", 3)}, where).seeds
    given: dict[str, Any] = {}
    for override in overrides:
        assign(given, override)
    given["tune"] = dict(section(given, "tune", ""))
    own_name = given["tune"].pop("name", None) or path.stem
    common = _Common(
        read_base(values.get("base"), path, where), section(values, "space", where), section(values, "tune", where)
    )
    if "algorithm.name" in common.base or "algorithm.name" in flat(given):
        raise UserError(f"{where}algorithm.name is each algorithm's own: leave it out of what a suite has in common")
    specs = [_of_algorithm(str(each), f"{own_name}/", common, given, path) for each in algorithms]
    if len({spec.name for spec in specs}) < len(specs):
        raise UserError(f"{where}algorithms: two of them have the same name: {[spec.name for spec in specs]}")
    if len(specs[0].tune.objective) > 1:
        raise UserError(f"{where}tune.objective: a suite has one objective, by which winners are found")
    return Suite(own_name, _with_common_public_set(specs), seeds)


@dataclass(frozen=True)
class _Common:
    """What all algorithms of a suite have in common."""

    base: Mapping[str, Any]
    space: Mapping[str, Any]
    tune: Mapping[str, Any]


def _of_algorithm(name: str, prefix: str, common: _Common, given: Mapping[str, Any], suite: Path) -> SweepSpec:
    """The sweep of one algorithm: the hyper-parameters of its own from its file, all else from the suite."""
    beside = suite.parent / name
    path = find_file(beside if beside.is_file() else name, known_spaces(), "space file")
    values = read_file(path)
    where = f"{path}: "
    spaces = {
        each: {**_own(section(section(values, "spaces", where), each, where)), **common.space}
        for each in section(values, "spaces", where)
    }
    first = first_of(values, where)
    whole = {
        "base": {**_own(read_base(values.get("base"), path, where)), **common.base},
        "spaces": spaces,
        "first": [_own(each) for each in first],
        "tune": {**common.tune, "name": prefix + path.stem},
    }
    (spec,) = read_sweeps(whole, [f"{key}={json.dumps(value)}" for key, value in flat(given).items()])
    return spec


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that only the algorithm has."""
    return {key: value for key, value in values.items() if str(key).startswith("algorithm.")}


def _with_common_public_set(specs: Sequence[SweepSpec]) -> list[SweepSpec]:
    """If one algorithm's server needs a public set, the others leave out the same samples."""
    from fedray.algorithms import find_algorithm
    from fedray.data.source import load_source

    configs = [load(spec.base) for spec in specs]
    if any(config.data.public_samples != "auto" for config in configs):
        return list(specs)
    needed = any(find_algorithm(config.algorithm.name).needs_public for config in configs)
    public = len(load_source(configs[0].data.source, configs[0].data.root).y_train) // 10 if needed else 0
    return [replace(spec, base={**spec.base, "data.public_samples": public}) for spec in specs]


class Winners:
    """The best trial of a sweep once more, with the test set, on seeds that no trial has had."""

    def __init__(self, sweep: Sweep, folder: Path, seeds: int, view: View) -> None:
        self.sweep, self.folder, self.view = sweep, folder, view
        self.left = list(fresh_seeds(sweep.spec, seeds))
        self.failures = 0

    def run_folder(self, seed: int) -> Path:
        return winner_folder(self.folder, self.sweep.study.best()[0].number) / f"seed-{seed}"

    def _skip_finished(self) -> None:
        if self.sweep.finished and not self.sweep.study.best():
            self.left = []
        if self.sweep.finished:
            self.left = [seed for seed in self.left if not is_finished(self.run_folder(seed))]

    @property
    def exhausted(self) -> bool:
        self._skip_finished()
        return self.sweep.finished and not self.left

    def next(self) -> Assignment | None:
        self._skip_finished()
        if not self.sweep.finished or not self.left:
            return None
        seed = self.left.pop(0)
        folder = self.run_folder(seed)
        run = overridden(self.sweep.base, values_of(self.sweep.study.best()[0])) | dict(self.sweep.engine)
        run |= {"run.output": str(folder.parent), "run.name": folder.name, "run.seed": seed, "run.resume": "auto"}
        return Assignment(str(seed), [run], "train_loss", "rounds", math.inf)

    def hear(self, key: str, message: Message) -> bool:
        if isinstance(message, RunEnd):
            accuracy = message.row.get("test_accuracy", math.nan)
            self.view.say(f"{self.sweep.name}: winner on seed {key}: {message.status}, accuracy {accuracy:.4f}")
        elif isinstance(message, TrialEnd) and message.error is not None:
            self.failed(key, message.error)
        return False

    def lost(self, key: str, error: str) -> None:
        self.view.say(f"{self.sweep.name}: winner on seed {key}: {error}; it goes on from its last checkpoint")

    def failed(self, key: str, error: str) -> None:
        self.failures += 1
        self.view.say(f"{self.sweep.name}: winner on seed {key} failed: {error.strip().splitlines()[-1]}")


def fresh_seeds(spec: SweepSpec, seeds: int) -> range:
    """Seeds that no trial of a sweep has."""
    first = first_seed(spec.base) + spec.tune.seeds
    return range(first, first + seeds)


def winner_folder(folder: Path, trial: int) -> Path:
    """Where the runs of a trial are that has won: another trial may win when a suite goes on with more of them."""
    return folder / "winners" / f"trial-{trial:04d}"


def is_finished(run: Path) -> bool:
    """Whether the run in a folder has come to its end."""
    path = run / "summary.json"
    return path.exists() and json.loads(path.read_text())["status"] in ("completed", "diverged")


def run_suite(
    suite: Suite, view: View | None = None, retry_failed: bool = False
) -> Literal["completed", "incomplete", "interrupted"]:
    """Run a suite to its end, or go on with it. It is incomplete if an algorithm has no winner, or a winner failed."""
    view = view or View(quiet=True)
    winners: list[Winners] = []

    def then(sweeps: Sequence[Sweep]) -> Sequence[Winners]:
        winners.extend(Winners(sweep, sweep.folder, suite.seeds, view) for sweep in sweeps)
        return winners

    with started(suite.specs, view) as start:
        results = run_sweeps(suite.specs, own_of(suite.specs[0]), start, view, retry_failed, then)
    if any(result.interrupted for result in results):
        return "interrupted"
    whole = all(result.best for result in results) and not any(each.failures for each in winners)
    return "completed" if whole else "incomplete"
