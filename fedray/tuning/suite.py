"""A fair comparison: each algorithm is tuned with one budget on its own space, and the winners meet on fresh seeds.

about: what is compared
base: {data.source: sample, run.rounds: 40}      # the same for all
space: {train.lr: {loguniform: [0.003, 1]}}      # searched by all
algorithms: [fedavg, fedprox, ../mine.yaml]      # space files, by name or path
baseline: fedavg                                 # with which the others are compared: one of them, the first unless set
seeds: 3                                         # of the winners, none of which a trial has had
tune: {trials: 8}                                # TuneConfig, for each

An algorithm's own hyper-parameters, ``algorithm.*`` and those of the optimizers (:data:`OF_OPTIMIZERS`), are what its
space file sets or searches, unless the suite sets or searches the key for all. All else is the suite's alone: data,
model, rounds, local work, cohort and batch size. Model head, weighting and public set are one for all
(:mod:`fedray.tuning.alike`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedray.config import Section, Whole, assign, check, flat, load, read_file
from fedray.errors import UserError, near_miss
from fedray.tuning.alike import algorithm_of, alike
from fedray.tuning.driver import load_own, run_sweeps, started
from fedray.tuning.finals import Final, Winners, label_of
from fedray.tuning.settings import section
from fedray.tuning.spec import (
    SPACES,
    SweepSpec,
    find_file,
    first_of,
    known_sections,
    known_spaces,
    read_base,
    read_sweeps,
)
from fedray.tuning.view import View

if TYPE_CHECKING:
    from fedray.tuning.sweep import Sweep


OF_OPTIMIZERS = (
    "train.lr", "train.server_lr", "train.momentum", "train.weight_decay", "train.grad_clip", "train.lr_decay",
)  # fmt: skip
"""Hyper-parameters outside ``algorithm.*`` that an algorithm's own space file may set or search in a suite."""


@dataclass(frozen=True)
class Suite:
    """A sweep for each algorithm (``specs``), and ``seeds``: on how many fresh ones their best trials are run again.

    ``baseline``: the one of the sweeps with which the others are compared. ``notes``: lines about what is the same for
    all algorithms and what is not.
    """

    name: str
    specs: Sequence[SweepSpec]
    baseline: SweepSpec
    seeds: int
    notes: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        return Path(self.specs[0].tune.output).absolute() / self.name

    @property
    def finals(self) -> list[Final]:
        """The best trial of each sweep. Where a server trains on a public set that the baseline leaves out, also the
        baseline's with these samples dealt out to its clients, so that both train on the same labelled samples."""
        finals = [Final(spec) for spec in self.specs]
        if (
            not algorithm_of(self.baseline).needs_public
            and self.baseline.base.get("data.public_samples", "auto") not in ("auto", 0)
            and self.baseline.base.get("data.public_to", "server") == "server"
            and any(algorithm_of(spec).needs_public for spec in self.specs)
        ):
            dealt = {"data.public_to": "clients"}
            finals.append(Final(self.baseline, dealt, "the public samples dealt to its clients", "public-dealt"))
        return finals


class _Seeds(Section):
    seeds: Whole = Field(3, ge=1, le=1000)


def known_suites() -> dict[str, Path]:
    """The suites that come with fedray, by name."""
    return {path.stem: path for path in sorted((SPACES / "suites").glob("*.yaml"))}


def read_suite(name: str | Path, overrides: Iterable[str] = ()) -> Suite:
    """The suite in a file, by path or name; ``overrides`` are for its base, or ``tune.*``, of all algorithms."""
    path = find_file(name, known_suites(), "suite")
    values, where = read_file(path), f"{path}: "
    known_sections(values, ("about", "base", "space", "algorithms", "baseline", "seeds", "tune"), where)
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
        read_base(values.get("base"), path, where),
        section(values, "space", where),
        section(values, "tune", where),
        flat(given),
    )
    if "algorithm.name" in common.base or "algorithm.name" in common.given:
        raise UserError(f"{where}algorithm.name is each algorithm's own: leave it out of what a suite has in common")
    read = [_of_algorithm(str(each), f"{own_name}/", common, path) for each in algorithms]
    specs = [spec for spec, _ in read]
    if len({spec.name for spec in specs}) < len(specs):
        raise UserError(f"{where}algorithms: two of them have the same name: {[spec.name for spec in specs]}")
    if len(specs[0].tune.objective) > 1:
        raise UserError(f"{where}tune.objective: a suite has one objective, by which winners are found")
    labels = [label_of(spec) for spec in specs]
    baseline = values.get("baseline", labels[0])
    if baseline not in labels:
        raise UserError(
            f"{where}baseline: {baseline!r} is none of the suite's algorithms{near_miss(str(baseline), labels)}"
        )
    specs, notes = alike(specs)
    notes += [*_notes_on_own(specs, common), *_notes_on_dropped(specs, [dropped for _, dropped in read])]
    return Suite(own_name, specs, specs[labels.index(baseline)], seeds, notes)


@dataclass(frozen=True)
class _Common:
    """What all algorithms of a suite have in common. ``given``: what the command line sets."""

    base: Mapping[str, Any]
    space: Mapping[str, Any]
    tune: Mapping[str, Any]
    given: Mapping[str, Any]

    def leaves(self, key: str) -> bool:
        """Whether ``key`` is a hyper-parameter of the algorithm's own, which the suite neither sets nor searches."""
        own = key.startswith("algorithm.") or key in OF_OPTIMIZERS
        return own and not any(key in claimed for claimed in (self.base, self.space, self.given))


def _of_algorithm(name: str, prefix: str, common: _Common, suite: Path) -> tuple[SweepSpec, list[str]]:
    """The sweep of one algorithm, and what its space file searches that the suite decides."""
    beside = suite.parent / name
    path = find_file(beside if beside.is_file() else name, known_spaces(), "space file")
    values = read_file(path)
    where = f"{path}: "

    def own(keys: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in keys.items() if common.leaves(str(key))}

    described = section(values, "spaces", where)
    spaces = {str(each): section(described, each, where) for each in described}
    whole = {
        "base": {**own(read_base(values.get("base"), path, where)), **common.base},
        "spaces": {each: {**own(space), **common.space} for each, space in spaces.items()},
        "first": [kept for each in first_of(values, where) if (kept := own(each))],
        "tune": {**common.tune, "name": prefix + path.stem},
    }
    (spec,) = read_sweeps(whole, [f"{key}={json.dumps(value)}" for key, value in common.given.items()])
    dropped = [key for key in spaces[str(spec.tune.space)] if key not in spec.raw_space]
    # nor is a key searched whose condition on one of these the suite does not meet
    dropped += [
        each.key
        for each in spec.space.parameters
        if any(key in dropped and key in spec.base and spec.base[key] not in allowed for key, allowed in each.when)
    ]
    return spec, [*dropped, *(["environments"] if values.get("environments") else [])]


def _notes_on_own(specs: Sequence[SweepSpec], common: _Common) -> list[str]:
    """A line for each hyper-parameter of the optimizers that space files set or search."""
    defaults = flat(load({}).model_dump())
    notes = []
    for key in filter(common.leaves, OF_OPTIMIZERS):
        found: dict[str, list[str]] = {}
        for spec in specs:
            how = "searched" if key in spec.raw_space else str(spec.base.get(key, defaults[key]))
            found.setdefault(how, []).append(label_of(spec))
        others = found.pop(str(defaults[key]), None)
        if found:
            parts = [f"{how} for {', '.join(labels)}" for how, labels in found.items()]
            parts += [f"{defaults[key]} for the others"] if others else []
            notes.append(f"{key} is each algorithm's own, from its space file: {'; '.join(parts)}")
    return notes


def _notes_on_dropped(specs: Sequence[SweepSpec], dropped: Sequence[Sequence[str]]) -> list[str]:
    """A line about what space files search and this suite does not."""
    found: dict[str, list[str]] = {}
    for spec, keys in zip(specs, dropped, strict=True):
        for key in keys:
            found.setdefault(key, []).append(label_of(spec))
    shown = "; ".join(f"{key} of {', '.join(labels)}" for key, labels in found.items())
    return [f"not searched, as the suite decides it, though space files search it: {shown}"] if shown else []


def run_suite(
    suite: Suite, view: View | None = None, retry_failed: bool = False
) -> Literal["completed", "incomplete", "interrupted"]:
    """Run a suite to its end, or go on with it. It is incomplete if an algorithm has no winner, or a winner failed."""
    view = view or View(quiet=True)
    winners: list[Winners] = []
    for line in suite.notes:
        view.say(f"{suite.name}: {line}")

    def then(sweeps: Sequence[Sweep]) -> Sequence[Winners]:
        sweep_of = {sweep.name: sweep for sweep in sweeps}
        winners.extend(Winners(sweep_of[final.spec.name], final, suite.seeds, view) for final in suite.finals)
        return winners

    with started(suite.specs, view) as start:
        results = run_sweeps(suite.specs, load_own(suite.specs[0]), start, view, retry_failed, then)
    if any(result.interrupted for result in results):
        return "interrupted"
    whole = all(result.best for result in results) and not any(each.failures for each in winners)
    return "completed" if whole else "incomplete"
