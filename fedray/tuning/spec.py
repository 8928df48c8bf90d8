"""Reads and checks a space file, which says what a sweep does.

about: what is searched, and whose grid it is
base: {algorithm.name: fedprox, data.source: mnist, run.iterations: 400}   # or the name of a config file
spaces:
  wide: {algorithm.mu: {loguniform: [0.0001, 1]}}
  paper: {algorithm.mu: {grid: [0.001, 0.01, 0.1]}}
environments: {data.partition.alpha: [0.1, 1]}    # a separate sweep for each value
first: [{algorithm.mu: 0.1}]                      # tried after the base itself, and before all others
tune: {space: wide, trials: 30}                   # the keys of TuneConfig
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from fedray.config import assign, expand, flat, load, plain, read, read_file
from fedray.config.files import FOR_ALGORITHM
from fedray.errors import UserError, near_miss
from fedray.remote.fetching import fetched
from fedray.tuning.settings import TuneConfig, read_tune, section
from fedray.tuning.space import Space, Values, first_of, read_space
from fedray.usercode.importing import short_name
from fedray.util.arguments import override_texts, place_of
from fedray.util.uris import above, below, is_uri

PACKAGE = Path(__file__).parent.parent
SPACES = next(each / "tune_spaces" for each in (PACKAGE, PACKAGE.parent) if (each / "tune_spaces").is_dir())
"""The folder of the space files that come with fedray. It is in an installed package, and beside it in a checkout."""

RECORD = "sweep.yaml"
"""The file in a sweep's folder that records what the sweep does. It has the form of a space file."""

DECIDED = {
    "run.name": "; use tune.name", "run.output": "; use tune.output", "run.working_copy": "; use tune.working_copy",
    "run.resume": "; use tune.resume", "run.group": ", whose name it is (tune.name)", "run.eval_test": "",
}  # fmt: skip
"""The keys that the sweep itself sets for each trial, and what users are told of them. A space file must not set
them."""

OF_ALL_TRIALS = (
    "data.source", "data.root", "data.variant", "data.normalization", "data.mean", "data.std", "data.image_size",
    "data.target_column", "data.client_column", "data.input_columns", "engine.",
)  # fmt: skip
"""The keys, or beginnings of keys, that can't be searched, because all trials share the same data and resources.
"""

LONGEST_NAME = 150
"""The number of bytes that each part of a sweep's name may have. It becomes the name of a folder, to which runs append.
"""

ALTERNATIVES = (
    ("run.rounds", "run.iterations"),
    ("train.local_steps", "train.local_epochs"),
    ("train.cohort_size", "train.participation"),
)
"""Pairs of keys of which a configuration may set only one."""


@dataclass(frozen=True)
class SweepSpec:
    """The description of one sweep (a search over hyper-parameters), as read from a space file.

    ``name`` is the name of the sweep and of its folder. ``tune`` has the settings ``tune.*``. ``base`` is the
    configuration of all trials, by dotted key. ``raw_space`` is the chosen space (``tune.space``) as it stands in the
    file: each searched key with a description of its values. ``first`` has the values that are tried first, as a dict
    for each trial.
    """

    name: str
    tune: TuneConfig
    base: Mapping[str, Any]
    raw_space: Mapping[str, Any]
    first: Sequence[Values] = ()

    @property
    def space(self) -> Space:
        """The searched keys with the values that each may take, as read from ``raw_space``. Raises :class:`UserError`
        if there is a mistake in it."""
        return read_space(self.raw_space, f"{self.name}: spaces.{self.tune.space}")

    @property
    def sampler(self) -> str:
        """The name of the sampler, which chooses the values of trials: ``tune.sampler``, or if that is not set,
        ``grid`` for a space of lists and ``tpe`` for any other."""
        return self.tune.sampler or ("grid" if self.space.is_grid else "tpe")

    def record(self) -> dict[str, Any]:
        """Returns the content of sweep.yaml, the file in the sweep's folder from which the same sweep can be continued:
        a dict of the form of a space file, with the sections base, spaces, first and tune."""
        tune = self.tune.model_dump(mode="json", exclude={"name", "output", "working_copy", "resume"})
        return {
            "base": dict(self.base),
            "spaces": {str(self.tune.space): dict(self.raw_space)},
            "first": [dict(values) for values in self.first],
            "tune": {"name": self.name, **tune, "sampler": self.sampler},
        }

    @property
    def folder(self) -> Path:
        """The absolute path of the sweep's folder on this machine. If ``tune.output`` is a URI, the sweep works in this
        folder, and its results are sent to the URI."""
        return self.tune.place.absolute() / self.name

    @property
    def uri(self) -> str | None:
        """The URI of the sweep's folder if ``tune.output`` is one, and otherwise None."""
        return below(self.tune.output, *self.name.split("/")) if is_uri(self.tune.output) else None

    def output_keys(self, folder: Path) -> dict[str, Any]:
        """Returns the settings that make a run create its run folder in ``folder``, which is a folder within the
        sweep's folder. They are a dict with the keys ``run.output`` and ``run.group``, and with ``run.working_copy`` if
        the sweep has a URI. In that case the run, not the sweep, sends the run's results to the URI, because the run
        may be on another node than the sweep."""
        group = {"run.group": self.name}
        if self.uri is None:
            return {"run.output": str(folder), **group}
        parts = folder.relative_to(self.folder).parts
        return {"run.output": below(self.uri, *parts), "run.working_copy": str(folder), **group}

    @property
    def has_begun(self) -> bool:
        """Whether the sweep's folder holds an earlier sweep that will be continued. It is false if ``tune.resume`` is
        false."""
        return self.tune.resume is not False and (self.folder / RECORD).exists()

    def trial_folder(self, number: int) -> Path:
        """Returns the folder of trial ``number`` in the sweep's folder, such as ``trials/0007``. It has a run folder
        for each seed."""
        return self.folder / "trials" / f"{number:04d}"


def known_spaces() -> dict[str, Path]:
    """Returns the paths of the space files (descriptions of hyper-parameter searches) that come with fedray, by the
    names that ``fedray tune`` accepts, such as ``fedprox``."""
    return {path.stem: path for path in sorted(SPACES.glob("*.yaml"))}


def read_sweeps(space: str | PathLike[str] | Mapping[str, Any], overrides: Iterable[str] = ()) -> list[SweepSpec]:
    """Reads a space file and returns the sweeps that it describes: one, or one for each of its environments
    (combinations of values for which a separate sweep is made).

    ``space`` is a path, the name of a file that comes with fedray, or a mapping with the content of a file. It may also
    be the folder of a sweep, or a folder that holds several of these, by its path or its URI. Then the sweeps are read
    from the files sweep.yaml there. ``overrides`` are texts ``key=value`` that replace keys of the base configuration
    or of ``tune.*``; a key that they set is not searched. Raises :class:`UserError` if there is a mistake in the file
    or the overrides.
    """
    overrides = override_texts(overrides)
    if not isinstance(space, Mapping):
        space = place_of(space)
    if isinstance(space, str) and is_uri(space):
        here = fetched(space)
        return [
            _at_uri(spec, below(space, *spec.folder.relative_to(here).parts)) for spec in read_sweeps(here, overrides)
        ]
    path = None
    if not isinstance(space, Mapping):
        inside = [] if (Path(space) / RECORD).is_file() else sorted(Path(space).glob(f"*/{RECORD}"))
        if inside:
            return [spec for each in inside for spec in read_sweeps(each, overrides)]
        path = find_file(space, known_spaces(), "space file or sweep")
    values = _read(path) if path else _plain_values(space)
    where = f"{path}: " if path else ""
    known_sections(values, ("about", "base", "spaces", "environments", "first", "tune", "inputs"), where)
    overridden: dict[str, Any] = {}
    for override in overrides:
        assign(overridden, override)
    tune = read_tune(values.get("tune"), section(overridden, "tune", ""), where)
    overridden.pop("tune", None)
    fixed = flat(overridden)
    base = merge_settings(read_base(values.get("base"), path, where), fixed)
    spaces = {str(key): space for key, space in section(values, "spaces", where).items()}
    chosen = _choose_space(spaces, tune.space, where)
    tune = tune.model_copy(update={"space": chosen})
    entries = section(spaces, chosen, f"{where}spaces.")
    # a key that is given has its value in all trials, so that what would replace it is not searched either
    decided = {*fixed, *_alternatives(fixed)}
    raw_space = {str(key): text for key, text in entries.items() if key not in decided}
    name = tune.name or (path.stem if path else plain(short_name(str(base.get("algorithm.name", "sweep")))))
    environments = list(_environments(section(values, "environments", where), fixed, raw_space, where))
    if len({label for label, _ in environments}) < len(environments):
        raise UserError(f"{where}environments: two of them have the same name: {[label for label, _ in environments]}")
    searched = {str(key) for each in spaces.values() if isinstance(each, Mapping) for key in each}
    known = [*raw_space, *fixed, *sorted(searched)]
    for key in itertools.chain(*first_of(values, where)):
        if key not in known:
            raise UserError(f"{where}first: {key} is not searched{near_miss(str(key), known)}")
    # those of another space of the file are not for this one
    first = [each for each in first_of(values, where) if {*each} <= {*raw_space, *fixed}]
    specs = []
    for label, environment in environments:
        settings = _with_equal_work(merge_settings(base, environment), raw_space)
        specs.append(SweepSpec(f"{name}/{label}" if label else name, tune, settings, raw_space, first))
        _check(specs[-1])
    return specs


def _at_uri(spec: SweepSpec, uri: str) -> SweepSpec:
    """Returns ``spec``, which was read from a downloaded copy of a sweep's folder, with a ``tune.output`` that makes
    ``uri`` the URI of that folder."""
    for _ in spec.name.split("/"):
        uri = above(uri)
    return replace(spec, tune=spec.tune.model_copy(update={"output": uri}))


def _choose_space(spaces: Mapping[str, Any], asked: str | None, where: str) -> str:
    if not spaces:
        example = "spaces: {wide: {train.lr: {uniform: [0.01, 1]}}}"
        raise UserError(f"{where}spaces: give at least one, as in {example}")
    name = asked or (next(iter(spaces)) if len(spaces) == 1 else "wide")
    if name not in spaces:
        raise UserError(f"tune.space: {where}there is no space {name!r}{near_miss(name, spaces)}")
    return name


def _read(path: Path) -> dict[str, Any]:
    if path.name != RECORD:
        return read_file(path)
    # the folder of a sweep may have been moved since its record was written
    folder = path.absolute().parent
    values = read_record(folder)
    depth = min(len(Path(str(values["tune"]["name"])).parts), len(folder.parts) - 1)
    values["tune"] |= {"name": "/".join(folder.parts[-depth:]), "output": str(folder.parents[depth - 1])}
    return values


def _plain_values(values: Any) -> Any:
    """Returns ``values``, a space that was passed from Python, with NumPy's arrays and numbers replaced by plain lists
    and numbers."""
    if isinstance(values, Mapping):
        return {key: _plain_values(value) for key, value in values.items()}
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [_plain_values(value) for value in values]
    return values.tolist() if hasattr(values, "tolist") else values


def read_record(folder: Path) -> dict[str, Any]:
    """Returns the content of sweep.yaml, which records in a sweep's ``folder`` what the sweep does: a dict of the form
    of a space file. Raises :class:`UserError` if the file is missing or damaged."""
    values = read_file(folder / RECORD)
    sections = [values.get(name) for name in ("base", "spaces", "tune")]
    if not all(isinstance(each, dict) for each in sections) or not values["tune"].get("name"):
        raise UserError(f"{folder / RECORD} is damaged: it has no base, spaces, tune or tune.name")
    return values


def find_file(name: str | Path, known: Mapping[str, Path], what: str) -> Path:
    """Returns the path of the file that the user calls ``name``: a space file, or a suite, which compares algorithms.

    ``name`` may be the file's path, the folder of a sweep (the result is then sweep.yaml in this folder), or a name in
    ``known``, which maps the names of the files that come with fedray to their paths. Raises :class:`UserError` if
    there is no such file; ``what`` is the message's word for the file, such as "suite".
    """
    path = Path(name)
    if (path / RECORD).is_file():
        return path / RECORD
    if path.is_file():
        return path
    if str(name) in known:
        return known[str(name)]
    raise UserError(f"there is no {what} {name}{near_miss(str(name), known)}")


def known_sections(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Checks that ``values``, the content of a space file or suite, has no sections other than those in ``known``.

    Raises :class:`UserError`, with a message that begins with ``where``, if it has another section.
    """
    for key in values:
        if key not in known:
            raise UserError(f"{where}there is no section {key!r}{near_miss(str(key), known)}")


def read_base(base: Any, path: Path | None, where: str) -> dict[str, Any]:
    """Returns the base configuration of a space file or suite, which all trials share, as a flat dict with dotted keys.
    ``base`` is the file's section ``base``.

    If the section is a text, it names a config file. This file is looked for beside the space file at ``path``, if
    there is one, and then in the working directory. Raises :class:`UserError` for a wrong section, with a message that
    begins with ``where``.
    """
    if isinstance(base, str):
        beside = path.parent / base if path else Path(base)
        values = read(beside if beside.is_file() else base)[0]
    else:
        values = expand(section({"base": base}, "base", where))
    if FOR_ALGORITHM in values:
        raise UserError(
            f"{where}base: {FOR_ALGORITHM} is for runs: a sweep has one algorithm, whose keys its base or space sets"
        )
    return flat(values)


def first_seed(settings: Mapping[str, Any]) -> int:
    """Returns the seed of the first run of each trial: run.seed in ``settings``, a configuration by dotted key, or 0 if
    it is not set. The other keys are not checked, and may contradict each other."""
    return load({"run.seed": settings.get("run.seed") or 0}).run.seed


def merge_settings(base: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a new configuration with the keys of ``base``, updated with those of ``by``. All keys are dotted.

    If a key of ``by`` can't be set together with a key of ``base``, the key of ``base`` is left out: run.iterations in
    ``by`` removes run.rounds (:data:`ALTERNATIVES`).
    """
    replaced = _alternatives(by)
    return {key: value for key, value in base.items() if key not in replaced} | dict(by)


def _alternatives(settings: Mapping[str, Any]) -> set[str]:
    """Returns the keys that can't be set together with one of ``settings``."""
    return {other for pair in ALTERNATIVES for key, other in (pair, pair[::-1]) if settings.get(key) is not None}


def _environments(
    listed: Mapping[str, Any], fixed: Mapping[str, Any], searched: Mapping[str, Any], where: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a label, such as ``alpha-0.1``, and the settings of each environment of a space file. The environments are
    all combinations of the ``listed`` values, which are lists by key.

    Keys in ``fixed``, which the user has set, are left out. If there are no environments, it yields one with an empty
    label and no settings. Raises :class:`UserError` for a key in ``searched``.
    """
    free = {str(key): values for key, values in listed.items() if key not in fixed}
    for key, values in free.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}environments: {key} needs a list of values, not {values!r}")
        if key in searched:
            raise UserError(f"{where}environments: {key} is searched; it can't be an environment too")
    for values in itertools.product(*free.values()):
        environment = dict(zip(free, values, strict=True))
        _same_for_all(environment, f"{where}environments")
        # the label becomes a folder's name, and must not have characters that a shell or key=value treats specially
        label = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in environment.items())
        yield plain(label), environment


def _with_equal_work(base: dict[str, Any], raw_space: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``base`` with run.iterations instead of run.rounds if local steps are searched. With equal numbers of
    rounds, trials with more local steps would train for longer."""
    if "train.local_steps" not in raw_space or base.get("run.iterations") is not None:
        return base
    config = load(base)
    if config.train.steps is None:
        raise UserError("train.local_steps is searched, but the base has train.local_epochs: give it train.local_steps")
    return merge_settings(base, {"run.iterations": config.rounds * config.train.steps})


def _check(spec: SweepSpec) -> None:
    """Raises :class:`UserError` if the space file of ``spec`` sets keys that a sweep decides itself, searches keys that
    can't be searched, or has too long a name."""
    for key, instead in DECIDED.items():
        if key in spec.base or key in spec.raw_space:
            raise UserError(f"{spec.name}: {key} is set by the sweep{instead}")
    _same_for_all(spec.raw_space, spec.name)
    if "run.seed" in spec.raw_space:
        raise UserError(f"{spec.name}: run.seed can't be searched: tune.seeds says how many seeds each trial has")
    for part in spec.name.split("/"):
        if len(part.encode()) > LONGEST_NAME:
            raise UserError(
                f"{part[:40]}... is longer than {LONGEST_NAME} bytes, the most that the name of a sweep or an "
                "environment may have"
            )
    for key in ("algorithm.name", "model.name"):
        if str(spec.base.get(key)).startswith("__main__:"):
            raise UserError(
                f"{spec.name}: {key}={spec.base[key]} can't be imported in a trial's process: put it in a module"
            )
    if spec.sampler == "grid" and not spec.space.is_grid:
        raise UserError(f"tune.sampler=grid: {spec.name}: every key needs a list (grid or choice); use tpe")


def check_together(specs: Sequence[SweepSpec]) -> None:
    """Checks the sweeps that one command runs together, such as those of several environments. Raises
    :class:`UserError` if they differ in their data or in ``engine.*``, because all trials of a command share one data
    set and one cluster."""
    for spec in specs[1:]:
        for key in {**specs[0].base, **spec.base}:
            if key.startswith(OF_ALL_TRIALS) and specs[0].base.get(key) != spec.base.get(key):
                raise UserError(
                    f"{specs[0].name} and {spec.name} can't be run together, as {key} differs: name one of them"
                )


def _same_for_all(keys: Iterable[str], where: str) -> None:
    for key in keys:
        if key.startswith(OF_ALL_TRIALS):
            raise UserError(f"{where}: {key} can't be searched: all trials have the same data and resources")
