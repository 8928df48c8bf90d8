"""What a sweep is asked to do: a space file, checked.

about: what is searched, and whose grid it is
base: {algorithm.name: fedprox, data.source: mnist, run.iterations: 400}   # or the name of a config file
spaces:
  wide: {algorithm.mu: {loguniform: [0.0001, 1]}}
  paper: {algorithm.mu: {grid: [0.001, 0.01, 0.1]}}
environments: {data.partition.alpha: [0.1, 1]}    # a sweep of its own for each value
first: [{algorithm.mu: 0.1}]                      # tried after the base itself, and before any other
tune: {space: wide, trials: 30}                   # TuneConfig
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from fedray.config import Auto, Section, Whole, assign, check, expand, flat, load, plain, read, read_file
from fedray.errors import UserError, near_miss
from fedray.tuning.space import Space, Values, read_space

SPACES = Path(__file__).parent.parent / "tune_spaces"
"""The space files that come with fedray."""

RECORD = "sweep.yaml"
"""What a sweep was asked to do, in its folder: a space file of its own."""

OBJECTIVES = (
    "validation_accuracy", "train_loss", "train_accuracy", "bytes", "bytes_down", "bytes_up", "flops",
    "virtual_seconds", "wall_seconds",
)  # fmt: skip
"""What can be optimised: columns of metrics.csv, and ``bytes``, both ways together."""

OF_THE_TEST_SET = ("test_accuracy", "test_loss", "personalized_accuracy", "representation_accuracy")

DECIDED = ("run.name", "run.output", "run.resume", "run.eval_test")
"""Keys that a sweep sets for each trial."""

OF_ALL_TRIALS = ("data.source", "data.root", "engine.")
"""Keys, or sections, that can't be searched: all trials have the same data and run on the same resources."""


ALTERNATIVES = (
    ("run.rounds", "run.iterations"),
    ("train.local_steps", "train.local_epochs"),
    ("train.cohort_size", "train.participation"),
)
"""Pairs of keys of which a configuration has one."""


class PruneConfig(Section):
    """When trials that do badly are given up."""

    by: Literal["none", "asha", "median", "hyperband"] = Field(
        "none", description="asha (successive halving), median (of the others), or hyperband"
    )
    axis: Literal["rounds", "bytes", "flops"] = Field(
        "rounds", description="what trials are compared at equal amounts of, in percent of the base config's whole run"
    )
    grace: Whole = Field(10, ge=1, le=100, description="percent of the axis before the first decision")
    reduction: Whole = Field(3, ge=2, description="asha, hyperband: one of so many goes on from each rung")
    startup: Whole = Field(5, ge=1, description="median: trials before the first decision")


class TuneConfig(Section):
    """How a space is searched."""

    name: str | None = Field(None, description="name of the sweep's folder; the space file's unless set")
    output: str = Field("sweeps/", description="folder in which the sweep's folder is made")
    space: str = Field("wide", description="which of the file's spaces")
    objective: dict[str, Literal["max", "min"]] = Field(
        {"validation_accuracy": "max"}, description="columns of metrics.csv (or bytes); several give a Pareto front"
    )
    trials: Whole | None = Field(None, ge=1, le=10**6, description="trials in all; 30, or the whole grid, unless set")
    seeds: Whole = Field(
        1, ge=1, le=1000, description="runs of a trial, with run.seed, run.seed + 1, ...: their mean counts"
    )
    search: Literal["tpe", "random", "grid", "cmaes", "nsga2"] | None = Field(
        None, description="Optuna's sampler; grid where every key has one, else tpe, unless set"
    )
    seed: Whole = Field(0, ge=0, lt=2**31, description="seed of the search")
    prune: PruneConfig = Field(default_factory=PruneConfig)
    concurrency: Annotated[Whole, Field(ge=1)] | Auto = Field(
        "auto", description="trials at once; auto: as many as fit"
    )
    storage: str | None = Field(None, description="Optuna URL of the study; a journal in the sweep's folder unless set")
    resume: Literal["auto"] | bool = Field(
        "auto", description="auto: go on if it is there and the same; true: go on or fail; false: move the old folder"
    )

    @field_validator("name")
    @classmethod
    def _below_the_output(cls, name: str | None) -> str | None:
        parts = (name or "sweep").split("/")
        if any(part in ("", ".", "..") or not part.isprintable() or len(part.encode()) > 100 for part in parts):
            raise ValueError(
                f"must be a folder's name of 100 bytes at most, not {name!r}; tune.output says where it is"
            )
        return name

    @field_validator("output")
    @classmethod
    def _folder(cls, output: str) -> str:
        parts = Path(output).absolute().parts
        if "://" in output or not output.isprintable() or any(len(part.encode()) > 255 for part in parts):
            raise ValueError(f"must be a local folder, not {output!r}")
        return output


@dataclass(frozen=True)
class SweepSpec:
    """One sweep. ``base``: a configuration as dotted keys; ``described``: the space as the file has it."""

    name: str
    tune: TuneConfig
    base: Mapping[str, Any]
    described: Mapping[str, Any]
    first: Sequence[Values] = ()

    @property
    def space(self) -> Space:
        return read_space(self.described, f"{self.name}: spaces.{self.tune.space}")

    @property
    def search(self) -> str:
        """The sampler's name."""
        return self.tune.search or ("grid" if self.space.is_grid else "tpe")

    def record(self) -> dict[str, Any]:
        """The whole as a space file; reading it gives this sweep again."""
        tune = self.tune.model_dump(mode="json", exclude={"name", "output", "resume"})
        return {
            "base": dict(self.base),
            "spaces": {self.tune.space: dict(self.described)},
            "first": [dict(values) for values in self.first],
            "tune": {"name": self.name, **tune, "search": self.search},
        }

    @property
    def folder(self) -> Path:
        return Path(self.tune.output).absolute() / self.name

    def trial_folder(self, number: int) -> Path:
        """Where the runs of a trial are."""
        return self.folder / "trials" / f"{number:04d}"


def known_spaces() -> dict[str, Path]:
    """The space files that come with fedray, by name."""
    return {path.stem: path for path in sorted(SPACES.glob("*.yaml"))}


def read_sweeps(space: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> list[SweepSpec]:
    """The sweeps that a space file (by path or name, or a mapping) describes: one, or one for each environment.

    ``overrides``: ``key=value`` texts, for the base or for ``tune``. What was searched and is given a value is searched
    no more. A folder is the sweep in it, or those in the folders in it. Raises :class:`UserError`.
    """
    if not isinstance(space, Mapping) and not (Path(space) / RECORD).is_file():
        inside = sorted(Path(space).glob(f"*/{RECORD}"))
        if inside:
            overrides = list(overrides)
            return [spec for each in inside for spec in read_sweeps(each, overrides)]
    path = None if isinstance(space, Mapping) else find_file(space, known_spaces(), "space file or sweep")
    if path is None:
        values = _plain_values(space)
    else:
        values = _read_moved(path.absolute().parent) if path.name == RECORD else read_file(path)
    where = f"{path}: " if path else ""
    known_sections(values, ("about", "base", "spaces", "environments", "first", "tune"), where)
    given: dict[str, Any] = {}
    for override in overrides:
        assign(given, override)
    tune = read_tune(values.get("tune"), section(given, "tune", ""), where)
    given.pop("tune", None)
    fixed = flat(given)
    base = overridden(read_base(values.get("base"), path, where), fixed)
    spaces = section(values, "spaces", where)
    if not spaces:
        raise UserError(
            f"{where}spaces: give at least one, as in spaces: {{wide: {{train.lr: {{uniform: [0.01, 1]}}}}}}"
        )
    if tune.space not in spaces:
        raise UserError(f"tune.space: {where}there is no space {tune.space!r}{near_miss(tune.space, spaces)}")
    all_described = section(spaces, tune.space, f"{where}spaces.").items()
    described = {str(key): text for key, text in all_described if key not in fixed}
    name = tune.name or (path.stem if path else base.get("algorithm.name", "sweep"))
    environments = list(_environments(section(values, "environments", where), fixed, described, where))
    if len({label for label, _ in environments}) < len(environments):
        raise UserError(f"{where}environments: two of them have the same name: {[label for label, _ in environments]}")
    return [
        checked(
            SweepSpec(
                f"{name}/{label}" if label else name,
                tune,
                _with_equal_work({**base, **environment}, described),
                described,
                _first(values, [*described, *fixed], where),
            )
        )
        for label, environment in environments
    ]


def _plain_values(values: Any) -> Any:
    """A copy of what Python gives for a file, whose numbers may be NumPy's."""
    if isinstance(values, Mapping):
        return {key: _plain_values(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_plain_values(value) for value in values]
    return values.item() if hasattr(values, "item") else values


def read_record(folder: Path) -> dict[str, Any]:
    """What the sweep in ``folder`` was asked to do, as it was written."""
    values = read_file(folder / RECORD)
    sections = [values.get(name) for name in ("base", "spaces", "tune")]
    if not all(isinstance(each, dict) for each in sections) or not values["tune"].get("name"):
        raise UserError(f"{folder / RECORD} is damaged: it has no base, spaces, tune or tune.name")
    return values


def _read_moved(folder: Path) -> dict[str, Any]:
    """The record of a sweep as it would be had it been made in ``folder``: that may have been moved or renamed."""
    values = read_record(folder)
    recorded = Path(str(values["tune"]["name"]))
    values["tune"]["name"] = str(recorded.with_name(folder.name))
    values["tune"]["output"] = str(folder.parents[len(recorded.parts) - 1])
    return values


def find_file(name: str | Path, known: Mapping[str, Path], what: str) -> Path:
    """The file called ``name``: one of ``known``, or a path; in a sweep's folder, the sweep's own."""
    path = Path(name)
    if (path / RECORD).is_file():
        return path / RECORD
    if path.is_file():
        return path
    if str(name) in known:
        return known[str(name)]
    raise UserError(f"there is no {what} {name}{near_miss(str(name), known)}")


def known_sections(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuse what a file should not have."""
    for key in values:
        if key not in known:
            raise UserError(f"{where}there is no section {key!r}{near_miss(str(key), known)}")


def section(values: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """A mapping within ``values``, empty if it is not there."""
    found = values.get(key) or {}
    if not isinstance(found, Mapping):
        raise UserError(f"{where}{key} must be a section, not {found!r}")
    return found


def read_tune(of_file: Any, given: Mapping[str, Any], where: str) -> TuneConfig:
    """The section ``tune`` of a file, under what was given on the command line."""
    written = expand(section({"tune": of_file}, "tune", where))
    objective = given.get("objective", written.get("objective"))
    if isinstance(objective, str):
        objective = {objective: "max" if objective.endswith("accuracy") else "min"}
    both = expand(flat(_without(written, "objective")) | flat(_without(given, "objective")))
    if objective is not None:
        both["objective"] = objective
    tune = check(TuneConfig, both, where, "tune.")
    if tune.storage is not None:
        tune = tune.model_copy(update={"storage": _lasting(tune.storage)})
    for name in tune.objective:
        if name in OF_THE_TEST_SET:
            raise UserError(
                f"tune.objective: {name} is of the test set, which is for the winners alone; use validation_accuracy"
            )
        if name not in OBJECTIVES:
            raise UserError(f"tune.objective: there is no column {name!r}{near_miss(name, OBJECTIVES)}")
    if len(tune.objective) > 1 and tune.prune.by != "none":
        raise UserError(f"tune.prune.by={tune.prune.by} goes with one objective, not with {len(tune.objective)}")
    if len(tune.objective) > 1 and tune.search == "cmaes":
        raise UserError("tune.search=cmaes goes with one objective; use tpe or nsga2")
    if not tune.objective:
        raise UserError("tune.objective must name at least one column, as in {validation_accuracy: max}")
    return tune


def _lasting(url: str) -> str:
    """``url``, if it keeps what is written, from wherever it is asked for."""
    found = re.fullmatch(r"(sqlite[^:]*:///?)(.*)", url)
    if not found:
        return url
    kind, path = found.groups()
    if path in ("", ":memory:"):
        raise UserError(f"tune.storage={url} keeps nothing: name a file, as in sqlite:///studies.db")
    return kind + str(Path(path).absolute())


def _without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def read_base(base: Any, path: Path | None, where: str) -> dict[str, Any]:
    """A configuration, given as such or as a file's name (beside the space file, or from here), as dotted keys."""
    if not isinstance(base, str):
        return flat(expand(section({"base": base}, "base", where)))
    beside = path.parent / base if path else Path(base)
    return flat(read(beside if beside.is_file() else base)[0])


def overridden(base: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with what is set in ``by``, of which some says the same in another way."""
    said = {other for pair in ALTERNATIVES for key, other in (pair, pair[::-1]) if by.get(key) is not None}
    return {key: value for key, value in base.items() if key not in said} | dict(by)


def _environments(
    described: Mapping[str, Any], fixed: Mapping[str, Any], searched: Mapping[str, Any], where: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A label and the keys of each environment; one without any where there are none."""
    free = {str(key): values for key, values in described.items() if key not in fixed}
    for key, values in free.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}environments: {key} needs a list of values, not {values!r}")
        if key in searched:
            raise UserError(f"{where}environments: {key} is searched; it can't be an environment too")
    for values in itertools.product(*free.values()):
        environment = dict(zip(free, values, strict=True))
        _same_for_all(environment, f"{where}environments")
        # a folder's name, that a shell and this command line take as one
        label = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in environment.items())
        yield plain(label), environment


def _first(values: Mapping[str, Any], searched: Sequence[str], where: str) -> list[Values]:
    first = first_of(values, where)
    for key in itertools.chain(*first):
        if key not in searched:
            raise UserError(f"{where}first: {key} is not searched{near_miss(str(key), searched)}")
    return first


def first_of(values: Mapping[str, Any], where: str) -> list[Values]:
    """What a space file wants to be tried first."""
    first = values.get("first") or []
    if not isinstance(first, list) or not all(isinstance(each, Mapping) for each in first):
        raise UserError(f"{where}first must be a list of values to try, as in [{{algorithm.mu: 0.1}}]")
    return [dict(each) for each in first]


def _with_equal_work(base: dict[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """Where local steps are searched, all trials make the same number of iterations, not of rounds."""
    if "train.local_steps" not in described or base.get("run.iterations") is not None:
        return base
    from fedray.resolve import LOCAL_STEPS, ROUNDS

    config = load(base)
    iterations = (config.run.rounds or ROUNDS) * (config.train.local_steps or LOCAL_STEPS)
    return overridden(base, {"run.iterations": iterations})


def checked(spec: SweepSpec) -> SweepSpec:
    """``spec``, if nothing is asked for that a sweep decides itself, or that can't be searched."""
    for key in DECIDED:
        if key in spec.base or key in spec.described:
            instead = {"run.name": "tune.name", "run.output": "tune.output", "run.resume": "tune.resume"}.get(key)
            raise UserError(f"{spec.name}: {key} is set by the sweep" + (f"; use {instead}" if instead else ""))
    _same_for_all(spec.described, spec.name)
    for key in ("algorithm.name", "model.name"):
        if str(spec.base.get(key)).startswith("__main__:"):
            raise UserError(
                f"{spec.name}: {key}={spec.base[key]} is not to be found in a trial's process: put it in a module"
            )
    if spec.search == "grid" and not spec.space.is_grid:
        raise UserError(f"tune.search=grid: {spec.name}: every key needs a list (grid or choice); use tpe")
    return spec


def check_together(specs: Sequence[SweepSpec]) -> None:
    """Refuse sweeps whose trials have different data or resources: in a folder there may be sweeps of any kind."""
    for spec in specs[1:]:
        for key in {**specs[0].base, **spec.base}:
            if key.startswith(OF_ALL_TRIALS) and specs[0].base.get(key) != spec.base.get(key):
                raise UserError(f"{specs[0].name} and {spec.name} can't be run together, as {key} differs: name one")


def _same_for_all(keys: Iterable[str], where: str) -> None:
    for key in keys:
        if key.startswith(OF_ALL_TRIALS):
            raise UserError(f"{where}: {key} can't be searched: all trials have the same data and resources")
