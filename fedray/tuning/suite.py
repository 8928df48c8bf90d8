"""Reads and runs a suite: a fair comparison of algorithms.

Each algorithm is tuned with the same budget, on a space for this algorithm. Then the best trial of each runs on seeds
that no trial had, and these runs are compared. A suite is a file:

about: what is compared
base: {data.source: sample, run.rounds: 40}      # the same for all algorithms
space: {train.lr: {loguniform: [0.003, 1]}}      # searched for all algorithms
algorithms: [fedavg, fedprox, ../mine.yaml]      # space files, by name or path
baseline: fedavg                                 # the others are compared with it; the first one unless set
seeds: 3                                         # on so many fresh seeds the winners run again
tune: {trials: 8}                                # the keys of TuneConfig, for each algorithm

An algorithm's space file sets or searches the hyper-parameters of the algorithm, ``algorithm.*``, and of the optimizers
(:data:`OF_OPTIMIZERS`), except for keys that the suite sets or searches for all algorithms. All other keys come from
the suite alone: data, model, rounds, local work, cohort and batch size. Model head, weighting and public set are the
same for all, so that only the algorithm differs (:func:`_share_settings`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from fedray.config import ScheduleConfig, Section, Whole, assign, check, dump_yaml, flat, load, read_file
from fedray.errors import UserError, near_miss
from fedray.remote.fetching import fetched
from fedray.remote.mirror import mirrored
from fedray.tuning.driver import load_custom, run_sweeps, start_ray
from fedray.tuning.finals import Final, FinalRuns, label_of
from fedray.tuning.outputs import fetched_sweep
from fedray.tuning.settings import section
from fedray.tuning.space import first_of
from fedray.tuning.spec import (
    SPACES,
    SweepSpec,
    find_file,
    known_sections,
    known_spaces,
    read_base,
    read_sweeps,
)
from fedray.tuning.view import View
from fedray.util.arguments import override_texts
from fedray.util.files import write_whole
from fedray.util.uris import below, is_uri

if TYPE_CHECKING:
    from fedray.algorithms import Algorithm
    from fedray.tuning.sweep import Sweep

SUITE_RECORD = "suite.yaml"
"""The file that marks the folder of a suite."""

OF_OPTIMIZERS = (
    "train.lr", "train.server_lr", "train.momentum", "train.nesterov", "train.momentum_reset",
    "train.weight_decay", "train.decay_norms_and_biases", "train.grad_clip", "train.lr_decay",
    *(f"train.{rate}_schedule.{key}" for rate in ("lr", "server_lr") for key in ScheduleConfig.model_fields),
)  # fmt: skip
"""Hyper-parameters outside ``algorithm.*`` that an algorithm's space file may set or search in a suite."""


@dataclass(frozen=True)
class Suite:
    """A suite, a fair comparison of algorithms, as read from its file. Each algorithm is tuned by a sweep (a search
    over its hyper-parameters), and the best trial of each sweep runs again on fresh seeds, which no trial has used.

    ``name`` is also the name of the suite's folder. ``specs`` has the sweep of each algorithm, and ``seeds`` is the
    number of fresh seeds. ``baseline`` is one of these sweeps; the best trials of the others are compared with its best
    trial. ``notes`` are lines for the user about settings that are the same for all algorithms, and settings that are
    not.
    """

    name: str
    specs: Sequence[SweepSpec]
    baseline: SweepSpec
    seeds: int
    notes: Sequence[str] = ()

    @property
    def folder(self) -> Path:
        """The absolute path of the suite's folder on this machine, which has the folders of its sweeps."""
        tune = self.specs[0].tune
        return tune.place.absolute() / self.name

    @property
    def uri(self) -> str | None:
        """The URI of the suite's folder if ``tune.output`` is one, and otherwise None."""
        output = self.specs[0].tune.output
        return below(output, self.name) if is_uri(output) else None

    @property
    def finals(self) -> list[Final]:
        """The configurations that run on fresh seeds, which no trial has used: that of the best trial of each sweep,
        and perhaps that of the baseline's best trial a second time, with the public samples distributed among its
        clients.

        Public samples are those on which the server of some algorithms trains. If the suite has such an algorithm, and
        the public samples are taken out of the clients' samples, a baseline that does not use them trains on fewer
        samples. In its second configuration it trains on the same labelled samples as that algorithm.
        """
        finals, base = [Final(spec) for spec in self.specs], self.baseline.base
        is_held_out = base.get("data.public_samples", "auto") not in ("auto", 0)
        is_for_server = base.get("data.public_to", "server") == "server" and not base.get("data.public_overlap")
        if not (is_held_out and is_for_server):
            return finals
        with_public = [spec for spec in self.specs if _algorithm_of(spec).needs_public]
        if with_public and self.baseline not in with_public:
            to_clients = {"data.public_to": "clients"}
            finals.append(
                Final(self.baseline, to_clients, "the public samples divided among its clients", "public-dealt")
            )
        return finals

    def write_record(self) -> None:
        """Writes suite.yaml into the folder of the suite. It names the algorithms, the baseline and the number of fresh
        seeds, so that :func:`suite_of_folder` can read the suite from its folder."""
        algorithms = [label_of(spec) for spec in self.specs]
        record = {"algorithms": algorithms, "baseline": label_of(self.baseline), "seeds": self.seeds}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / SUITE_RECORD, dump_yaml(record))


def suite_of_folder(folder: Path) -> Suite:
    """Returns the suite that has been run in ``folder``, as recorded there, for a report about its results.

    Raises :class:`UserError` if the record of the suite or of one of its sweeps is missing or damaged.
    """
    values = read_file(folder / SUITE_RECORD)
    if not {"algorithms", "baseline", "seeds"} <= values.keys():
        raise UserError(f"{folder / SUITE_RECORD} is damaged: it lacks algorithms, baseline or seeds")
    specs = {label: read_sweeps(folder / label)[0] for label in values["algorithms"]}
    return Suite(folder.absolute().name, list(specs.values()), specs[values["baseline"]], values["seeds"])


def fetched_suite(suite: Suite) -> Suite:
    """If the suite's ``tune.output`` is a URI, downloads its results to the user's cache, so that tables can be made of
    them, and returns ``suite`` with the downloaded folder as its folder. Another suite is returned as it is."""
    if suite.uri is None:
        return suite
    fetched(suite.uri)
    specs = [fetched_sweep(spec) for spec in suite.specs]
    return replace(suite, specs=specs, baseline=specs[list(suite.specs).index(suite.baseline)])


class _Seeds(Section):
    seeds: Whole = Field(3, ge=1, le=1000)


def known_suites() -> dict[str, Path]:
    """Returns the paths of the suite files (comparisons of algorithms) that come with fedray, by the names that
    ``fedray tune --suite`` accepts."""
    return {path.stem: path for path in sorted((SPACES / "suites").glob("*.yaml"))}


def read_suite(name: str | Path, overrides: Iterable[str] = ()) -> Suite:
    """Reads a suite (a fair comparison of algorithms) from its file. ``name`` is the file's path, or the name of a
    suite that comes with fedray.

    ``overrides`` are texts ``key=value`` that replace keys of the suite's base or of ``tune.*`` for all algorithms.
    Raises :class:`UserError` if there is a mistake in a file or the overrides.
    """
    path = find_file(name, known_suites(), "suite")
    values, where = read_file(path), f"{path}: "
    known_sections(values, ("about", "base", "space", "algorithms", "baseline", "seeds", "tune"), where)
    algorithms = values.get("algorithms")
    if not isinstance(algorithms, list) or not algorithms:
        raise UserError(f"{where}algorithms must list at least one space file, by path or name")
    seeds = check(_Seeds, {"seeds": values.get("seeds", 3)}, where).seeds
    overridden: dict[str, Any] = {}
    for override in override_texts(overrides):
        assign(overridden, override)
    overridden["tune"] = dict(section(overridden, "tune", ""))
    tune = dict(section(values, "tune", where))
    own_name = tune.pop("name", None) or path.stem
    suite_name = overridden["tune"].pop("name", None) or own_name
    common = _Common(
        read_base(values.get("base"), path, where),
        section(values, "space", where),
        tune,
        flat(overridden),
    )
    if "algorithm.name" in common.base or "algorithm.name" in common.overrides:
        raise UserError(f"{where}algorithm.name comes from each space file: leave it out of what a suite has in common")
    sweeps = [_sweep_of_algorithm(str(each), f"{suite_name}/", common, path) for each in algorithms]
    specs = [spec for spec, _ in sweeps]
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
    specs, notes = _share_settings(specs)
    notes += [*_notes_on_optimizers(specs, common), *_notes_on_dropped(specs, [dropped for _, dropped in sweeps])]
    return Suite(suite_name, specs, specs[labels.index(baseline)], seeds, notes)


@dataclass(frozen=True)
class _Common:
    """The settings in a suite's file that all algorithms share: its sections base, space and tune. ``overrides`` are
    the keys that the command line sets."""

    base: Mapping[str, Any]
    space: Mapping[str, Any]
    tune: Mapping[str, Any]
    overrides: Mapping[str, Any]

    def leaves(self, key: str) -> bool:
        """Returns whether the suite leaves ``key``, a dotted key, to the space file of each algorithm, which may then
        set or search it. This is so if the key is a hyper-parameter of an algorithm or of an optimizer, and if the
        suite's file and the command line neither set nor search it."""
        is_of_algorithm = key.startswith("algorithm.") or key in OF_OPTIMIZERS
        return is_of_algorithm and not any(key in keys for keys in (self.base, self.space, self.overrides))

    def left_of(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those items of ``keys``, a dict by dotted key, that the suite leaves to the space file of each
        algorithm."""
        return {key: value for key, value in keys.items() if self.leaves(str(key))}


def _sweep_of_algorithm(name: str, prefix: str, common: _Common, suite: Path) -> tuple[SweepSpec, list[str]]:
    """Returns the sweep of one algorithm in a suite, and the keys that the algorithm's space file searches but the
    sweep does not.

    ``name`` is the path or name of the space file, ``prefix`` the suite's name with a slash, and ``suite`` the path of
    the suite's file, beside which the space file is looked for first.
    """
    beside = suite.parent / name
    path = find_file(beside if beside.is_file() else name, known_spaces(), "space file")
    values, where = read_file(path), f"{path}: "
    raw_spaces = section(values, "spaces", where)
    spaces = {str(each): section(raw_spaces, each, where) for each in raw_spaces}
    sweep = {
        "base": {**common.left_of(read_base(values.get("base"), path, where)), **common.base},
        "spaces": {each: {**common.left_of(space), **common.space} for each, space in spaces.items()},
        "first": [left for each in first_of(values, where) if (left := common.left_of(each))],
        "tune": {**common.tune, "name": prefix + path.stem},
    }
    (spec,) = read_sweeps(sweep, [f"{key}={json.dumps(value)}" for key, value in common.overrides.items()])
    dropped = [key for key in spaces[str(spec.tune.space)] if key not in spec.raw_space]
    # nor is a key searched if it depends on one of these keys, and the suite's value does not meet its condition
    dropped += [
        each.key
        for each in spec.space.parameters
        if any(key in dropped and key in spec.base and spec.base[key] not in allowed for key, allowed in each.when)
    ]
    return spec, [*dropped, *(["environments"] if values.get("environments") else [])]


def _algorithm_of(spec: SweepSpec) -> type[Algorithm]:
    from fedray.algorithms import find_algorithm

    return find_algorithm(load(spec.base).algorithm.name)


def _share_settings(specs: Sequence[SweepSpec]) -> tuple[list[SweepSpec], list[str]]:
    """Returns the sweeps of a suite with the same model head, weighting and public set, as far as the suite does not
    set these.

    With ``auto``, some algorithms put a projection head on the model, weight clients as in their paper, or hold out
    samples for the server. In a suite all get the smallest head with which each can work, weights by numbers of
    samples, and the data source's public set if any algorithm needs one. The second value has a line for the user about
    each setting that some of the algorithms would not have by default.
    """
    from fedray.data.sources.source import source_of
    from fedray.models.heads import DEFAULT

    algorithms = {label_of(spec): _algorithm_of(spec) for spec in specs}
    with_head = [label for label, each in algorithms.items() if each.needs_head != "nothing"]
    uniform = [label for label, each in algorithms.items() if each.weighting != "samples"]
    with_public = [label for label, each in algorithms.items() if each.needs_public]
    head = max((each.needs_head for each in algorithms.values()), key=list(DEFAULT).index)
    why = {
        "model.head": f"because {' and '.join(with_head)} can't do without" if with_head else "",
        "train.weighting": f"although the papers of {', '.join(uniform)} have uniform weights" if uniform else "",
        "data.public_samples": "held out of the clients' samples because the server of "
        f"{' and '.join(with_public)} trains on them" if with_public else "",
    }  # fmt: skip
    common: dict[str, Any] = {"model.head": DEFAULT[head], "train.weighting": "samples", "data.public_samples": 0}
    common = {key: common[key] for key in common if not any(key in {**each.base, **each.raw_space} for each in specs)}
    if with_public and "data.public_samples" in common:
        config = load(specs[0].base)
        common["data.public_samples"] = source_of(config.data, config.task).public_by_default
    notes = [
        f"{key}={value} for all algorithms, {why[key]}; {key}=auto gives each algorithm what it has by itself"
        for key, value in common.items()
        if why[key]
    ]
    return [replace(spec, base={**spec.base, **common}) for spec in specs], notes


def _notes_on_optimizers(specs: Sequence[SweepSpec], common: _Common) -> list[str]:
    """Returns lines for the user of a suite: one for each hyper-parameter of the optimizers that some space files set
    or search, with its value for each algorithm."""
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
            notes.append(f"{key} comes from each algorithm's space file: {'; '.join(parts)}")
    return notes


def _notes_on_dropped(specs: Sequence[SweepSpec], dropped: Sequence[Sequence[str]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for spec, keys in zip(specs, dropped, strict=True):
        for key in keys:
            found.setdefault(key, []).append(label_of(spec))
    shown = "; ".join(f"{key} of {', '.join(labels)}" for key, labels in found.items())
    return [f"not searched, because the suite decides it, although space files search it: {shown}"] if shown else []


def run_suite(
    suite: Suite, view: View | None = None, retry_failed: bool = False
) -> Literal["completed", "incomplete", "interrupted"]:
    """Runs a suite to its end, or continues one that was stopped or killed: first the search over the hyper-parameters
    of each algorithm, then the best trial of each on seeds that no trial has used.

    Args:
        suite: The suite, as :func:`read_suite` returns it.
        view: Shows the progress; None shows nothing.
        retry_failed: Whether trials that failed in an earlier call run once more.

    Returns:
        "completed" if the best trial of every algorithm has run on all new seeds. "incomplete" if some algorithm has no
        trial that completed with finite values, or if a run on a new seed failed; ``view`` shows which, and the next
        call tries the failed runs again. "interrupted" if the user stopped it.

    Raises:
        UserError: The search is not possible as it was asked for.
    """
    view = view or View(quiet=True)
    if suite.uri is None:
        return _run_suite(suite, view, retry_failed)
    with mirrored(suite.uri, suite.folder, load(suite.specs[0].base).run.output_timeout, view.say):
        return _run_suite(suite, view, retry_failed)


def _run_suite(suite: Suite, view: View, retry_failed: bool) -> Literal["completed", "incomplete", "interrupted"]:
    finals: list[FinalRuns] = []
    for line in suite.notes:
        view.say(f"{suite.name}: {line}")

    def final_runs(sweeps: Sequence[Sweep]) -> Sequence[FinalRuns]:
        # not before the sweeps could be opened, or a suite that is refused would replace the record of another
        suite.write_record()
        sweep_of = {sweep.name: sweep for sweep in sweeps}
        finals.extend(FinalRuns(sweep_of[final.spec.name], final, suite.seeds, view) for final in suite.finals)
        return finals

    with start_ray(suite.specs, view) as start:
        results = run_sweeps(suite.specs, load_custom(suite.specs[0]), start, view, retry_failed, final_runs)
    if any(result.interrupted for result in results):
        return "interrupted"
    is_complete = all(result.best for result in results) and not any(each.failures for each in finals)
    return "completed" if is_complete else "incomplete"
